//! After a switchover, the old side returns to a state from before it. A way back that began there would lack rows.

use std::process::Command;

use testbed::{Stop, wait_until};

use super::arena::{Arena, DB, Side};
use super::{LATE, Slots, expect_equal_soon, rows, switchover, two_way_case, value};
use crate::support::{PATIENCE, Tool, must, one_or_all};

const VERSIONS: [(u16, u16); 2] = [(18, 18), (15, 15)];

/// The slot of the way back is named after it. It may have been dropped already.
const DROP_SLOT: &str = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
                         WHERE slot_name = 'shop_back'";

/// How the old side goes back.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Its storage is restored: it stays on its timeline.
    Storage,
    /// It is recovered from a backup, or a standby that lacks the end is promoted: another timeline.
    Promotion,
}

/// Two servers that were switched over, without a process. The storage of the old side was saved before that.
fn saved(publisher: u16, subscriber: u16) -> Arena {
    let mut arena = Arena::start(publisher, subscriber);
    arena.expect_alive("before the backup");
    must(arena.process.terminate());
    must(arena.process.wait(PATIENCE));
    let old = arena.cluster_mut(Side::Old);
    must(old.set("restore_command", "false"));
    must(old.stop(Stop::Fast));
    must(old.save_storage());
    must(old.start());
    let lost = "INSERT INTO orders (client, n) SELECT 0, generate_series(1, 1000)";
    must(arena.cluster(Side::Old).sql(DB, lost));
    arena.expect_alive("after the backup");
    arena
}

/// Moves writes, and kills the process that applies before it turns round.
fn switch_and_kill(arena: &mut Arena) {
    let open = format!("kill -9 {}", arena.process.pid());
    let moved = arena.verb_when_free(&["--go", "--open", &open, "--deadline", LATE]);
    moved.expect(0, &[]);
    assert!(moved.stdout.contains("nobody applies the way back"), "{}", moved.stdout);
    must(arena.process.wait(PATIENCE));
    arena.side = Side::New;
}

fn go_back(arena: &mut Arena, way: Way) {
    let old = arena.cluster_mut(Side::Old);
    must(old.stop(Stop::Fast));
    must(old.restore_storage());
    if matches!(way, Way::Promotion) {
        // Keep the owner, because the server may run as a different user than the test.
        let [from, to] = ["PG_VERSION", "recovery.signal"].map(|name| old.data_dir().join(name));
        assert!(must(Command::new("cp").arg("-a").args([from, to]).status()).success());
    }
    must(old.start());
    let promoted = "SELECT NOT pg_is_in_recovery()";
    must(wait_until(PATIENCE, "the old side to take writes", || {
        Ok(old.query_one_text(DB, promoted).is_ok_and(|promoted| promoted == "t"))
    }));
}

/// A run with the settings as before ends with this code, and applies nothing.
fn expect_refused(arena: &mut Arena, code: i32, named: &[&str]) {
    let before = rows(arena.cluster(Side::Old), DB);
    // The second one finds what the first one has recorded.
    for _ in 0..2 {
        let log = arena.log("refused");
        let mut process = arena.tool.start(log);
        let ended = process.wait(PATIENCE);
        let ended = ended.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
        let log = process.log();
        assert_eq!(ended.code(), Some(code), "{log}");
        for text in named {
            assert!(log.contains(text), "the log does not contain {text:?}:\n{log}");
        }
        assert_eq!(rows(arena.cluster(Side::Old), DB), before);
    }
}

/// The commands of the hint. Then the process with the settings as before goes on, and writes move back.
fn begin_anew(arena: &mut Arena) {
    must(arena.cluster(Side::New).sql(DB, DROP_SLOT));
    let swapped = Tool {
        publisher: arena.tool.subscriber.clone(),
        subscriber: arena.tool.publisher.clone(),
        name: "shop_back".to_owned(),
        publications: "pgapace_back".to_owned(),
        args: Vec::new(),
    };
    let has_origin = arena.cluster(Side::New).binaries().major() >= 16;
    let origin: &[&str] = if has_origin { &["--origin", "none"] } else { &[] };
    let rebase = ["--slot", "shop_back", "--if-not-empty", "rebase", "--until", "current"];
    swapped.finish("run", &[&rebase[..], origin].concat()).expect(0, &[]);
    for side in [Side::New, Side::Old] {
        arena.go_to(side);
        arena.expect_alive(&format!("writes are on {side:?}"));
        let [old, new] = [Side::Old, Side::New].map(|side| rows(arena.cluster(side), DB));
        assert_eq!(old, new, "{side:?}");
    }
}

