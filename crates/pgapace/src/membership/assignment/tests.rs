use std::time::{Duration, Instant};

use super::Assignment;
use crate::membership::view::{DatabaseView, SeenRunner, SeenSubscription};
use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::membership::{MemberSubscription, SeenMember};

/// Another process that can run these subscriptions.
fn member(id: &str, names: &[&str]) -> SeenMember {
    let runs = names.iter().map(|name| MemberSubscription {
        name: (*name).to_owned(),
        weight: 1,
        failed: false,
        claimed: false,
    });
    SeenMember { id: id.to_owned(), beat: 0, connected: true, runs: runs.collect() }
}

fn run_by(name: &str, id: Option<&str>) -> SeenSubscription {
    let runner = match id {
        Some(id) => SeenRunner::Member(id.to_owned(), OwnerStage::Streaming),
        None => SeenRunner::NoProcess,
    };
    SeenSubscription { name: name.to_owned(), runner }
}

fn assignment(me: &str, names: &[&str]) -> Assignment {
    Assignment::new(me.to_owned(), names.iter().map(|name| ((0, (*name).to_owned()), 1)))
}

#[test]
fn one_whose_beat_is_late_is_not_waited_for() {
    let names = ["s1", "s2"];
    let me = assignment("b", &names);
    // Process a has nothing, so it is to have what has no owner.
    let mut view = DatabaseView {
        members: vec![member("a", &names)],
        late: [].into(),
        elsewhere: [].into(),
        subscriptions: vec![run_by("s1", Some("b")), run_by("s2", None)],
    };
    let key = (0, "s2".to_owned());
    me.saw(0, view.clone(), Instant::now());
    assert!(me.is_for_another(&key));
    view.late = ["a".to_owned()].into();
    me.saw(0, view.clone(), Instant::now());
    assert!(!me.is_for_another(&key));
    view.late.clear();
    me.saw(0, view, Instant::now());
    assert!(me.is_for_another(&key));
}

#[test]
fn what_has_ended_in_a_process_is_not_claimed_by_it() {
    let names = ["s1", "s2"];
    let me = assignment("b", &names);
    let view = DatabaseView {
        members: vec![member("a", &names)],
        late: [].into(),
        elsewhere: [].into(),
        subscriptions: names.map(|name| run_by(name, Some("a"))).into(),
    };
    let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(60));
    me.saw(0, view, now);
    let claimed = |claims: &[&str]| {
        let (runs, _, claimed) = me.row(0, later);
        assert_eq!(claimed, claims);
        runs.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(claimed(&["s1"]), names);
    me.ended(&(0, "s1".to_owned()), later);
    assert_eq!(claimed(&[]), ["s2"]);
    assert_eq!(me.row(0, later + Duration::from_secs(2)).2, ["s2"]);
}

/// Two connection strings that lead to one database: each subscription counts once.
#[test]
fn what_another_watcher_of_the_process_has_is_not_shared_twice() {
    let own = [(0, "s1"), (1, "s2")].map(|(database, name)| ((database, name.to_owned()), 1));
    let me = Assignment::new("b".to_owned(), own);
    let view = |elsewhere: &str| DatabaseView {
        members: vec![member("a", &["s1", "s2"])],
        late: [].into(),
        elsewhere: [elsewhere.to_owned()].into(),
        subscriptions: vec![run_by("s1", Some("a")), run_by("s2", Some("a"))],
    };
    let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(60));
    me.saw(0, view("s2"), now);
    me.saw(1, view("s1"), now);
    // One of two, not two of four.
    let claims = [me.row(0, later).2, me.row(1, later).2].concat();
    assert_eq!(claims.len(), 1, "{claims:?}");
}
