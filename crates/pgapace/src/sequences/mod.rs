//! Sequences: the stream does not carry them, so they are set when tables are copied, and again when
//! the user asks for it, before the subscriber takes over.
//!
//! [`read`] takes the values of the publisher; [`set`] carries them over. In between belongs a wait
//! until everything is applied that had committed when they were read (`crate::lag`): a TRUNCATE …
//! RESTART IDENTITY that is still in the stream would set them back afterwards.
//!
//! What is published says nothing about sequences, so they are taken by schema: all of those of the
//! schemas that have a published table or are published, those that published tables own or use
//! elsewhere, and all of the database with FOR ALL TABLES.

mod publisher;
mod report;
mod subscriber;

pub(crate) use publisher::{Chosen, PublisherSequence, read};
pub(crate) use report::{Report, SequenceState};
pub(crate) use subscriber::{SetOptions, set};
