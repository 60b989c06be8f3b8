//! All deferred changes come back, and no others.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;

use bytes::Bytes;
use pgoutput::{
    ColumnsBuilder, Insert, Message, RelId, RelIdsBuilder, Relation, ReplicaIdentity, Truncate,
    TupleBuilder, TypeOid, builder,
};
use proptest::prelude::*;

use super::*;
use crate::relation::RelationCache;
use crate::transaction::Location;

#[derive(Default)]
struct Files(HashMap<SpoolId, VecDeque<Vec<u8>>>);

impl Files {
    fn carry_out(&mut self, commands: &mut Vec<SpoolCommand>) {
        for command in commands.drain(..) {
            match command {
                SpoolCommand::Append { id, block } => {
                    self.0.entry(id).or_default().push_back(block);
                }
                SpoolCommand::Discard { id } => {
                    assert!(self.0.remove(&id).expect("known").is_empty(), "all of it was read");
                }
                SpoolCommand::Truncate { .. } => panic!("nothing is cut"),
            }
        }
    }
}

impl BlockSource for Files {
    type Error = Infallible;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, Infallible> {
        let block = self.0.get_mut(&id).expect("known").pop_front().expect("not read yet");
        Ok(Bytes::from(block))
    }

    fn spooled_from(&mut self, _: SpoolId, _: u64) -> Result<Bytes, Infallible> {
        panic!("deferred changes are read in order");
    }

    fn out_of_memory(bytes: usize) -> Self::Error {
        panic!("no memory for {bytes} bytes");
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}

fn relations() -> Vec<Arc<RemoteRelation>> {
    let mut cache = RelationCache::default();
    let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1);
    ["mine", "other"]
        .iter()
        .zip(1..)
        .map(|(name, id)| {
            cache.update(&Relation {
                xid: None,
                id: RelId(id),
                schema: "public",
                name,
                replica_identity: ReplicaIdentity::Default,
                columns: columns.columns(),
            })
        })
        .collect()
}

/// A change in a transaction: of one relation, or of both.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    Insert(usize, u32),
    Truncate,
}

fn push(part: &mut TransactionPart, step: Step, relations: &[Arc<RemoteRelation>]) {
    let chunk = match step {
        Step::Insert(relation, id) => {
            let tuple = TupleBuilder::new().text(id.to_string());
            let relation = RelId(u32::try_from(relation).expect("small") + 1);
            Bytes::from(builder::encoded(&Message::Insert(Insert {
                xid: None,
                relation,
                new: tuple.tuple(),
            })))
        }
        Step::Truncate => {
            let ids = RelIdsBuilder::new().id(RelId(1)).id(RelId(2));
            Bytes::from(builder::encoded(&Message::Truncate(Truncate {
                xid: None,
                cascade: false,
                restart_identity: false,
                relations: ids.rel_ids(),
            })))
        }
    };
    let at = Location { chunk: &chunk, offset: 0, length: chunk.len() };
    match step {
        Step::Insert(relation, _) => part.push(at, &relations[relation]),
        Step::Truncate => part.push_truncate(at, relations),
    }
}

/// Defers those changes of a part that touch `mine`.
fn defer(
    deferred: &mut DeferredChanges,
    part: &TransactionPart,
    block_bytes: usize,
    commands: &mut Vec<SpoolCommand>,
) {
    let is_mine = |change| match part.touched(change) {
        Touched::One(_, relation) => relation.name.name == "mine",
        Touched::Many(_) => true,
    };
    for change in (0..part.len()).filter(|change| is_mine(*change)) {
        deferred.push(part, change, block_bytes, commands).expect("memory");
    }
    if let Some(end) = part.end_lsn.filter(|_| deferred.is_writing()) {
        deferred.end(end, block_bytes, commands);
    }
}

