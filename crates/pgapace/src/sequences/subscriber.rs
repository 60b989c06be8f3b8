//! Setting the sequences of the subscriber.

use engine::sequence::{Decision, Position, Rules, decide};
use engine::table_name::TableName;
use rustc_hash::FxHashSet;
use wire::Session;

use crate::error::{Failure, Result};
use crate::sequences::counterpart::{Settable, find};
use crate::sequences::publisher::{AT_ONCE, PublisherSequences, position, positions_sql};
use crate::sequences::report::{self, Report, SequenceState};
use crate::sqlstate;
use crate::subscriber::catalogue::field;

/// How many times pgapace tries to set a sequence that other sessions use at the same time.
const ATTEMPTS: usize = 5;
/// lock_timeout while sequences are set.
const LOCK_TIMEOUT: &str = "5s";
/// lock_timeout while pgapace finds out which of them is locked: it has waited already.
const NEXT_TIMEOUT: &str = "200ms";

/// Why a sequence is not set that could not be locked.
const LOCKED: &str = "another session holds a conflicting lock; see pg_locks";

/// How sequences are set.
#[derive(Debug, Clone, Default)]
pub(crate) struct SetOptions {
    pub(crate) rules: Rules,
    /// Sequences to leave unchanged, by name on the publisher.
    pub(crate) excluded: Vec<TableName>,
    /// Only report what would be set.
    pub(crate) dry_run: bool,
}

/// Sets the subscriber's sequences to the publisher's values, and returns the result for each.
/// Values that other sessions take at the same time are respected.
pub(crate) fn set(
    control: &mut Session,
    of_publisher: &PublisherSequences,
    options: &SetOptions,
) -> Result<Report> {
    let mut report = Report::default();
    let sequences = &of_publisher.sequences;
    for one in sequences {
        let excluded = options.excluded.contains(&one.name);
        let state = match &one.found {
            _ if excluded => SequenceState::LeftOut { reason: "excluded".into(), failed: false },
            // Replaced below.
            Ok(sequence) => SequenceState::Unchanged { at: sequence.position.into() },
            Err(reason) => SequenceState::LeftOut { reason: reason.clone(), failed: one.wanted },
        };
        report.sequences.push(report::Sequence { name: one.name.clone(), subscriber: None, state });
    }
    let to_find: Vec<usize> = (0..sequences.len())
        .filter(|index| matches!(report.sequences[*index].state, SequenceState::Unchanged { .. }))
        .collect();
    set_lock_timeout(control, LOCK_TIMEOUT)?;
    let mut taken = FxHashSet::default();
    for some in to_find.chunks(AT_ONCE) {
        let found = find(control, of_publisher, some, (&mut taken, &mut report))?;
        set_found(control, found, options, &mut report)?;
    }
    set_lock_timeout(control, "0")?;
    Ok(report)
}

fn set_lock_timeout(control: &mut Session, timeout: &str) -> Result<()> {
    control
        .simple(&format!("SET lock_timeout = '{timeout}'"))
        .map_err(|e| Failure::subscriber(&e, "setting sequences"))?;
    Ok(())
}

pub(super) fn leave_out(report: &mut Report, index: usize, reason: String, failed: bool) {
    report.sequences[index].state = SequenceState::LeftOut { reason, failed };
}

/// Sets each sequence to a value that depends on its current one.
fn set_found(
    control: &mut Session,
    mut left: Vec<Settable>,
    options: &SetOptions,
    report: &mut Report,
) -> Result<()> {
    for _ in 0..ATTEMPTS {
        let read = read_positions(control, left, report)?;
        set_lock_timeout(control, LOCK_TIMEOUT)?;
        let mut to_set = Vec::with_capacity(read.len());
        for one in read {
            match judge(&one, options.rules) {
                Ok((to, margin_cut)) if options.dry_run => {
                    let (from, to) = (one.subscriber.position.into(), to.into());
                    report.sequences[one.index].state = SequenceState::Set { from, to, margin_cut };
                }
                Ok((to, margin_cut)) => to_set.push((one, to, margin_cut)),
                Err(state) => report.sequences[one.index].state = state,
            }
        }
        if to_set.is_empty() {
            return Ok(());
        }
        left = set_positions(control, to_set, report)?;
    }
    for one in left {
        let reason = "other sessions keep taking values from it";
        leave_out(report, one.index, reason.to_owned(), true);
    }
    Ok(())
}

