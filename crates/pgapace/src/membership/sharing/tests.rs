use std::time::{Duration, Instant};

use super::Sharing;
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

fn sharing(me: &str, names: &[&str]) -> Sharing {
    Sharing::new(me.to_owned(), names.iter().map(|name| ((0, (*name).to_owned()), 1)))
}

#[test]
fn one_whose_beat_is_late_is_not_waited_for() {
    let names = ["s1", "s2"];
    let me = sharing("b", &names);
    // Process a has nothing, so it is to have what has no owner.
    let mut view = DatabaseView {
        members: vec![member("a", &names)],
        late: [].into(),
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
    let me = sharing("b", &names);
    let view = DatabaseView {
        members: vec![member("a", &names)],
        late: [].into(),
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
