//! The state of tables that are no longer published.

use engine::table_name::TableName;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::state::published::PreviousReading;
use crate::subscriber::state::{self, RelationState, SubscriptionId};

/// Deletes the state of tables that are no longer published, if nothing of them is here, or if the publisher has
/// `dropped` them: a later table of the name is new. The state of all others is kept: if such a table is published
/// again, changes in between are not in the stream, and [`compare`](crate::subscriber::state::published::compare) finds
/// the gap. A copy that was wanted is made then. What verifications found is deleted: nothing keeps the rows equal.
///
/// If `copies_added` is false, no copy would follow for a table whose state is deleted. So it is kept for every table
/// that has joined, and for one with a wanted copy also if it was dropped. The changes of a dropped table must have been
/// applied, because they would be applied to a later one: the publications were read as without it, and all changes up
/// to there are applied.
///
/// Within a run this cannot be detected, so it is done when a run starts. `states` are the tables of the
/// subscription, `recorded` is how they were published. Returns whether any was deleted.
pub(crate) fn forget_unpublished(
    control: &mut Session,
    id: SubscriptionId,
    published: &[PublishedTable],
    (states, recorded): (&FxHashMap<TableName, RelationState>, &PreviousReading),
    copies_added: bool,
    dropped: impl FnOnce(&[u32]) -> Result<FxHashSet<u32>>,
) -> Result<bool> {
    let published: FxHashSet<_> = published.iter().map(|table| &table.name).collect();
    let (known, oids) = (recorded.unpublished(), recorded.oids());
    let is_here = |relation: &RelationState| {
        if copies_added { relation.holds_rows() } else { relation.has_joined() }
    };
    let gone = states.iter().filter(|(key, _)| !published.contains(key));
    let (kept, mut forgotten): (Vec<_>, Vec<_>) =
        gone.map(|(_, relation)| relation).partition(|relation| is_here(relation));
    let oid = |relation: &RelationState| {
        let key = &relation.name;
        let is_wanted = relation.copy_wanted || relation.requested.is_some();
        let may_be_forgotten = copies_added || known.contains(key) && !is_wanted;
        oids.get(key).copied().filter(|_| may_be_forgotten)
    };
    let asked: Vec<_> = kept.iter().filter_map(|relation| oid(relation)).collect();
    let dropped = if asked.is_empty() { FxHashSet::default() } else { dropped(&asked)? };
    let (lost, kept): (Vec<_>, Vec<_>) = kept
        .into_iter()
        .partition(|relation| oid(relation).is_some_and(|oid| dropped.contains(&oid)));
    forgotten.extend(lost);
    for table in forgotten.iter().map(|relation| &relation.name) {
        tracing::warn!(
            event = "table_unpublished",
            table = table.to_string(),
            "table is no longer published and was removed from the subscription"
        );
        state::forget_relation(control, id, table)?;
    }
    state::forget_verifications(control, id, kept.iter().copied())?;
    for table in kept.iter().map(|relation| &relation.name) {
        if !known.contains(table) {
            tracing::warn!(
                event = "table_unpublished",
                table = table.to_string(),
                "table is no longer published; it will lack changes if it is published again"
            );
        }
    }
    Ok(!forgotten.is_empty())
}
