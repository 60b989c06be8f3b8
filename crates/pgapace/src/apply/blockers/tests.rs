//! On real servers: sessions that wait for each other as workers do.

use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::blockers::PREPARED;
use engine::group::GroupSeq;
use testbed::{Cluster, servers};
use wire::{CancelHandle, ConnInfo, Session};

use super::detection::{Blocker, Detector};
use super::{Blockers, Detection, DetectionRequest, FromBlockers};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{SubscriptionId, ownership};

const MAJORS: [u16; 2] = [15, 18];
const OURS: SubscriptionId = SubscriptionId(1);
const OTHER: SubscriptionId = SubscriptionId(2);
const PATIENCE: Duration = Duration::from_secs(20);

fn cluster(major: u16) -> &'static Cluster {
    static SERVERS: [OnceLock<Cluster>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
    let at = MAJORS.iter().position(|known| *known == major).unwrap();
    SERVERS[at].get_or_init(|| {
        Cluster::builder(&servers::find_or_fetch(major).unwrap())
            .setting("max_prepared_transactions", "5")
            .setting("deadlock_timeout", "10min")
            .start()
            .unwrap()
    })
}

struct Bed {
    subscriber: Subscriber,
    monitor: Blockers,
    groups: Vec<(i32, GroupSeq)>,
}

/// A session that runs one statement, perhaps for long.
struct Busy {
    pid: i32,
    cancel: CancelHandle,
    thread: Option<JoinHandle<Session>>,
}

impl Busy {
    fn end(mut self) -> Session {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // After a failed assertion.
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            let _ = self.cancel.cancel();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Bed {
    fn new(major: u16, name: &str) -> Self {
        let cluster = cluster(major);
        cluster.create_database(name).unwrap();
        let tables = "CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 0), (2, 0); \
                      CREATE TABLE u (id int PRIMARY KEY, v int); INSERT INTO u VALUES (1, 0); \
                      CREATE SCHEMA pgapace; CREATE TABLE pgapace.prepared (subscription int, name text)";
        cluster.sql(name, tables).unwrap();
        let info = ConnInfo::parse_with_env(&cluster.conninfo(name), &|_| None, None).unwrap();
        let subscriber = Subscriber::new(info, "bed");
        let session = subscriber.connect(Purpose::Monitor).unwrap();
        let monitor = Blockers::spawn(session, OURS, "bed", Vec::new(), false).unwrap();
        Self { subscriber, monitor, groups: Vec::new() }
    }

    /// A session of a subscription, in a transaction.
    fn session(&self, id: SubscriptionId) -> Session {
        let mut session = self.subscriber.connect(Purpose::Apply).unwrap();
        ownership::join(&mut session, id).unwrap();
        session.simple("BEGIN").unwrap();
        session
    }

    /// One of ours, with the next group.
    fn worker(&mut self) -> Session {
        let session = self.session(OURS);
        let group = GroupSeq(7 + self.groups.len() as u64);
        self.groups.push((session.backend_pid(), group));
        session
    }

    /// A session of a user, in a transaction.
    fn user(&self) -> Session {
        let mut session = self.subscriber.connect(Purpose::Look).unwrap();
        session.simple("BEGIN").unwrap();
        session
    }

    /// Runs a statement that must wait, and returns when it does.
    fn waiting(&self, mut session: Session, sql: &'static str) -> Busy {
        let (pid, cancel) = (session.backend_pid(), session.cancel_handle());
        let thread = std::thread::spawn(move || {
            let _ = session.simple(sql);
            session
        });
        let mut look = self.subscriber.connect(Purpose::Look).unwrap();
        let started = Instant::now();
        let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
        while look.query(&waits, &[]).unwrap().first().unwrap().get(0) == Some("0") {
            assert!(started.elapsed() < PATIENCE && !thread.is_finished(), "{sql} does not wait");
            std::thread::sleep(Duration::from_millis(5));
        }
        Busy { pid, cancel, thread: Some(thread) }
    }

    fn look(&self, pid: i32) -> Vec<Blocker> {
        let session = self.subscriber.connect(Purpose::Monitor).unwrap();
        Detector::new(session, OURS, "bed", false).look(pid).unwrap()
    }

    fn probe(&self) -> Detection {
        self.monitor.request(DetectionRequest(self.groups.clone()));
        match self.monitor.events.recv_timeout(PATIENCE).unwrap() {
            FromBlockers::Detected(detection) => detection,
            FromBlockers::Failed(failure) => panic!("{failure}"),
        }
    }

    fn expect(&self, waits: bool, victims: &[u64]) {
        let victims = victims.iter().copied().map(GroupSeq).collect();
        let found = Detection { oldest: GroupSeq(7), waits, victims };
        assert_eq!(self.probe(), found);
    }
}

/// What waits, what blocks, and the prepared transaction: its gid, and whether it is ours.
type Named<'s> = (i32, i32, Option<(&'s str, bool)>);