/// The changes of a part, as they are in the messages.
fn steps(part: &TransactionPart) -> Vec<Step> {
    (0..part.len())
        .map(|change| match part.change(change).expect("decodes again") {
            (Message::Insert(insert), Touched::One(_, relation)) => {
                let Some(pgoutput::Column::Text(text)) = insert.new.columns().next() else {
                    panic!("no text")
                };
                let id = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                Step::Insert(usize::from(relation.name.name == "other"), id.expect("a number"))
            }
            (Message::Truncate(_), Touched::Many(touched)) => {
                let names: Vec<_> = touched
                    .iter()
                    .map(|i| part.relations()[*i as usize].name.name.as_str())
                    .collect();
                assert_eq!(names, ["mine", "other"]);
                Step::Truncate
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..2usize, any::<u32>()).prop_map(|(relation, id)| Step::Insert(relation, id)),
        1 => Just(Step::Truncate),
    ]
}

proptest! {
    /// Transactions of any size, in any number of parts, read while others are written, in parts of
    /// another size, through blocks of any size.
    #[test]
    fn deferred_changes_come_back_as_they_were(
        transactions in prop::collection::vec(
            (prop::collection::vec(step(), 0..12), 1..5usize, 0..3usize),
            1..30,
        ),
        block_bytes in 1..400usize,
        changes in 1..6usize,
    ) {
        let relations = relations();
        let limits = PartLimits { changes, ..PartLimits::default() };
        let mut files = Files::default();
        let mut commands = Vec::new();
        let mut deferred = DeferredChanges::new(3);
        let mut expected = Vec::new();
        let mut got: Vec<(TransactionHead, Lsn, Vec<Step>)> = Vec::new();
        let mut open: Option<Vec<Step>> = None;
        let mut read = |deferred: &mut DeferredChanges, files: &mut Files, times: usize| {
            for _ in 0..times {
                let mut commands = Vec::new();
                let part = deferred.next_part(files, limits, &mut commands).expect("readable");
                files.carry_out(&mut commands);
                let Some(part) = part else { return };
                assert!(part.len() <= changes);
                assert_eq!(part.first, open.is_none());
                let mut all = open.take().unwrap_or_default();
                all.extend(steps(&part));
                match part.end_lsn {
                    Some(end) => got.push((part.head, end, all)),
                    None => open = Some(all),
                }
            }
        };
        for (number, (changes, part_size, reads)) in transactions.into_iter().enumerate() {
            let lsn = (number as u64 + 1) * 100;
            let xid = Xid(u32::try_from(number).expect("small") + 1);
            let head =
                TransactionHead { commit_lsn: Lsn(lsn), commit_time: Timestamp(7), xid };
            let mut part = TransactionPart::new(head, true);
            for change in &changes {
                if part.len() == part_size {
                    let next = TransactionPart::new(head, false);
                    let full = std::mem::replace(&mut part, next);
                    defer(&mut deferred, &full, block_bytes, &mut commands);
                    files.carry_out(&mut commands);
                    // Nothing of a transaction that has not ended.
                    read(&mut deferred, &mut files, reads);
                }
                push(&mut part, *change, &relations);
            }
            part.end_lsn = Some(Lsn(lsn + 8));
            defer(&mut deferred, &part, block_bytes, &mut commands);
            files.carry_out(&mut commands);
            let mine: Vec<_> =
                changes.into_iter().filter(|s| !matches!(s, Step::Insert(1, _))).collect();
            if !mine.is_empty() {
                expected.push((head, Lsn(lsn + 8), mine));
            }
            read(&mut deferred, &mut files, reads);
        }
        read(&mut deferred, &mut files, usize::MAX);
        prop_assert_eq!(&got, &expected);
        prop_assert!(deferred.is_empty() && deferred.unread() == 0);
        files.carry_out(&mut deferred.discard().collect());
        prop_assert!(files.0.is_empty(), "files are left");
    }
}

/// Blocks of files and of memory go, and a transaction that is open.
#[test]
fn after_everything_was_discarded_only_later_changes_come_back() {
    let relations = relations();
    let (mut files, mut commands) = (Files::default(), Vec::new());
    let mut deferred = DeferredChanges::new(3);
    let mut change = |deferred: &mut DeferredChanges, files: &mut Files, lsn, ends: bool| {
        let head = TransactionHead { commit_lsn: Lsn(lsn), commit_time: Timestamp(7), xid: Xid(7) };
        let mut part = TransactionPart::new(head, true);
        push(&mut part, Step::Insert(0, 1), &relations);
        part.end_lsn = ends.then_some(Lsn(lsn + 8));
        defer(deferred, &part, 100, &mut commands);
        files.carry_out(&mut commands);
    };
    (1..9).for_each(|lsn| change(&mut deferred, &mut files, lsn * 100, true));
    change(&mut deferred, &mut files, 900, false);
    assert_eq!((deferred.last(), files.0.len()), (Some(Lsn(900)), 1));
    let mut discards = Vec::new();
    deferred.clear(&mut discards);
    for command in discards {
        let SpoolCommand::Discard { id } = command else { panic!("{command:?}") };
        assert!(files.0.remove(&id).is_some());
    }
    assert!(files.0.is_empty() && deferred.is_empty() && !deferred.is_writing());
    assert_eq!((deferred.last(), deferred.unread()), (None, 0));
    change(&mut deferred, &mut files, 1000, true);
    let part = deferred.next_part(&mut files, PartLimits::default(), &mut Vec::new());
    let part = part.expect("readable").expect("a transaction");
    assert_eq!((part.head.commit_lsn, steps(&part)), (Lsn(1000), vec![Step::Insert(0, 1)]));
    assert!(deferred.is_empty() && deferred.unread() == 0);
}
