//! Conditions for adopting a native subscription, and for releasing one. Pure: facts in, problems
//! out.

use std::collections::BTreeSet;

use pgoutput::Lsn;
use wire::quote_ident;

use super::subscription::{AdoptionFacts, NativeTable};
use crate::error::{Class, Failure};

/// Something that must change first, and the next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) message: String,
    pub(crate) next_step: String,
}

impl Problem {
    fn new(message: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { message: message.into(), next_step: next_step.into() }
    }
}

/// Most tables that a message names.
const NAMED: usize = 5;

/// The problems that prevent an adoption.
pub(crate) fn problems(facts: &AdoptionFacts) -> Vec<Problem> {
    let AdoptionFacts { subscription: native, tables, prepared, refused_functions, role, .. } =
        facts;
    let name = quote_ident(&native.name);
    let mut problems = Vec::new();
    if !native.may_alter {
        problems.push(Problem::new(
            format!("role {role} may not alter the native subscription: {} owns it", native.owner),
            format!("GRANT {} TO {role};", quote_ident(&native.owner)),
        ));
    }
    if !native.password_required && !native.superuser {
        problems.push(Problem::new(
            "only a superuser may alter a subscription with password_required = false",
            format!("ALTER SUBSCRIPTION {name} SET (password_required = true);"),
        ));
    }
    if !refused_functions.is_empty() {
        let functions = refused_functions.join(", ");
        problems.push(Problem::new(
            format!("role {role} may not use the replication origin of the native subscription"),
            format!("GRANT EXECUTE ON FUNCTION {functions} TO {role};"),
        ));
    }
    if let Some(skip) = native.skip {
        problems.push(Problem::new(
            format!("the native subscription is to skip the transaction with LSN {skip}"),
            format!(
                "Wait until it has, or: ALTER SUBSCRIPTION {name} SKIP (lsn = NONE); and use \
                 pgapace skip after the adoption."
            ),
        ));
    }
    if native.two_phase == 'p' {
        problems.push(Problem::new(
            "two_phase of the native subscription is not enabled yet (subtwophasestate p)",
            "Wait until all its tables are ready and its worker has restarted.",
        ));
    }
    if !prepared.is_empty() {
        problems.push(Problem::new(
            format!(
                "the native subscription has {} prepared transactions: {}",
                prepared.len(),
                list(prepared.iter().cloned())
            ),
            "COMMIT PREPARED or ROLLBACK PREPARED them on the publisher, and wait until the native \
             subscription has applied that.",
        ));
    }
    let unready: Vec<_> = tables.iter().filter(|table| table.state != 'r').collect();
    if !unready.is_empty() {
        let named =
            unready.iter().map(|table| format!("{} ({})", table.name, state_name(table.state)));
        problems.push(Problem::new(
            format!(
                "{} tables of the native subscription are not ready: {}",
                unready.len(),
                list(named)
            ),
            match native.enabled {
                true => "Wait until srsubstate of pg_subscription_rel is r for all of them.".to_owned(),
                false => format!(
                    "It is disabled, so nobody copies them: ALTER SUBSCRIPTION {name} ENABLE; then wait until \
                     srsubstate of pg_subscription_rel is r for all of them."
                ),
            },
        ));
    }
    problems
}

fn state_name(state: char) -> &'static str {
    match state {
        'i' => "init",
        'd' => "datasync",
        'f' => "finishedcopy",
        's' => "syncdone",
        'r' => "ready",
        _ => "unknown",
    }
}

fn list(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMED);
    let mut named: Vec<_> = names.take(NAMED).collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    named.join(", ")
}

/// One failure for all problems. `what` completes the sentence.
pub(crate) fn failure(what: &str, problems: &[Problem]) -> Option<Failure> {
    if problems.is_empty() {
        return None;
    }
    let lines = |text: fn(&Problem) -> &str| {
        problems.iter().map(text).collect::<Vec<_>>().join("\n         ")
    };
    let class = if problems.iter().any(|problem| problem.next_step.starts_with("GRANT")) {
        Class::Subscriber
    } else {
        Class::Config
    };
    Some(
        Failure::new(class, what)
            .detail(lines(|problem| &problem.message))
            .hint(lines(|problem| &problem.next_step)),
    )
}

