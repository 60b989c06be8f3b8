//! Setting the sequences of the subscriber.

use engine::sequence::{Decision, Position, Rules, Sequence, decide};
use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::{Session, quote_ident};

use crate::error::{Failure, Result};
use crate::sequences::publisher::{
    AT_ONCE, PublisherSequence, definition, position, positions_sql,
};
use crate::sequences::report::{self, Report, SequenceState};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, describe_kind, field};
use crate::subscriber::named::named;
use crate::subscriber::state::name_array;
use crate::table_name::sql_name;

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

/// A sequence of the subscriber that can be set.
struct Settable {
    /// Index in the report.
    index: usize,
    oid: u32,
    sql_name: String,
    publisher: Sequence,
    value_type: String,
    subscriber: Sequence,
}

/// Finds the relations with these names, or otherwise the sequence that the same column owns: in a
/// table that was created by hand, it may have another name.
const FIND_SQL: &str = concat!(
    "\
WITH wanted AS (
  SELECT * FROM ROWS FROM (
    pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
    pg_catalog.unnest($3::pg_catalog.text[]), pg_catalog.unnest($4::pg_catalog.text[]),
    pg_catalog.unnest($5::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, name, table_schema, table_name, column_name, ord)
), candidate AS (
  SELECT w.ord, 1 AS rank, c.oid
  FROM wanted w
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.name"),
    "
  UNION ALL
  SELECT w.ord, 2, d.objid
  FROM wanted w
  JOIN pg_catalog.pg_class t ON ",
    named!("t", "w.table_schema", "w.table_name"),
    "
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attname = w.column_name
  JOIN pg_catalog.pg_depend d ON d.refobjid = t.oid AND d.refobjsubid = a.attnum
    AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
    AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i')
  JOIN pg_catalog.pg_class s ON s.oid = d.objid AND s.relkind = 'S'
)
SELECT DISTINCT ON (k.ord) k.ord, c.oid, c.relkind, n.nspname, c.relname,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       CASE WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, 'SELECT') END,
       CASE WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, 'UPDATE') END,
       pg_catalog.format_type(q.seqtypid, NULL),
       q.seqincrement, q.seqmin, q.seqmax, q.seqcycle
FROM candidate k
JOIN pg_catalog.pg_class c ON c.oid = k.oid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_sequence q ON q.seqrelid = c.oid
ORDER BY k.ord, k.rank, c.oid"
);

/// Sets the subscriber's sequences to the publisher's values, and returns the result for each.
/// Values that other sessions take at the same time are respected.
pub(crate) fn set(
    control: &mut Session,
    sequences: &[PublisherSequence],
    options: &SetOptions,
) -> Result<Report> {
    let mut report = Report::default();
    for one in sequences {
        let excluded = options.excluded.contains(&one.name);
        let state = match &one.found {
            _ if excluded => SequenceState::LeftOut { reason: "excluded".into(), failed: false },
            // Replaced below.
            Ok(sequence) => SequenceState::Unchanged { at: sequence.position.into() },
            Err(reason) => SequenceState::LeftOut { reason: reason.clone(), failed: one.wanted },
        };
        report.sequences.push(report::Sequence { name: one.name.clone(), state });
    }
    let to_find: Vec<usize> = (0..sequences.len())
        .filter(|index| matches!(report.sequences[*index].state, SequenceState::Unchanged { .. }))
        .collect();
    set_lock_timeout(control, LOCK_TIMEOUT)?;
    for some in to_find.chunks(AT_ONCE) {
        let found = find(control, sequences, some, &mut report)?;
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

/// Finds the subscriber's sequences for these. The report says why a sequence cannot be set.
fn find(
    control: &mut Session,
    sequences: &[PublisherSequence],
    which: &[usize],
    report: &mut Report,
) -> Result<Vec<Settable>> {
    let column = |value: &dyn Fn(&PublisherSequence) -> String| {
        let values: Vec<_> = which.iter().map(|index| value(&sequences[*index])).collect();
        name_array(&values)
    };
    let owner = |one: &PublisherSequence, part: usize| {
        one.owner.as_ref().map(|owner| owner[part].clone()).unwrap_or_default()
    };
    let arguments = [
        column(&|one| one.name.schema.clone()),
        column(&|one| one.name.name.clone()),
        column(&|one| owner(one, 0)),
        column(&|one| owner(one, 1)),
        column(&|one| owner(one, 2)),
    ];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    let rows = control
        .query(FIND_SQL, &arguments)
        .map_err(|e| Failure::subscriber(&e, "finding the sequences"))?;
    let mut found = FxHashMap::default();
    for row in rows.iter() {
        found.insert(field::<usize>(&row, 0)? - 1, row);
    }
    let mut settable = Vec::with_capacity(which.len());
    for (ordinal, &index) in which.iter().enumerate() {
        let one = &sequences[index];
        let Ok(publisher) = &one.found else { continue };
        let publisher = *publisher;
        let reason = match found.get(&ordinal) {
            None => "the subscriber does not have it".to_owned(),
            Some(row) if row.get(2) != Some("S") => {
                let kind = describe_kind(row.get(2).unwrap_or_default());
                format!("it is {kind} on the subscriber")
            }
            Some(row) => {
                let name = TableName { schema: field(row, 3)?, name: field(row, 4)? };
                let (schema, sql_name) = (&name.schema, sql_name(&name));
                if !boolean(row, 5)? {
                    format!(
                        "the role lacks USAGE on schema {schema} on the subscriber: GRANT USAGE ON \
                         SCHEMA {} TO …",
                        quote_ident(schema)
                    )
                } else if !boolean(row, 6)? || !boolean(row, 7)? {
                    format!(
                        "the role lacks SELECT or UPDATE on it on the subscriber: GRANT SELECT, \
                         UPDATE ON SEQUENCE {sql_name} TO …"
                    )
                } else {
                    let position = Position { last_value: 0, is_called: false };
                    settable.push(Settable {
                        index,
                        oid: field(row, 1)?,
                        sql_name,
                        publisher,
                        value_type: field(row, 8)?,
                        subscriber: Sequence { definition: definition(row, 9)?, position },
                    });
                    continue;
                }
            }
        };
        leave_out(report, index, reason, one.wanted);
    }
    Ok(settable)
}

fn leave_out(report: &mut Report, index: usize, reason: String, failed: bool) {
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
