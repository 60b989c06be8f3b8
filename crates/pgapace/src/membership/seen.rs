//! The owners and members of one subscriber database as they were seen last, and their beats.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use engine::heartbeat::{Heartbeats, patience};

use super::Place;
use super::view::{DatabaseView, SeenRunner, SeenSubscription};
use crate::error::Failure;
use crate::subscriber::state::heartbeat::OwnerStage;
use crate::subscriber::state::membership::{
    BeatingOwner, HeldSubscription, OwnerBeat, OwnersAndMembers, SeenMember, process_of,
};

/// Factor by which an owner that creates its slot and its schema, or compares tables, may be silent for longer: it also
/// computes on its own.
const IN_SETUP: u32 = 3;
/// Rounds for which one that resumes the stream may be silent at least: its first beat needs a session of its own.
const IN_START: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct SeenSubscriber {
    /// How many of this process wait for each subscription.
    pub(super) waiting: BTreeMap<String, usize>,
    pub(super) standing: Standing,
    /// Raised with each look.
    pub(super) looks: u64,
    /// When the last look came that saw the subscriber, and why there was none since.
    pub(super) last_look: Option<Instant>,
    pub(super) failure: Option<Arc<Failure>>,
    pub(super) beats: Heartbeats<String, OwnerBeat>,
    /// The rows of processes that share subscriptions, and their beats.
    pub(super) members: Vec<SeenMember>,
    pub(super) member_beats: Heartbeats<String, i64>,
    pub(super) ended: bool,
}

#[derive(Debug, Default)]
pub(super) enum Standing {
    #[default]
    Unknown,
    /// Schema pgapace does not exist or is of another version, or the subscriber refuses this role.
    Refused,
    Known(Vec<HeldSubscription>),
}

/// After how many rounds without a beat a process is late: it may be there, but takes no subscription now.
/// The beat of one that works stays the same for one whole round at most.
fn late_after(rounds: u32) -> u32 {
    rounds.div_ceil(2).max(2)
}

/// After how many rounds without a beat an owner in this stage has stopped.
fn stopped_after(rounds: u32, stage: OwnerStage, stalls: u32) -> u32 {
    let most = patience(rounds, stalls);
    match stage {
        OwnerStage::Setup => most.saturating_mul(IN_SETUP),
        OwnerStage::Starting => most.max(IN_START),
        OwnerStage::Copying | OwnerStage::Streaming => most,
    }
}

impl SeenSubscriber {
    pub(super) fn place(&self, name: &str, rounds: u32) -> Place {
        let held = match &self.standing {
            Standing::Unknown => return Place::Unknown,
            Standing::Refused => return Place::Absent,
            Standing::Known(all) => all.iter().find(|held| held.name == name),
        };
        held.map_or(Place::Absent, |held| self.place_of(held, rounds))
    }

    fn place_of(&self, held: &HeldSubscription, rounds: u32) -> Place {
        let Some(holder) = held.holder.clone() else { return Place::Free };
        let Some(owner) = held.owner.clone() else { return Place::Held(holder, None) };
        if self.beats.unchanged(&held.name) >= stopped_after(rounds, owner.stage, owner.stalls) {
            Place::Stopped(holder, owner)
        } else {
            Place::Held(holder, Some(owner))
        }
    }