/// The facts that decide whether a subscription can be released to a native one.
#[derive(Debug, Default)]
pub(crate) struct Releasing {
    /// Tables that are not ready, that may lack changes, or whose copy was asked for.
    pub(crate) unready: Vec<String>,
    /// Published tables that pgapace does not have, and that the native subscription would apply.
    pub(crate) unknown: Vec<String>,
    /// Tables that the native subscription does not have as ready.
    pub(crate) foreign: Vec<String>,
    /// The native subscription, if there is one.
    pub(crate) native: Option<String>,
    /// The publications of the last run.
    pub(crate) publications: Vec<String>,
    /// Those of the native subscription, if there is one.
    pub(crate) native_publications: Option<Vec<String>>,
    /// A table is no longer published as pgapace has recorded it.
    pub(crate) published_otherwise: bool,
    /// Only changes without origin are applied (`--origin none`).
    pub(crate) origin_none: bool,
    /// The name by which commits of the publisher wait for pgapace, and that of the native worker, for which they
    /// would not.
    pub(crate) awaited_as: Option<(String, String)>,
    /// Major versions.
    pub(crate) publisher_major: u32,
    pub(crate) subscriber_major: u32,
    pub(crate) slot: String,
    pub(crate) skip: Option<Lsn>,
    /// Transactions that pgapace holds as prepared on the subscriber.
    pub(crate) prepared: usize,
    /// Of the slot.
    pub(crate) two_phase: bool,
    /// `subtwophasestate` of the native subscription, if there is one.
    pub(crate) native_two_phase: Option<char>,
    pub(crate) applied: Lsn,
    /// The end of the last range that was applied out of order.
    pub(crate) highest: Lsn,
    /// The highest sync LSN of a table.
    pub(crate) synced: Lsn,
    pub(crate) confirmed: Lsn,
}

/// The next step where pgapace has to apply more.
const RUN: &str = "Run pgapace run --until current, and stop it.";

/// The problems that prevent a release.
pub(crate) fn release_problems(found: &Releasing) -> Vec<Problem> {
    let mut problems = Vec::new();
    problems.extend(other_publications(found));
    problems.extend(other_standby_name(found));
    problems.extend(other_two_phase(found));
    problems.extend(of_tables(found));
    problems.extend(of_settings(found));
    problems.extend(of_unfinished_work(found));
    problems.extend(of_two_phase(found));
    problems
}

/// Those of tables with which the native subscription could not go on.
fn of_tables(found: &Releasing) -> Vec<Problem> {
    let names = |tables: &[String]| list(tables.iter().cloned());
    let mut problems = Vec::new();
    if found.published_otherwise {
        problems.push(Problem::new(
            "tables were published in another way since pgapace looked: they may lack changes",
            "Run pgapace run --until current, which finds out.",
        ));
    }
    if !found.unready.is_empty() {
        problems.push(Problem::new(
            format!("tables are not ready: {}", names(&found.unready)),
            "Wait until pgapace status shows them as ready; pgapace resync copies a blocked table.",
        ));
    }
    if !found.unknown.is_empty() {
        problems.push(Problem::new(
            format!("published tables are not copied yet: {}", names(&found.unknown)),
            RUN,
        ));
    }
    if let Some(native) = found.native.as_ref().filter(|_| !found.foreign.is_empty()) {
        let native = quote_ident(native);
        problems.push(Problem::new(
            format!(
                "native subscription {native} does not know tables that were added since: {}",
                names(&found.foreign)
            ),
            format!(
                "DROP SUBSCRIPTION {native}; pgapace release then creates another one (--connection)."
            ),
        ));
    }
    problems
}

/// Those of settings that a native subscription does not have, or takes for something else.
fn of_settings(found: &Releasing) -> Vec<Problem> {
    let mut problems = Vec::new();
    if found.origin_none && found.subscriber_major < 16 {
        problems.push(Problem::new(
            "pgapace ran with --origin none, and a native subscription can leave out changes that have an \
             origin from PostgreSQL 16 on",
            "Keep the subscription with pgapace; or run pgapace run --until current without --origin none, if \
             no subscription in the opposite direction would send changes back.",
        ));
    }
    if found.slot == "none" {
        problems.push(Problem::new(
            "the slot is named none, which a native subscription takes for no slot",
            "Keep the subscription with pgapace; or give it another slot: pgapace drop, then pgapace run --slot … \
             --if-not-empty rebase, which compares the tables.",
        ));
    }
    problems
}

