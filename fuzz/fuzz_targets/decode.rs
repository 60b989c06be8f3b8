//! Fuzz target: decodes any bytes as a replication connection, for each `streaming` option.
//!
//! `mkdir -p fuzz/corpus.local`
//! `cargo +nightly fuzz run decode fuzz/corpus.local fuzz/corpus/decode`
//!
//! New inputs are written to `corpus.local`. The seeds in `corpus/decode` are written by `cargo run
//! -p pgoutput --example seed_corpus`, and the tests of that crate run them too.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/pgoutput/tests/protocol/exercise.rs"]
mod exercise;

fuzz_target!(|connection: &[u8]| exercise::exercise(connection));
