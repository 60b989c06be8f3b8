//! Random transactions with savepoints, streamed side by side, against a model that knows what each
//! of them finally contains.

use proptest::prelude::*;

use pgoutput::{
    ColumnsBuilder, Lsn, Message, RelId, RelIdsBuilder, Relation, ReplicaIdentity,
    RollbackPrepared, Timestamp, Truncate, TypeOid, Xid,
};

use super::model::{Level, Row, Running, rows};
use super::streams::{abort, start, stream_commit, stream_prepare, streamed_insert};
use super::{
    Assembled, Assembler, Committed, PartLimits, Spool, assemble, begin, commit, commit_prepared,
    insert,
};

#[derive(Debug, Clone, Copy)]
enum Step {
    Insert {
        length: usize,
    },
    Truncate,
    /// A change of a table that is not published.
    Unpublished,
    Savepoint,
    Release,
    RollBack {
        levels: usize,
    },
    Commit,
    Abort,
    Prepare,
    Resolve {
        commit: bool,
    },
    Alter,
    Ordinary,
    UnknownAbort,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0usize..60).prop_map(|length| Step::Insert { length }),
        1 => Just(Step::Truncate),
        2 => Just(Step::Unpublished),
        5 => Just(Step::Savepoint),
        3 => Just(Step::Release),
        3 => (1usize..4).prop_map(|levels| Step::RollBack { levels }),
        1 => Just(Step::Commit),
        1 => Just(Step::Abort),
        1 => Just(Step::Prepare),
        1 => any::<bool>().prop_map(|commit| Step::Resolve { commit }),
        1 => Just(Step::Alter),
        1 => Just(Step::Ordinary),
        1 => Just(Step::UnknownAbort),
    ]
}

struct World {
    assembler: Assembler,
    spool: Spool,
    running: Vec<Running>,
    prepared: Vec<(Running, u64)>,
    next_xid: u32,
    lsn: u64,
    version: u32,
    counter: u32,
    spooled_bytes: usize,
}

impl World {
    fn new(limits: PartLimits, transactions: usize) -> Self {
        let mut next_xid = 100;
        let running = (0..transactions).map(|_| Running::new(&mut next_xid)).collect();
        let mut world = Self {
            assembler: Assembler::new(limits),
            spool: Spool::default(),
            running,
            prepared: Vec::new(),
            next_xid,
            lsn: 1000,
            version: 1,
            counter: 0,
            spooled_bytes: limits.spooled_bytes,
        };
        world.announce();
        world
    }

    fn push(&mut self, message: &Message<'_>) -> Assembled {
        let assembled = assemble(&mut self.assembler, message).expect("a possible stream");
        self.check();
        assembled
    }

    fn check(&mut self) {
        self.spool.obey(&mut self.assembler);
        let subtransactions = (self.next_xid - 100) as usize;
        assert!(self.assembler.spooled_bytes() <= self.spooled_bytes + subtransactions * 48);
        let held = self.prepared.iter().map(|(_, lsn)| Lsn(*lsn)).min();
        assert_eq!(self.assembler.oldest_held(), held);
    }

    fn next_lsn(&mut self) -> u64 {
        self.lsn += 16;
        self.lsn
    }

    fn announce(&mut self) {
        for id in [7, 8] {
            let columns = ColumnsBuilder::new().column(true, "id", TypeOid(self.version), -1);
            let relation = Relation {
                xid: None,
                id: RelId(id),
                schema: "public",
                name: "t",
                replica_identity: ReplicaIdentity::Default,
                columns: columns.columns(),
            };
            self.push(&Message::Relation(relation));
        }
    }

