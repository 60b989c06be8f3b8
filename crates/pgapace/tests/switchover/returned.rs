//! Writes were moved back, and nobody has applied the subscription since: what verbs say then.

use super::{Slots, switchover, two_way_case, value};
use crate::support::must;

#[test]
fn after_the_way_back_no_verb_says_that_writes_are_on_the_new_side() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let database = case.publisher.name.as_str();
    let mut process = case.start();
    switchover(&case.tool, &["--go"]).expect(0, &[]);
    let open = format!("kill -9 {}", process.pid());
    let back = switchover(&case.tool, &["--back", "--open", &open]);
    back.expect(0, &[]);
    assert!(back.stdout.contains("the old side takes writes"), "{}", back.stdout);
    assert!(back.stdout.contains("nobody applies the way back"), "{}", back.stdout);
    must(process.wait(crate::support::PATIENCE));
    let connection = case.publisher.conninfo();
    let verbs: [(&str, &[&str], i32); 4] = [
        ("run", &["--until", "current"], 13),
        ("resync", &["orders"], 13),
        ("release", &["--connection", &connection], 13),
        ("status", &["--check"], 13),
    ];
    for (verb, args, code) in verbs {
        let finished = case.tool.finish(verb, args);
        let said = format!("{}{}", finished.stdout, finished.log);
        finished.expect(code, &["pgapace run without --until applies"]);
        assert!(!said.contains("Applications write on this side"), "{verb}: {said}");
        assert!(verb == "status" || said.contains("or somebody has dropped the slot"), "{said}");
    }
    switchover(&case.tool, &["--abort"]).expect(3, &["Writes are on the publisher"]);
    case.tool.finish("drop", &[]).expect(7, &["pgapace switchover --back has created the slot"]);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(value(case.publisher.cluster, database, slots), "1");
}

#[test]
fn a_way_back_without_a_way_back_says_that_it_is_done() {
    let case = two_way_case(15, 15);
    let _slots = Slots(&case);
    let _process = case.start();
    switchover(&case.tool, &["--go"]).expect(0, &[]);
    let done = switchover(&case.tool, &["--back", "--no-back"]);
    done.expect(0, &[]);
    let again: [&[&str]; 2] = [&["--back"], &["--back", "--no-back"]];
    for args in again {
        let again = switchover(&case.tool, args);
        again.expect(0, &[]);
        assert!(again.stdout.contains("was already switched over at"), "{}", again.stdout);
        assert!(!again.stdout.contains("the way back, "), "{}", again.stdout);
    }
    for action in ["--plan", "--go"] {
        let refused = switchover(&case.tool, &[action]);
        refused.expect(3, &["without a way back", "Writes are on the publisher"]);
    }
}