/// Waits until the slot of the way back has passed its beginning.
fn wait_until_slot_moves(arena: &Arena) {
    let moved = "SELECT count(*) FROM pg_replication_slots s JOIN pgapace.switchover w USING (slot_name) \
                 WHERE s.confirmed_flush_lsn > w.slot_made_at";
    let waited = wait_until(PATIENCE, "the slot to move", || {
        Ok(value(arena.cluster(Side::New), DB, moved) == "1")
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", arena.process.log()));
}

#[test]
fn a_way_back_whose_state_is_gone_does_not_begin_again() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let mut arena = saved(publisher, subscriber);
        arena.go_to(Side::New);
        arena.expect_alive("the way back is applied");
        wait_until_slot_moves(&arena);
        must(arena.process.terminate());
        must(arena.process.wait(PATIENCE));
        go_back(&mut arena, Way::Storage);
        let named = ["slot \"shop_back\" of the way back has moved to", "HINT:", "rebase"];
        expect_refused(&mut arena, 7, &named);
        begin_anew(&mut arena);
    }
}

#[test]
fn a_way_back_does_not_begin_on_an_old_side_that_lacks_its_own_changes() {
    for &((publisher, subscriber), way) in
        one_or_all(&[(VERSIONS[0], Way::Promotion), (VERSIONS[1], Way::Storage)])
    {
        let mut arena = saved(publisher, subscriber);
        switch_and_kill(&mut arena);
        go_back(&mut arena, way);
        let named = ["is not the publisher of shop that was switched over at", "HINT:", "rebase"];
        expect_refused(&mut arena, 10, &named);
        begin_anew(&mut arena);
    }
}

#[test]
fn a_way_back_whose_slot_was_dropped_does_not_begin() {
    let mut arena = Arena::start(18, 18);
    arena.expect_alive("before the switchover");
    switch_and_kill(&mut arena);
    must(arena.cluster(Side::New).sql(DB, DROP_SLOT));
    let named = ["slot \"shop_back\" of the way back does not exist", "HINT:", "rebase"];
    expect_refused(&mut arena, 7, &named);
    begin_anew(&mut arena);
}

#[test]
fn a_way_back_whose_slot_was_invalidated_does_not_begin() {
    let mut arena = Arena::start(18, 18);
    arena.expect_alive("before the switchover");
    switch_and_kill(&mut arena);
    let new = arena.cluster_mut(Side::New);
    must(new.set("max_slot_wal_keep_size", "1MB"));
    let fill = "SELECT count(pg_logical_emit_message(false, 'fill', repeat('x', 1 << 20))) FROM generate_series(1, 40)";
    let lost = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = 'shop_back'";
    must(wait_until(PATIENCE, "the slot to be invalidated", || {
        new.sql(DB, fill)?;
        new.sql(DB, "CHECKPOINT")?;
        Ok(value(new, DB, lost) == "t")
    }));
    must(new.set("max_slot_wal_keep_size", "-1"));
    expect_refused(&mut arena, 7, &["of the way back was invalidated", "HINT:", "rebase"]);
    begin_anew(&mut arena);
}

/// As an earlier version has recorded the switchover.
#[test]
fn a_way_back_whose_slot_has_no_recorded_beginning_begins() {
    let case = two_way_case(15, 18);
    let _slots = Slots(&case);
    let mut process = case.start();
    let open = format!("kill -9 {}", process.pid());
    switchover(&case.tool, &["--go", "--open", &open]).expect(0, &[]);
    must(process.wait(PATIENCE));
    case.subscriber.sql("UPDATE pgapace.switchover SET slot_made_at = NULL");
    case.subscriber.sql("INSERT INTO orders (client, n) VALUES (1, 1)");
    let mut process = case.start();
    expect_equal_soon(&case, &mut process);
    case.stop(process);
}