fn named(seen: &[Blocker]) -> Vec<Named<'_>> {
    let with_gid = |one| {
        let Blocker { waiting, pid, prepared, .. }: &Blocker = one;
        (*waiting, *pid, prepared.as_ref().map(|found| (&*found.gid, found.is_ours)))
    };
    seen.iter().map(with_gid).collect()
}

fn on_servers(name: &str, body: impl Fn(Bed)) {
    for major in MAJORS {
        body(Bed::new(major, name));
    }
}

#[test]
fn a_later_group_that_holds_the_row_gives_way() {
    on_servers("row", |mut bed| {
        let (oldest, mut later, _third) = (bed.worker(), bed.worker(), bed.worker());
        later.simple("UPDATE public.t SET v = 1 WHERE id = 1").unwrap();
        bed.expect(false, &[]);
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 2 WHERE id = 1");
        bed.expect(true, &[8]);
        later.simple("ROLLBACK").unwrap();
        busy.end();
        bed.expect(false, &[]);
    });
}

/// The oldest waits for a user's ALTER, which waits for a later group: no cycle that the server or
/// one step would show.
#[test]
fn a_users_alter_between_two_groups() {
    on_servers("alter", |mut bed| {
        let (oldest, mut idle, mut later) = (bed.worker(), bed.worker(), bed.worker());
        later.simple("UPDATE public.t SET v = 1 WHERE id = 1").unwrap();
        idle.simple("UPDATE public.u SET v = 1 WHERE id = 1").unwrap();
        let alter = bed.waiting(bed.user(), "ALTER TABLE public.t ADD w int");
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 2 WHERE id = 2");
        bed.expect(true, &[9]);
        // And through one more of ours.
        let idle = bed.waiting(idle, "UPDATE public.t SET v = 3 WHERE id = 3");
        bed.expect(true, &[9]);
        later.simple("ROLLBACK").unwrap();
        let mut alter = alter.end();
        bed.expect(true, &[]);
        alter.simple("COMMIT").unwrap();
        busy.end().simple("COMMIT").unwrap();
        idle.end();
    });
}

/// A row lock is waited for through the queue of those who came before.
#[test]
fn a_queue_for_one_row() {
    on_servers("queue", |mut bed| {
        let (oldest, second, mut third) = (bed.worker(), bed.worker(), bed.worker());
        third.simple("UPDATE public.t SET v = 1 WHERE id = 1").unwrap();
        let second = bed.waiting(second, "UPDATE public.t SET v = 2 WHERE id = 1");
        let user = bed.waiting(bed.user(), "UPDATE public.t SET v = 3 WHERE id = 1");
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 4 WHERE id = 1");
        bed.expect(true, &[8, 9]);
        drop((third, second, user, busy));
    });
}