    /// The part of it by which processes share subscriptions. A beat has stopped after `rounds`. `me`: this
    /// process, whose watcher has the row `id`.
    pub(super) fn view(&self, me: &str, id: &str, rounds: u32) -> DatabaseView {
        let (mut members, mut on_time) = (BTreeMap::new(), BTreeSet::new());
        let mut elsewhere = BTreeSet::new();
        for one in &self.members {
            let process = process_of(&one.id);
            let unchanged = self.member_beats.unchanged(&one.id);
            if process == me {
                let names = one.runs.iter().map(|runs| runs.name.clone());
                elsewhere.extend(names.filter(|_| one.id != id));
            } else if one.connected && unchanged < rounds {
                // The beat of a member is not part of its lists.
                let (id, beat, runs) = (process.to_owned(), 0, Vec::new());
                let member = SeenMember { id, beat, connected: true, runs };
                let member = members.entry(process).or_insert(member);
                member.runs.extend_from_slice(&one.runs);
                on_time.extend((unchanged < late_after(rounds)).then_some(process));
            }
        }
        let late = members.keys().filter(|process| !on_time.contains(*process));
        let late = late.map(|process| (*process).to_owned()).collect();
        let held: &[HeldSubscription] = match &self.standing {
            Standing::Known(held) => held,
            Standing::Unknown | Standing::Refused => &[],
        };
        let subscriptions = held.iter().map(|held| {
            let runner = match self.place_of(held, rounds) {
                Place::Held(_, Some(BeatingOwner { member: Some(id), stage, .. })) => {
                    SeenRunner::Member(id, stage)
                }
                Place::Held(..) => SeenRunner::NonMember,
                _ => SeenRunner::NoProcess,
            };
            SeenSubscription { name: held.name.clone(), runner }
        });
        let subscriptions = subscriptions.collect();
        DatabaseView { members: members.into_values().collect(), late, elsewhere, subscriptions }
    }

    /// Whether other processes share subscriptions here. A beat that has stopped does not count against them:
    /// two that stopped beating because each takes the other for dead would never begin again.
    pub(super) fn has_others(&self, me: &str) -> bool {
        self.members.iter().any(|one| process_of(&one.id) != me && one.connected)
    }

    /// Takes the result of a look; `counts` if the look came after a commit of our own.
    pub(super) fn saw(&mut self, now: OwnersAndMembers, counts: bool) {
        let OwnersAndMembers { held, members } = now;
        let beats = held
            .iter()
            .filter_map(|one| Some((one.name.clone(), one.owner.as_ref()?.beat.clone())));
        let of_members = members.iter().map(|one| (one.id.clone(), one.beat));
        if counts {
            self.beats.round(beats);
            self.member_beats.round(of_members);
        } else {
            self.beats.look(beats);
            self.member_beats.look(of_members);
        }
        self.standing = Standing::Known(held);
        self.members = members;
        self.looks += 1;
        (self.last_look, self.failure) = (Some(Instant::now()), None);
    }

    /// Nothing is known any more.
    pub(super) fn lost(&mut self, standing: Standing) {
        self.standing = standing;
        self.looks += 1;
        self.beats = Heartbeats::default();
        self.members.clear();
        self.member_beats = Heartbeats::default();
    }
}

#[cfg(test)]
mod tests {
    use super::{OwnerStage, SeenMember, SeenSubscriber, stopped_after};
    use crate::subscriber::state::membership::MemberSubscription;

    #[test]
    fn only_a_setup_may_be_silent_for_longer_than_the_stream() {
        let after = |stage| [2, 5, 9].map(|rounds| stopped_after(rounds, stage, 0));
        assert_eq!(after(OwnerStage::Streaming), [2, 5, 9]);
        assert_eq!(after(OwnerStage::Copying), [2, 5, 9]);
        assert_eq!(after(OwnerStage::Starting), [5, 5, 9]);
        assert_eq!(after(OwnerStage::Setup), [6, 15, 27]);
        assert_eq!(stopped_after(5, OwnerStage::Starting, 1), 10);
    }

    #[test]
    fn rows_of_one_process_are_taken_together() {
        let row = |id: &str, name: &str| {
            let (name, weight, failed, claimed) = (name.to_owned(), 1, false, false);
            let runs = vec![MemberSubscription { name, weight, failed, claimed }];
            SeenMember { id: id.to_owned(), beat: 1, connected: true, runs }
        };
        let members = vec![row("a", "s1"), row("a.3", "s2"), row("me", "s1"), row("me.1", "s2")];
        let mut seen = SeenSubscriber { members, ..SeenSubscriber::default() };
        let view = seen.view("me", "me.1", 5);
        let [other] = &view.members[..] else { panic!("{view:?}") };
        let names: Vec<_> = other.runs.iter().map(|runs| runs.name.as_str()).collect();
        assert_eq!((other.id.as_str(), names), ("a", vec!["s1", "s2"]));
        assert_eq!(view.elsewhere, ["s1".to_owned()].into());
        assert!(seen.has_others("me") && view.late.is_empty());
        seen.members.retain(|one| one.id.starts_with("me"));
        assert!(!seen.has_others("me"));
    }
}
