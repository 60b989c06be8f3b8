//! WAL of the publisher that nobody flushes: readers have pruned pages, or a transaction of another database is open.

use super::arena::{Arena, DB, Hold, Side};
use super::{LATE, value};
use crate::support::{PATIENCE, UnflushedWal, must};

/// The flushed WAL ends in the middle of a record. Where a slot is read up to there, the server waits for the rest.
#[test]
fn no_step_waits_until_the_publisher_flushes_its_wal() {
    let mut arena = Arena::start(18, 18);
    let mut before = Some(must(UnflushedWal::make(&arena.pair.publisher)));
    let new = arena.cluster(Side::New);
    let mut hold = Hold::install(new, "sequences");
    let program = arena.tool.program("switchover").args(["--go", "--deadline", LATE]);
    let mut verb = must(program.spawn_logged(arena.directory.path().join("switchover.log")));
    assert!(Hold::wait(new, &mut verb), "{}", verb.log());
    before.take();
    // From here on, the verb looks for late changes.
    let during = must(UnflushedWal::make(&arena.pair.publisher));
    hold.release();
    let ended = verb.wait(PATIENCE);
    ended.unwrap_or_else(|error| panic!("{error}\n{}", verb.log()));
    assert_eq!(verb.exit_code(), Some(0), "{}", verb.log());
    drop(during);
    assert_eq!(value(new, DB, "SHOW default_transaction_read_only"), "off");
    arena.side = Side::New;
    arena.expect_alive("unflushed WAL");
}