/// The transactions and changes that pgapace has still to skip, to resolve or to apply.
fn of_unfinished_work(found: &Releasing) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(skip) = found.skip {
        problems.push(Problem::new(
            format!("pgapace is to skip the transaction with LSN {skip}"),
            "Run pgapace run until it has.",
        ));
    }
    if found.prepared > 0 {
        problems.push(Problem::new(
            format!("{} transactions are prepared on the subscriber", found.prepared),
            "Resolve them on the publisher, and run pgapace run --until current; pgapace prepared lists \
             them.",
        ));
    }
    if found.highest > found.applied {
        problems.push(Problem::new(
            format!(
                "transactions up to {} are applied, but some after {} are not",
                found.highest, found.applied
            ),
            RUN,
        ));
    }
    if found.synced > found.applied {
        problems.push(Problem::new(
            format!(
                "a table was copied at {}, and changes are applied up to {}",
                found.synced, found.applied
            ),
            RUN,
        ));
    }
    problems
}

/// Those of a slot with two_phase that a native subscription cannot read, or not from where it would start.
fn of_two_phase(found: &Releasing) -> Vec<Problem> {
    let mut problems = Vec::new();
    // Its worker does not know the messages of two-phase commit, and would fail for ever.
    if found.two_phase && found.subscriber_major < 15 {
        let next_step = if found.publisher_major >= 18 {
            "Run pgapace run --two-phase=false --until current, which takes two_phase from the slot."
        } else {
            "Keep the subscription with pgapace, or upgrade the subscriber: a publisher before PostgreSQL 18 \
             cannot take two_phase from a slot."
        };
        problems.push(Problem::new(
            "the slot has two_phase, which a native subscription can read from PostgreSQL 15 on",
            next_step,
        ));
    }
    // A transaction that was received as prepared and is held in memory is not acknowledged. The
    // publisher would not send its PREPARE again to a subscriber that asks for a later position.
    if found.two_phase && found.confirmed < found.applied {
        problems.push(Problem::new(
            format!(
                "the slot is confirmed up to {}, and changes are applied up to {}: a prepared \
                 transaction may lie between",
                found.confirmed, found.applied
            ),
            "Resolve prepared transactions on the publisher; then run pgapace run --until current.",
        ));
    }
    problems
}

/// pgapace and the native subscription must have the same publications: changes of other tables were not
/// applied since the adoption.
fn other_publications(found: &Releasing) -> Option<Problem> {
    let (native, theirs) = (found.native.as_ref()?, found.native_publications.as_ref()?);
    let (ours, native) = (&found.publications, quote_ident(native));
    if ours.iter().collect::<BTreeSet<_>>() == theirs.iter().collect::<BTreeSet<_>>() {
        return None;
    }
    let quoted: Vec<_> = ours.iter().map(|name| quote_ident(name)).collect();
    Some(Problem::new(
        format!(
            "native subscription {native} has publications {}, and pgapace last ran with {}",
            theirs.join(", "),
            ours.join(", ")
        ),
        format!(
            "Run pgapace run --until current with publications {}. Or have the native subscription follow \
             those of pgapace: ALTER SUBSCRIPTION {native} SET PUBLICATION {} WITH (refresh = false);",
            theirs.join(","),
            quoted.join(", ")
        ),
    ))
}

/// The native worker believes what its subscription says of `two_phase`, and leaves the slot as it is. One that is to
/// enable it (p) does so in either.
fn other_two_phase(found: &Releasing) -> Option<Problem> {
    let (native, state) = (quote_ident(found.native.as_ref()?), found.native_two_phase?);
    // Those before 15 do not know it.
    if found.subscriber_major < 15 || state == 'p' || (state == 'e') == found.two_phase {
        return None;
    }
    if !found.two_phase {
        return Some(Problem::new(
            format!("native subscription {native} has two_phase, and the slot has not"),
            "Run pgapace run --two-phase --until current, which gives two_phase to the slot.",
        ));
    }
    let next_step = if found.publisher_major >= 18 {
        "Run pgapace run --two-phase=false --until current, which takes two_phase from the slot."
            .to_owned()
    } else if found.subscriber_major >= 18 {
        format!("ALTER SUBSCRIPTION {native} SET (two_phase = true);")
    } else {
        format!(
            "DROP SUBSCRIPTION {native}; pgapace release then creates another one, with two_phase (--connection)."
        )
    };
    Some(Problem::new(
        format!("the slot has two_phase, and native subscription {native} has not"),
        next_step,
    ))
}

