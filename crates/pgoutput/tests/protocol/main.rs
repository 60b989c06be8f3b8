//! Tests of the whole protocol: encoded messages are decoded, and other input is rejected.

mod corpus;
mod exercise;
mod hostile;
mod round_trip;
mod strategy;
