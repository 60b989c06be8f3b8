//! Runs the seeds of the fuzz target without a fuzzer.

use std::fs;
use std::path::Path;

use crate::exercise::exercise;

#[test]
fn every_seed_of_the_fuzz_corpus_passes() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/decode");
    let seeds: Vec<_> = fs::read_dir(&corpus)
        .unwrap_or_else(|error| panic!("{}: {error}", corpus.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(seeds.len() >= 10, "the seeds are missing from {}", corpus.display());
    for seed in seeds {
        exercise(&fs::read(&seed).unwrap());
    }
}
