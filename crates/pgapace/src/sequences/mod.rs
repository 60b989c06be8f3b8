//! Sequences. The stream does not carry them, so pgapace sets them when it copies tables, and when
//! the user asks for it, before the subscriber takes over from the publisher.
//!
//! [`read`] reads the values on the publisher, and [`set`] sets them on the subscriber. Between the
//! two, the caller waits until everything that had committed when they were read is applied
//! (`crate::lag`). Otherwise a TRUNCATE … RESTART IDENTITY that is still in the stream would reset
//! them later.
//!
//! Publications do not tell which sequences to set, so they are selected by schema. They are all
//! sequences of schemas that are published or contain a published table, those that published
//! tables own or use in other schemas, and, with FOR ALL TABLES, all of the database.
//!
//! [`counterpart`] finds the sequences of the subscriber that belong to the same columns: tables that were renamed or
//! swapped have sequences of other names.

mod counterpart;
mod publisher;
mod report;
mod subscriber;

pub(crate) use publisher::{
    Chosen, PublisherSequence, PublisherSequences, no_sequence, read, unknown,
};
pub(crate) use report::{Report, SequenceState};
pub(crate) use subscriber::{SetOptions, set};