#[test]
fn others_are_waited_for_and_left_alone() {
    on_servers("others", |mut bed| {
        let (oldest, _later) = (bed.worker(), bed.worker());
        let mut user = bed.user();
        user.simple("UPDATE public.t SET v = 1 WHERE id = 1").unwrap();
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 2 WHERE id = 1");
        bed.expect(true, &[]);
        user.simple("PREPARE TRANSACTION 'stays'").unwrap();
        bed.expect(true, &[]);
        let seen = bed.look(busy.pid);
        assert_eq!(named(&seen), [(busy.pid, PREPARED, Some(("stays", false)))]);
        user.simple("ROLLBACK PREPARED 'stays'").unwrap();
        busy.end();
    });
}

/// A session of a user holds the row of the oldest group, and waits for a transaction that this subscription has
/// prepared: for a row of it, then for its table.
#[test]
fn prepared_transactions_behind_a_session_are_named() {
    on_servers("behind", |mut bed| {
        let (oldest, mut ours, mut user) = (bed.worker(), bed.user(), bed.user());
        ours.simple("SAVEPOINT s; UPDATE public.t SET v = 1 WHERE id = 1; RELEASE s").unwrap();
        ours.simple("PREPARE TRANSACTION 'ours'").unwrap();
        ours.simple("INSERT INTO pgapace.prepared VALUES (2, 'theirs'), (1, 'ours')").unwrap();
        ours.simple("BEGIN; LOCK TABLE public.u IN ROW EXCLUSIVE MODE").unwrap();
        ours.simple("PREPARE TRANSACTION 'theirs'").unwrap();
        user.simple("UPDATE public.t SET v = 2 WHERE id = 2").unwrap();
        for (waits, gid) in [
            ("SELECT FROM public.t WHERE id = 1 FOR UPDATE", ("ours", true)),
            ("LOCK TABLE public.t", ("ours", true)),
            ("LOCK TABLE public.u", ("theirs", false)),
        ] {
            user.simple("SAVEPOINT before").unwrap();
            let waiting = bed.waiting(user, waits);
            let seen = bed.look(waiting.pid);
            assert_eq!(named(&seen), [(waiting.pid, PREPARED, Some(gid))], "{waits}");
            waiting.cancel.cancel().unwrap();
            user = waiting.end();
            user.simple("ROLLBACK TO before").unwrap();
        }
        let waiting = bed.waiting(user, "SELECT FROM public.t WHERE id = 1 FOR UPDATE");
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 3 WHERE id = 2");
        bed.expect(true, &[]);
        let seen = bed.look(busy.pid);
        let through = waiting.pid;
        let expected = [(busy.pid, through, None), (through, PREPARED, Some(("ours", true)))];
        assert_eq!(named(&seen), expected);
        let later: Vec<_> = seen.iter().map(|one| super::ends_later(one, busy.pid)).collect();
        assert_eq!(later, [false, true]);
        assert!(!super::ends_later(&bed.look(through)[0], through), "it waits itself");
        // Only the oldest group waits for the session.
        let shown: Vec<_> = bed.monitor.now().iter().map(|blocker| blocker.pid).collect();
        assert_eq!(shown, [Some(through)]);
        ours.simple("ROLLBACK PREPARED 'ours'; ").unwrap();
        ours.simple("ROLLBACK PREPARED 'theirs'").unwrap();
        waiting.end().simple("ROLLBACK").unwrap();
        busy.end();
    });
}

/// Two subscriptions whose oldest groups wait for later groups of each other: a cycle through two
/// turns that the server knows nothing of.
#[test]
fn a_cycle_through_another_subscription() {
    on_servers("cycle", |mut bed| {
        let (oldest, mut later) = (bed.worker(), bed.worker());
        let (their_oldest, mut their_later) = (bed.session(OTHER), bed.session(OTHER));
        later.simple("UPDATE public.t SET v = 1 WHERE id = 1").unwrap();
        their_later.simple("UPDATE public.t SET v = 1 WHERE id = 2").unwrap();
        let busy = bed.waiting(oldest, "UPDATE public.t SET v = 2 WHERE id = 2");
        bed.expect(true, &[]);
        let their_busy = bed.waiting(their_oldest, "UPDATE public.t SET v = 2 WHERE id = 1");
        bed.expect(true, &[8]);
        drop((later, their_later, their_busy, busy));
    });
}