/// Commits that wait for pgapace's name would wait for ever once the native worker answers under another one.
fn other_standby_name(found: &Releasing) -> Option<Problem> {
    let (ours, theirs) = found.awaited_as.as_ref()?;
    let rename = match &found.native {
        Some(native) => format!(
            "add application_name={ours} to the connection string: ALTER SUBSCRIPTION {} CONNECTION '…';",
            quote_ident(native)
        ),
        None => format!("add application_name={ours} to --connection"),
    };
    Some(Problem::new(
        format!(
            "synchronous_standby_names of the publisher names \"{ours}\", and not \"{theirs}\", the name of the native \
             worker: commits would wait for ever"
        ),
        format!(
            "Add \"{theirs}\" to synchronous_standby_names of the publisher in place of \"{ours}\"; or {rename}"
        ),
    ))
}

/// Where pgapace starts: after everything that the native subscription has applied or acknowledged.
///
/// `origin` is the end LSN of its last transaction, `None` if there was none; `confirmed` is the
/// position of its slot, which also passes WAL without changes for it.
pub(crate) fn start(origin: Option<Lsn>, confirmed: Lsn) -> Lsn {
    origin.map_or(confirmed, |origin| origin.max(confirmed))
}

/// Up to where the subscriber has recorded what it applied or copied, if the slot is confirmed beyond that.
///
/// A publisher without changes for the subscription moves its slot alone, so an adoption cannot refuse this. A
/// subscriber that has lost transactions after they were confirmed looks the same: it was restored from a backup, or
/// a standby that lacked them was promoted. Neither server can tell: the slot does not send them again.
pub(crate) fn recorded(origin: Option<Lsn>, tables: &[NativeTable], confirmed: Lsn) -> Option<Lsn> {
    let copied = || tables.iter().filter_map(|table| table.lsn).min();
    origin.or_else(copied).filter(|recorded| *recorded < confirmed)
}

/// The LSN before which changes of a table are in its copy. A table of a subscription that has not
/// reached this position since must not get them again.
pub(crate) fn sync_lsn(start: Lsn, recorded: Option<Lsn>) -> Lsn {
    recorded.unwrap_or(start)
}

#[cfg(test)]
pub(crate) mod tests {
    use engine::table_name::TableName;

    use super::*;
    use crate::native::subscription::NativeSubscription;

    pub(crate) fn facts() -> AdoptionFacts {
        AdoptionFacts {
            subscription: NativeSubscription {
                oid: 16400,
                name: "Sub".to_owned(),
                owner: "boss".to_owned(),
                may_alter: true,
                superuser: false,
                enabled: true,
                slot: Some("sub".to_owned()),
                publications: vec!["pub".to_owned()],
                binary: false,
                streaming: "f".to_owned(),
                two_phase: 'd',
                disable_on_error: false,
                skip: None,
                password_required: true,
                run_as_owner: false,
                origin: "any".to_owned(),
            },
            tables: vec![table("a", 'r'), table("b", 'r')],
            workers: vec![1],
            prepared: Vec::new(),
            refused_functions: Vec::new(),
            role: "app".to_owned(),
            application_name: "Sub".to_owned(),
        }
    }

    fn table(name: &str, state: char) -> NativeTable {
        NativeTable {
            name: TableName { schema: "public".to_owned(), name: name.to_owned() },
            state,
            lsn: None,
        }
    }

    #[test]
    fn a_sound_subscription_has_no_problem() {
        assert_eq!(problems(&facts()), []);
        assert!(failure("s", &[]).is_none());
    }

