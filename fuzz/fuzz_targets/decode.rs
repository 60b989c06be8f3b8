//! Any bytes as a replication connection, for each way of streaming.
//!
//! `mkdir -p fuzz/corpus.local`
//! `cargo +nightly fuzz run decode fuzz/corpus.local fuzz/corpus/decode`
//!
//! What is found goes to `corpus.local`; `corpus/decode` holds the seeds, which are written by
//! `cargo run -p pgoutput --example seed_corpus` and tried by its tests.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/pgoutput/tests/protocol/exercise.rs"]
mod exercise;

fuzz_target!(|connection: &[u8]| exercise::exercise(connection));
