//! A server refuses the sessions of pgapace from the moment on in which writes have moved.

use testbed::{Pair, wait_until};

use super::arena::DB;
use super::{DDL, LATE, value};
use crate::support::{PATIENCE, Tool, must, wait_for_event};

/// People close the doors of the old side at that moment. The process that applies turns round, and is refused.
#[test]
fn the_way_back_waits_until_the_old_side_accepts_its_sessions() {
    let pair = must(Pair::start(18, 18));
    let (old, new) = (&pair.publisher, &pair.subscriber);
    for cluster in [old, new] {
        must(cluster.sql(DB, &format!("CREATE ROLE gated LOGIN SUPERUSER; {DDL}")));
    }
    must(old.sql(DB, "CREATE PUBLICATION pub FOR TABLE orders"));
    must(new.sql(DB, "CREATE PUBLICATION pgapace_back FOR TABLE orders"));
    let [there, here] =
        [old, new].map(|cluster| cluster.conninfo(DB).replace("user=postgres", "user=gated"));
    let tool = Tool::new(there, here, "shop");
    let directory = must(tempfile::tempdir());
    let [opens, closed] = ["opens", "closed"].map(|name| directory.path().join(name));
    let mut process = tool.start(directory.path().join("run.log"));
    must(wait_for_event(&mut process, "streaming", PATIENCE));

    let open = format!(
        "touch {}; while ! test -e {}; do sleep 0.05; done",
        opens.display(),
        closed.display()
    );
    let verb = || tool.finish("switchover", &["--go", "--open", &open, "--deadline", LATE]);
    let done = std::thread::scope(|scope| {
        let verb = scope.spawn(verb);
        let began = wait_until(PATIENCE, "the command of --open", || {
            Ok(opens.exists() || verb.is_finished())
        });
        let closes = began.and_then(|()| old.sql("template1", "ALTER ROLE gated NOLOGIN"));
        must(std::fs::write(&closed, ""));
        must(closes);
        must(verb.join().map_err(|_| "the verb panicked"))
    });
    done.expect(0, &[]);
    let not_known =
        "whether the way back, shop_back, is applied is not known: the old side refuses";
    assert!(done.stdout.contains(not_known), "{}", done.stdout);
    must(wait_for_event(&mut process, "applies_way_back", PATIENCE));
    must(wait_for_event(&mut process, "run_failed", PATIENCE));
    assert!(process.log().contains("is not permitted to log in"), "{}", process.log());

    must(old.sql("template1", "ALTER ROLE gated LOGIN"));
    must(new.sql(DB, "INSERT INTO orders (client, n) VALUES (1, 1)"));
    let arrived = wait_until(PATIENCE, "the row to arrive", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(value(old, DB, "SELECT count(*) FROM orders") == "1")
    });
    arrived.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    must(process.terminate());
    must(process.wait(PATIENCE));
}
