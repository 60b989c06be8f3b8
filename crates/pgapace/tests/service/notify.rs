//! Messages to a service manager, with a notify socket of the test's own.

use std::cell::RefCell;
use std::os::unix::net::UnixDatagram;

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must};

/// Everything that arrived, each datagram as its lines.
struct Told {
    socket: UnixDatagram,
    all: RefCell<Vec<String>>,
}

impl Told {
    fn count(&self, line: &str) -> usize {
        let mut buffer = [0; 4096];
        let mut all = self.all.borrow_mut();
        while let Ok(length) = self.socket.recv(&mut buffer) {
            all.extend(String::from_utf8_lossy(&buffer[..length]).lines().map(str::to_owned));
        }
        all.iter().filter(|told| told.starts_with(line)).count()
    }

    #[track_caller]
    fn wait_for(&self, line: &str, count: usize) {
        let waited = wait_until(PATIENCE, line, || Ok(self.count(line) >= count));
        waited.unwrap_or_else(|error| panic!("{error}: {:?}", self.all.borrow()));
    }
}

#[test]
fn it_is_told_of_copy_stream_reload_and_end() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    case.publisher.sql("INSERT INTO t VALUES (1)");
    let path = case.log_file("notify");
    let told = Told { socket: must(UnixDatagram::bind(&path)), all: RefCell::default() };
    must(told.socket.set_nonblocking(true));
    let mut locker = case.subscriber.connect();
    must(locker.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE"));
    let program = case.tool.program("run").env("NOTIFY_SOCKET", &path);
    let program = program.env("WATCHDOG_USEC", "60000000");
    let mut run = must(program.spawn_logged(case.log_file("run")));
    told.wait_for("STATUS=starting", 1);
    // A reload does not complete the start.
    must(run.hang_up());
    must(wait_until(PATIENCE, "the reload", || Ok(run.events("configuration_reloaded") > 0)));
    assert_eq!((told.count("READY=1"), told.count("RELOADING=1")), (0, 0));
    must(locker.batch_execute("COMMIT"));
    told.wait_for("READY=1", 1);
    told.wait_for("STATUS=streaming, lag ", 1);
    told.wait_for("WATCHDOG=1", 1);
    must(run.hang_up());
    told.wait_for("READY=1", 2);
    assert_eq!((told.count("RELOADING=1"), told.count("MONOTONIC_USEC=")), (1, 1));
    assert_eq!(told.count("STOPPING=1"), 0);
    case.stop(run);
    assert_eq!((told.count("STOPPING=1"), told.count("READY=1")), (1, 2));
}