    fn step(&mut self, which: usize, step: Step) {
        let which = which % self.running.len();
        match step {
            Step::Insert { length } => {
                let xid = self.enter(which);
                self.counter += 1;
                let text = format!("{}{}", self.counter, "x".repeat(length));
                streamed_insert(&mut self.assembler, xid, &text).expect("fits");
                self.check();
                self.running[which].rows.push((xid, (self.version, text)));
                self.push(&Message::StreamStop);
            }
            Step::Truncate => {
                let xid = self.enter(which);
                let relations = RelIdsBuilder::new().id(RelId(7)).id(RelId(8));
                self.push(&Message::Truncate(Truncate {
                    xid: Some(Xid(xid)),
                    cascade: false,
                    restart_identity: false,
                    relations: relations.rel_ids(),
                }));
                self.running[which].rows.push((xid, (self.version, "truncate".to_owned())));
                self.push(&Message::StreamStop);
            }
            Step::Unpublished => {
                self.running[which].assign_xid(&mut self.next_xid);
            }
            Step::Savepoint => self.running[which].levels.push(Level::default()),
            Step::Release => self.running[which].release(),
            Step::RollBack { levels } => {
                for _ in 0..levels {
                    let top = self.running[which].xid;
                    for subxid in self.running[which].roll_back() {
                        self.push(&abort(top, subxid));
                    }
                }
            }
            Step::Commit => {
                let running = self.end(which);
                if running.sent {
                    let lsn = self.next_lsn();
                    let assembled = self.push(&stream_commit(running.xid, lsn));
                    self.expect(assembled, running, None, lsn);
                }
            }
            Step::Abort => {
                let running = self.end(which);
                let released = running.levels.iter().flat_map(|level| level.released.clone());
                let subxids: Vec<u32> = released.chain([running.xid]).collect();
                for subxid in subxids {
                    self.push(&abort(running.xid, subxid));
                }
            }
            Step::Prepare => {
                let running = self.end(which);
                if running.sent {
                    let lsn = self.next_lsn();
                    let xid = running.xid;
                    self.prepared.push((running, lsn));
                    self.push(&stream_prepare(xid, lsn));
                }
            }
            Step::Resolve { commit } => self.resolve(which, commit),
            Step::Alter => {
                self.version += 1;
                self.announce();
            }
            Step::Ordinary => {
                let lsn = self.next_lsn();
                self.push(&begin(lsn, 1));
                insert(&mut self.assembler, "ordinary").expect("fits");
                assert!(
                    matches!(self.push(&commit(lsn)), Assembled::Part(part) if part.len() <= 1)
                );
            }
            Step::UnknownAbort => {
                self.push(&abort(1, 2));
                let top = self.running[which].xid;
                self.push(&abort(top, 3));
            }
        }
    }

    /// Opens a block for a change. Returns the (sub)transaction that makes it.
    fn enter(&mut self, which: usize) -> u32 {
        let running = &mut self.running[which];
        let xid = running.assign_xid(&mut self.next_xid);
        let first = !std::mem::replace(&mut running.sent, true);
        let message = start(running.xid, first);
        self.push(&message);
        xid
    }

    /// Takes a transaction, and has another one begin in its place.
    fn end(&mut self, which: usize) -> Running {
        let next = Running::new(&mut self.next_xid);
        std::mem::replace(&mut self.running[which], next)
    }

    fn resolve(&mut self, which: usize, commit: bool) {
        if self.prepared.is_empty() {
            return;
        }
        let (running, prepared_at) = self.prepared.remove(which % self.prepared.len());
        let lsn = self.next_lsn();
        if commit {
            let assembled = self.push(&commit_prepared(lsn, running.xid));
            self.expect(assembled, running, Some(Lsn(prepared_at)), lsn);
        } else {
            self.push(&Message::RollbackPrepared(RollbackPrepared {
                flags: 0,
                prepare_end_lsn: Lsn(prepared_at + 8),
                rollback_end_lsn: Lsn(lsn + 8),
                prepare_time: Timestamp(5),
                rollback_time: Timestamp(6),
                xid: Xid(running.xid),
                gid: "g".into(),
            }));
        }
    }

    fn expect(&mut self, assembled: Assembled, running: Running, prepared: Option<Lsn>, lsn: u64) {
        let Assembled::Committed(committed) = assembled else { panic!("{assembled:?}") };
        let Committed { replay, prepared_at } = &committed;
        assert_eq!(*prepared_at, prepared);
        assert_eq!((replay.head().xid, replay.head().commit_lsn), (Xid(running.xid), Lsn(lsn)));
        let parts = self.spool.read(committed);
        let last = parts.len() - 1;
        for (number, part) in parts.iter().enumerate() {
            assert_eq!(part.first, number == 0);
            assert_eq!(part.end_lsn, (number == last).then_some(Lsn(lsn + 8)));
        }
        let read: Vec<Row> = parts.iter().flat_map(rows).collect();
        let expected: Vec<Row> = running.rows.into_iter().map(|(_, row)| row).collect();
        assert_eq!(read, expected);
    }
}

proptest! {
    #[test]
    fn transactions_are_read_without_their_undone_changes(
        steps in prop::collection::vec((0usize..5, step()), 1..300),
        transactions in 1usize..5,
        spooled_bytes in 0usize..3000,
        block_bytes in 1usize..400,
        bytes in 1usize..400,
        changes in 1usize..10,
    ) {
        let limits = PartLimits { bytes, changes, spooled_bytes, block_bytes };
        let mut world = World::new(limits, transactions);
        for (which, step) in steps {
            world.step(which, step);
        }
        for which in 0..transactions {
            world.step(which, Step::Commit);
        }
        while !world.prepared.is_empty() {
            world.resolve(0, true);
        }
        prop_assert_eq!(world.assembler.spooled_bytes(), 0);
        prop_assert!(world.spool.is_empty());
    }
}