/// Reads the positions. Returns the sequences that can be read; the report says which are locked.
fn read_positions(
    control: &mut Session,
    mut some: Vec<Settable>,
    report: &mut Report,
) -> Result<Vec<Settable>> {
    if some.is_empty() {
        return Ok(some);
    }
    let names: Vec<_> = some.iter().map(|one| one.sql_name.clone()).collect();
    let rows = match control.query(&positions_sql(&names), &[]) {
        Ok(rows) => rows,
        Err(error) if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) => {
            // Halved repeatedly, to find out which sequence is locked.
            if some.len() > 1 {
                set_lock_timeout(control, NEXT_TIMEOUT)?;
                let half = some.split_off(some.len() / 2);
                let mut read = read_positions(control, some, report)?;
                read.extend(read_positions(control, half, report)?);
                return Ok(read);
            }
            some.into_iter().for_each(|one| leave_out(report, one.index, LOCKED.to_owned(), true));
            return Ok(Vec::new());
        }
        Err(error) => return Err(Failure::subscriber(&error, "reading sequences")),
    };
    for row in rows.iter() {
        some[field::<usize>(&row, 0)?].subscriber.position = position(&row)?;
    }
    Ok(some)
}

/// Returns the position to set, and whether the margin was cut; or the result if the sequence is
/// not set.
fn judge(one: &Settable, rules: Rules) -> std::result::Result<(Position, bool), SequenceState> {
    let at = one.subscriber.position.into();
    let rules = Rules { allow_backwards: rules.allow_backwards && !one.shared, ..rules };
    let left_out = |reason: String| SequenceState::LeftOut { reason, failed: true };
    Err(match decide(one.publisher, one.subscriber, rules) {
        Decision::Set { to, margin_cut } => return Ok((to, margin_cut)),
        Decision::Same => SequenceState::Unchanged { at },
        Decision::Ahead { cycles } => {
            SequenceState::Ahead { at, publisher: one.publisher.position.into(), cycles }
        }
        Decision::OutOfBounds { bound } => left_out(format!(
            "the publisher's value {} exceeds its bound {bound} on the subscriber, where its type \
             is {}: ALTER SEQUENCE {} AS bigint NO MAXVALUE NO MINVALUE, or set the bounds of the \
             publisher",
            one.publisher.position.last_value, one.value_type, one.sql_name
        )),
        Decision::OppositeDirections => left_out(format!(
            "its increment is {} on the publisher and {} on the subscriber",
            one.publisher.definition.increment, one.subscriber.definition.increment
        )),
    })
}

/// Sets the sequences that still have the position that was read. Returns the others.
fn set_positions(
    control: &mut Session,
    mut some: Vec<(Settable, Position, bool)>,
    report: &mut Report,
) -> Result<Vec<Settable>> {
    let calls: Vec<_> = some
        .iter()
        .enumerate()
        .map(|(number, (one, to, _))| {
            let seen = one.subscriber.position;
            format!(
                "SELECT {number} AS number, \
                   pg_catalog.setval({}::pg_catalog.oid::pg_catalog.regclass, {}, {}) \
                 FROM {} WHERE last_value = ({}) AND is_called = {}",
                one.oid, to.last_value, to.is_called, one.sql_name, seen.last_value, seen.is_called
            )
        })
        .collect();
    let rows = match control.query(&calls.join(" UNION ALL "), &[]) {
        Ok(rows) => rows,
        Err(error) if error.sqlstate() == Some(sqlstate::LOCK_NOT_AVAILABLE) => {
            // Halved repeatedly, to find out which sequence is locked.
            if some.len() > 1 {
                let half = some.split_off(some.len() / 2);
                let mut left = set_positions(control, some, report)?;
                left.extend(set_positions(control, half, report)?);
                return Ok(left);
            }
            for (one, ..) in some {
                leave_out(report, one.index, LOCKED.to_owned(), true);
            }
            return Ok(Vec::new());
        }
        Err(error) => return Err(Failure::subscriber(&error, "setting sequences")),
    };
    let mut done = vec![false; some.len()];
    for row in rows.iter() {
        done[field::<usize>(&row, 0)?] = true;
    }
    let mut left = Vec::new();
    for ((one, to, margin_cut), done) in some.into_iter().zip(done) {
        if done {
            let (from, to) = (one.subscriber.position.into(), to.into());
            report.sequences[one.index].state = SequenceState::Set { from, to, margin_cut };
        } else {
            left.push(one);
        }
    }
    Ok(left)
}
