//! The protocol as a whole: what is encoded is decoded, and what is not a message is refused.

mod corpus;
mod exercise;
mod hostile;
mod round_trip;
mod strategy;