    #[test]
    fn every_problem_is_told_at_once_with_its_next_step() {
        let mut facts = facts();
        facts.subscription.may_alter = false;
        facts.subscription.password_required = false;
        facts.subscription.skip = Some(Lsn(16));
        facts.subscription.two_phase = 'p';
        facts.tables[1].state = 'd';
        facts.prepared = (0..7).map(|n| format!("pg_gid_16400_{n}")).collect();
        facts.refused_functions = vec!["pg_replication_origin_progress(text,boolean)".to_owned()];
        let problems = problems(&facts);
        assert_eq!(problems.len(), 7);
        let text =
            failure("\"Sub\"", &problems).map(|failure| failure.to_string()).unwrap_or_default();
        for part in [
            "\"Sub\"",
            "GRANT \"boss\" TO app;",
            "password_required = true",
            "GRANT EXECUTE ON FUNCTION pg_replication_origin_progress(text,boolean) TO app;",
            "SKIP (lsn = NONE)",
            "public.b (datasync)",
            "pg_gid_16400_4, 2 more",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn transactions_that_native_would_apply_twice_or_never_are_not_released() {
        let sound = || Releasing {
            native: Some("s".to_owned()),
            applied: Lsn(90),
            highest: Lsn(90),
            synced: Lsn(90),
            confirmed: Lsn(70),
            subscriber_major: 15,
            ..Releasing::default()
        };
        assert_eq!(release_problems(&sound()), []);
        let count = |change: fn(&mut Releasing)| {
            let mut found = sound();
            change(&mut found);
            release_problems(&found).len()
        };
        assert_eq!(count(|found| found.unready.push("a".to_owned())), 1);
        assert_eq!(count(|found| found.unknown.push("a".to_owned())), 1);
        assert_eq!(count(|found| found.foreign.push("a".to_owned())), 1);
        assert_eq!(count(|found| found.published_otherwise = true), 1);
        assert_eq!(count(|found| found.origin_none = true), 1);
        let renamed = |found: &mut Releasing| {
            found.awaited_as = Some(("sub".to_owned(), "native".to_owned()));
        };
        assert_eq!(count(renamed), 1);
        assert_eq!(count(|found| (found.origin_none, found.subscriber_major) = (true, 16)), 0);
        let publications = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let mut others = sound();
        others.publications = publications(&["p", "q"]);
        others.native_publications = Some(publications(&["q", "p"]));
        assert_eq!(release_problems(&others), []);
        others.native_publications = Some(publications(&["p"]));
        let problems = release_problems(&others);
        assert_eq!(problems.len(), 1);
        let step = "SET PUBLICATION \"p\", \"q\" WITH (refresh = false)";
        assert!(problems[0].next_step.contains(step), "{problems:?}");
        assert_eq!(count(|found| found.skip = Some(Lsn(1))), 1);
        assert_eq!(count(|found| found.prepared = 1), 1);
        assert_eq!(count(|found| found.highest = Lsn(91)), 1);
        assert_eq!(count(|found| found.synced = Lsn(91)), 1);
        assert_eq!(count(|found| found.two_phase = true), 1);
        // The state of the native subscription, and whether the slot has it.
        for (state, slot, problems) in
            [('d', false, 0), ('d', true, 1), ('e', false, 1), ('e', true, 0), ('p', true, 0)]
        {
            let two_phase = Releasing {
                native_two_phase: Some(state),
                two_phase: slot,
                confirmed: Lsn(90),
                ..sound()
            };
            assert_eq!(release_problems(&two_phase).len(), problems, "{state} {slot}");
        }
        assert_eq!(count(|found| (found.two_phase, found.confirmed) = (true, Lsn(90))), 0);
        let mut old = Releasing { two_phase: true, confirmed: Lsn(90), ..sound() };
        old.subscriber_major = 14;
        for (publisher_major, step) in [(15, "Keep the subscription"), (18, "--two-phase=false")] {
            old.publisher_major = publisher_major;
            let problems = release_problems(&old);
            assert_eq!(problems.len(), 1);
            assert!(problems[0].next_step.contains(step), "{problems:?}");
        }
    }

    #[test]
    fn the_start_is_behind_everything_applied_and_acknowledged() {
        assert_eq!(start(None, Lsn(70)), Lsn(70));
        assert_eq!(start(Some(Lsn(90)), Lsn(70)), Lsn(90));
        assert_eq!(start(Some(Lsn(60)), Lsn(70)), Lsn(70));
    }

    #[test]
    fn a_slot_beyond_what_is_recorded_is_seen() {
        let table = |lsn| NativeTable {
            name: TableName { schema: "public".to_owned(), name: "t".to_owned() },
            state: 'r',
            lsn,
        };
        let tables = [table(Some(Lsn(40))), table(Some(Lsn(60))), table(None)];
        assert_eq!(recorded(Some(Lsn(80)), &tables, Lsn(90)), Some(Lsn(80)));
        assert_eq!(recorded(Some(Lsn(80)), &tables, Lsn(80)), None);
        assert_eq!(recorded(None, &tables, Lsn(50)), Some(Lsn(40)));
        assert_eq!(recorded(None, &tables[2..], Lsn(50)), None);
    }

    #[test]
    fn a_table_keeps_its_own_sync_lsn() {
        assert_eq!(sync_lsn(Lsn(70), Some(Lsn(80))), Lsn(80));
        assert_eq!(sync_lsn(Lsn(70), None), Lsn(70));
    }
}
