//! Everything about the subscriber: sessions, catalogue, statements that apply changes, and the
//! state that pgapace keeps in schema `pgapace`.

pub(crate) mod catalogue;
pub(crate) mod citus;
pub(crate) mod conflict;
pub(crate) mod constraints;
pub(crate) mod elsewhere;
pub(crate) mod format;
pub(crate) mod key_index;
pub(crate) mod locks;
pub(crate) mod mapping;
pub(crate) mod missing_label;
pub(crate) mod mode;
pub(crate) mod named;
pub(crate) mod oid;
pub(crate) mod origin;
pub(crate) mod other_subscriptions;
pub(crate) mod partitions;
pub(crate) mod replaced_tables;
pub(crate) mod row_values;
pub(crate) mod session;
pub(crate) mod state;
pub(crate) mod statement;
pub(crate) mod storage;
pub(crate) mod tagging;
pub(crate) mod term;
pub(crate) mod type_names;
pub(crate) mod unique;
pub(crate) mod value_text;
pub(crate) mod writer_tag;
