//! The state of a subscription in schema `pgapace` of the subscriber: its row, its tables, its
//! progress.

pub(crate) mod adoption;
pub(crate) mod advisory_lock;
pub(crate) mod conflicts;
pub(crate) mod error_detail;
pub(crate) mod events;
pub(crate) mod exposed;
pub(crate) mod figures;
pub(crate) mod heartbeat;
pub(crate) mod membership;
mod migrations;
pub(crate) mod ownership;
pub(crate) mod prepared;
pub(crate) mod privileges;
pub(crate) mod progress;
pub(crate) mod published;
mod relations;
pub(crate) mod repertoire;
pub(crate) mod schema;
pub(crate) mod statistics;
mod subscription;
mod subscription_changes;
pub(crate) mod verification;
pub(crate) mod workers_in_use;

use engine::table_name::TableName;

use crate::error::Failure;
pub(crate) use relations::{
    RelationMode, RelationState, RelationsByName, copied_at, forget, forget_relation, forget_sql,
    forget_superseded_sql, forget_verifications, modes, relations, relations_and,
    relations_and_published, relations_by_name, set_modes,
};
pub(crate) use subscription::{
    NewSubscription, Phase, SchemaCopy, Subscription, SubscriptionId, all, begin_anew, create,
    find, find_and, find_existing, find_in_any, find_of_other, missing,
};
pub(crate) use subscription_changes::{
    LastRun, Manner, clear_skip, follow_timeline, last_run, set_copying, set_disabled,
    set_publications, set_rebasing, set_run, set_schema_copy, set_skip, set_slot_made_at,
    set_streaming, set_timeline, skip_found,
};

/// The text form of an array of names.
pub(crate) fn name_array<S: AsRef<str>>(names: &[S]) -> String {
    let quoted: Vec<_> = names
        .iter()
        .map(|name| format!("\"{}\"", name.as_ref().replace('\\', "\\\\").replace('"', "\\\"")))
        .collect();
    format!("{{{}}}", quoted.join(","))
}

/// The schemas and the names of tables, as two arrays in the same order.
pub(crate) fn table_name_arrays<'t>(
    tables: impl IntoIterator<Item = &'t TableName>,
) -> [String; 2] {
    let (schemas, names): (Vec<_>, Vec<_>) =
        tables.into_iter().map(|table| (&table.schema, &table.name)).unzip();
    [name_array(&schemas), name_array(&names)]
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the state in schema pgapace")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing the state in schema pgapace")
}
