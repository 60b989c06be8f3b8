//! The decision how the changes of a table are applied: as sets of net changes, or one by one.
//!
//! A set of net changes leaves intermediate changes out and executes the others in another order.
//! That is correct only if nothing except the rows can notice it. So no user code may run, no
//! default may be volatile, and keys must be stored as they were sent.
//!
//! Keys are compared as the subscriber's type compares them, where pgapace can do that. Other types
//! (citext, interval, arrays, ranges, text of nondeterministic collations) have equal values with
//! different bytes, and are compared by bytes. That finds the same rows, or is noticed:
//!
//! - Equal bytes are equal values, because the key has a unique index, whose equality is reflexive.
//! - The key of a row keeps its bytes until the row is deleted, or until its key is updated, and in such
//!   tables that is executed alone. Equal values are one row. So among the changes of a segment, only one
//!   spelling can begin with an update or a delete; all others begin with an insert.
//! - The set deletes before it inserts, as the publisher did. A spelling that was inserted and deleted again
//!   must not be found, but the row is still there under another spelling. And two spellings find one
//!   row only once. In both cases the statement affects another number of rows than it must, and the group is
//!   applied by rows.
//!
//! Between groups, the locks of such keys order transactions only where commits keep the publisher's order:
//! what is executed too early there finds other rows or a value that is taken, and is executed
//! again. Without that order the whole table is locked.

use engine::key::KeyForm;
use engine::net::{TableFolding, TableRules};
use engine::relation::RemoteRelation;
use pgoutput::ReplicaIdentity;

use crate::subscriber::catalogue::{Column, Identity, Table, TextInput};
use crate::subscriber::format::{PublisherTypes, ValueType};
use crate::subscriber::mapping::{Search, SearchColumn};
use crate::subscriber::oid::{
    BIT, BOOL, BPCHAR, BYTEA, CHAR, CID, CIDR, DATE, FLOAT4, FLOAT8, INET, INT2, INT4, INT8,
    MACADDR, MACADDR8, NAME, NUMERIC, OID, PG_LSN, TEXT, TIME, TIMESTAMP, TIMESTAMPTZ, TIMETZ,
    UUID, VARBIT, VARCHAR, XID, XID8,
};

/// How the changes of a table are applied. Each reason is a sentence for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TableApplyMode {
    /// As sets of net changes.
    Set,
    /// Inserts as sets; updates and deletes one by one.
    Append { reason: String },
    /// One by one.
    Row { reason: String },
}

impl TableApplyMode {
    /// The name in the output of `status`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Set => "set",
            Self::Append { .. } => "append",
            Self::Row { .. } => "row",
        }
    }

    /// Why the mode is not [`Self::Set`].
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            Self::Set => None,
            Self::Append { reason } | Self::Row { reason } => Some(reason),
        }
    }
}

/// Decides for one version of a published table and one version of its subscriber table. `columns`
/// holds the index in `table.columns` of each published column.
pub(crate) fn decide(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    search: &Search,
    types: &PublisherTypes,
) -> (TableApplyMode, TableRules) {
    let (mode, fold) = fold(remote, table, columns, search, types);
    let rules = TableRules {
        published: remote.id,
        root: table.root,
        storage: (!table.partitioned).then_some(table.oid),
        columns: columns.len(),
        updates_alone: updates_alone(table, columns, &fold),
        moves: keys_can_be_set(remote, table, columns, types, &fold),
        seeks: false,
        told_apart: told_apart(remote, table, columns, types, &fold),
        written: Vec::new(),
        fold,
    };
    (mode, rules)
}

/// The columns by which two rows without a key are known to be different rows.
fn told_apart(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    types: &PublisherTypes,
    fold: &TableFolding,
) -> Vec<(usize, KeyForm)> {
    if *fold != TableFolding::WholeRow {
        return Vec::new();
    }
    let forms = remote.columns.iter().zip(columns).enumerate();
    let certain = forms.filter_map(|(column, (sent, local))| {
        Some((column, stored_form(types.sent(sent), &table.columns[*local]).ok()?))
    });
    certain.collect()
}

fn fold(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    search: &Search,
    types: &PublisherTypes,
) -> (TableApplyMode, TableFolding) {
    if let Some((reason, user_code)) = side_effect(table, columns) {
        return (TableApplyMode::Row { reason }, TableFolding::Never { user_code });
    }
    if let Some(reason) = cast_from_text(table, columns) {
        return (TableApplyMode::Append { reason }, TableFolding::Append);
    }
    let folded = match search {
        Search::Key(_) if keys_are_on_leaves(remote, table) => {
            Err(format!("keys are unique only within each partition of {}", table.name))
        }
        Search::Key(key) => key_forms(remote, table, columns, key, types).map(TableFolding::Key),
        Search::WholeRow(_) if !table.placement.is_plain() => Err(format!(
            "{} is distributed by Citus and has no key, so its rows are found one by one",
            table.name
        )),
        Search::WholeRow(_) => {
            stored_as_sent(remote, table, columns, types).map(|()| TableFolding::WholeRow)
        }
        Search::Impossible { reason, .. } => Err(reason.clone()),
    };
    match folded {
        Ok(fold) => (TableApplyMode::Set, fold),
        Err(reason) => (TableApplyMode::Append { reason }, TableFolding::Append),
    }
}

/// Whether rows are found by keys that exist only on the leaf partitions. Then two rows may have
/// the same key, and only a statement for a single row notices that.
pub(crate) fn keys_are_on_leaves(remote: &RemoteRelation, table: &Table) -> bool {
    table.identity_key.is_none() && remote.replica_identity != ReplicaIdentity::Full
}

/// The first reason why a change has effects besides its row, and whether user code may run. User
/// code may read any table.
fn side_effect(table: &Table, columns: &[usize]) -> Option<(String, bool)> {
    if let Some(reason) = &table.hooks.code {
        return Some((reason.clone(), true));
    }
    let name = table.name.to_string();
    for column in &table.columns {
        if let Some(function) = &column.domain_code {
            return Some((
                format!(
                    "type {} of column {} of {name} calls function {function}, which is not \
                     IMMUTABLE",
                    column.type_name, column.name
                ),
                true,
            ));
        }
    }
    let unpublished = table.columns.iter().enumerate().filter(|(i, _)| !columns.contains(i));
    let mut found = None;
    for (_, column) in unpublished.filter(|(_, column)| !column.generated) {
        if let Some(default) = &column.volatile_default {
            let reason = format!(
                "column {} of {name} is not published, and its default is volatile: {}",
                column.name, default.calls
            );
            if default.user_code {
                return Some((reason, true));
            }
            found.get_or_insert((reason, false));
        } else if column.identity != Identity::None {
            let reason = format!("identity column {} of {name} is not published", column.name);
            found.get_or_insert((reason, false));
        }
    }
    found
}

/// Why a set statement cannot turn text into values of these columns. COPY and statements for single rows
/// do not need to.
fn cast_from_text(table: &Table, columns: &[usize]) -> Option<String> {
    let column = columns
        .iter()
        .map(|at| &table.columns[*at])
        .find(|column| column.text_input == TextInput::None)?;
    Some(format!(
        "a cast from text replaces the input function of type {} of column {} \
         of {}",
        column.type_name, column.name, table.name
    ))
}

/// The comparison form of each key column, or why changes of its rows cannot be folded.
fn key_forms(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    key: &[SearchColumn],
    types: &PublisherTypes,
) -> Result<Vec<(usize, KeyForm)>, String> {
    let form = |column: &SearchColumn| {
        let sent = types.sent(&remote.columns[column.remote]);
        let local = &table.columns[columns[column.remote]];
        let name = || format!("key column {} of {}", local.name, table.name);
        if column.equality != local.equality {
            let name = name();
            return Err(format!("{name} is compared by a non-default operator class in its index"));
        }
        if column.collation.is_some() {
            return Err(format!("{} has another collation in its index", name()));
        }
        check_stored_as_sent(sent, local).map_err(|why| format!("{} {why}", name()))?;
        Ok((column.remote, stored_form(sent, local).unwrap_or(KeyForm::Bytes)))
    };
    key.iter().map(form).collect()
}

/// How two stored values of a column are compared by the default equality of the subscriber's type,
/// or why pgapace cannot compare them exactly.
pub(crate) fn stored_form(sent: ValueType, local: &Column) -> Result<KeyForm, String> {
    if !local.deterministic {
        return Err("has a nondeterministic collation".to_owned());
    }
    check_stored_as_sent(sent, local)?;
    key_form(sent, local)
}

/// Checks that the subscriber stores all columns as sent. Otherwise a table without a key cannot be
/// folded: a row that was stored differently is not found again.
fn stored_as_sent(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    types: &PublisherTypes,
) -> Result<(), String> {
    remote.columns.iter().zip(columns).try_for_each(|(sent, local)| {
        let local = &table.columns[*local];
        check_stored_as_sent(types.sent(sent), local)
            .map_err(|why| format!("column {} of {} {why}", local.name, table.name))
    })
}

/// The maximum `typmod` of time and timestamp types: six digits, which rounds nothing.
const MICROSECONDS: i32 = 6;

/// Whether the subscriber may store a value differently from how it was sent, or refuse it.
/// Assignment to a column with a length or precision rounds, and cuts trailing blanks.
pub(crate) fn is_coerced(sent: ValueType, local: &Column) -> bool {
    let (from, to) = (sent.modifier, local.type_modifier);
    if local.coercion.is_none() || sent.oid == local.base_type && from == to {
        return false;
    }
    let wider = match local.base_type {
        VARCHAR => matches!(sent.oid, VARCHAR | BPCHAR) && (0..=to).contains(&from),
        NUMERIC if sent.oid == NUMERIC && from != -1 => {
            scale(from) == scale(to) && precision(from) <= precision(to)
        }
        TIME | TIMETZ | TIMESTAMP | TIMESTAMPTZ if sent.oid == local.base_type => {
            to == MICROSECONDS || (0..=to).contains(&from)
        }
        _ => false,
    };
    !wider
}

/// Checks that the subscriber stores values as sent, or refuses them.
fn check_stored_as_sent(sent: ValueType, local: &Column) -> Result<(), String> {
    let same = match local.base_type {
        // Trailing blanks are not significant in bpchar, and assignment never cuts bits.
        BPCHAR | BIT | VARBIT => true,
        NUMERIC => is_integer(sent.oid) && scale(local.type_modifier) >= 0,
        _ => false,
    };
    if same || !is_coerced(sent, local) {
        return Ok(());
    }
    Err(format!("is {} on the subscriber, which may round the publisher's values", local.type_name))
}

/// The precision in a `typmod` of numeric.
fn precision(modifier: i32) -> i32 {
    (modifier - 4) >> 16
}

/// The scale in a `typmod` of numeric (`numeric_typmod_scale` in `numeric.c`). It is negative where
/// digits left of the decimal point are rounded.
fn scale(modifier: i32) -> i32 {
    (((modifier - 4) & 0x7ff) ^ 1024) - 1024
}

pub(crate) fn is_integer(oid: u32) -> bool {
    matches!(oid, INT2 | INT4 | INT8)
}

/// The comparison form of a key column for values of the type that the publisher sends.
fn key_form(sent: ValueType, local: &Column) -> Result<KeyForm, String> {
    let (from, to) = (sent.oid, local.base_type);
    // Labels are compared exactly, whatever the publisher's type.
    if local.type_kind == 'e' {
        return Ok(KeyForm::Bytes);
    }
    let form = match to {
        // Stored as sent, whatever the publisher's type.
        TEXT | VARCHAR => return Ok(KeyForm::Bytes),
        INT2 | INT4 | INT8 => KeyForm::Bytes,
        NUMERIC => KeyForm::Numeric,
        FLOAT4 => KeyForm::Float4,
        FLOAT8 => KeyForm::Float8,
        BPCHAR => KeyForm::Blanks,
        BOOL | BYTEA | CHAR | NAME | OID | XID | CID | CIDR | INET | MACADDR8 | MACADDR | DATE
        | TIME | TIMESTAMP | TIMESTAMPTZ | UUID | PG_LSN | XID8 => KeyForm::Bytes,
        _ => {
            return Err(format!(
                "is of type {}, whose equality pgapace cannot reproduce",
                local.type_name
            ));
        }
    };
    let same = from == to
        || is_integer(from) && (is_integer(to) || to == NUMERIC)
        || matches!(from, TEXT | VARCHAR) && to == BPCHAR;
    if same {
        return Ok(form);
    }
    Err(format!(
        "is of type {} on the subscriber and of another type on the publisher",
        local.type_name
    ))
}

/// Whether a set would have to update a column that UPDATE cannot set (GENERATED ALWAYS AS IDENTITY). Where a key finds
/// the rows, such a column is compared instead.
fn updates_alone(table: &Table, columns: &[usize], fold: &TableFolding) -> bool {
    !matches!(fold, TableFolding::Key(_))
        && columns.iter().any(|local| table.columns[*local].identity == Identity::Always)
}

/// Whether a set can change keys: those that pgapace compares exactly, where UPDATE can set every column. Citus moves no
/// row to another shard.
fn keys_can_be_set(
    remote: &RemoteRelation,
    table: &Table,
    columns: &[usize],
    types: &PublisherTypes,
    fold: &TableFolding,
) -> bool {
    let TableFolding::Key(key) = fold else { return false };
    table.placement.is_plain()
        && columns.iter().all(|local| table.columns[*local].identity != Identity::Always)
        && key.iter().all(|&(column, _)| {
            let sent = types.sent(&remote.columns[column]);
            stored_form(sent, &table.columns[columns[column]]).is_ok()
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::catalogue::{Coercion, Equality};

    use crate::subscriber::oid::INTERVAL;

    fn sent(oid: u32, modifier: i32) -> ValueType {
        ValueType { oid, kind: 'b', modifier }
    }

    fn local(base_type: u32, type_modifier: i32) -> Column {
        Column {
            name: "c".to_owned(),
            attnum: 1,
            base_type,
            declared_type: base_type,
            type_name: "declared".to_owned(),
            base_type_sql: String::new(),
            array_type: 0,
            is_array: false,
            type_kind: 'b',
            deterministic: true,
            identity: Identity::None,
            generated: false,
            not_null: true,
            equality: Equality::Text,
            type_modifier,
            coercion: (type_modifier != -1).then(Coercion::default),
            volatile_default: None,
            domain_code: None,
            text_input: TextInput::Cast,
            receives_binary: true,
        }
    }

    #[test]
    fn forms_of_key_columns() {
        let form = |from, to| key_form(sent(from, -1), &local(to, -1)).ok();
        assert_eq!(form(INT4, INT8), Some(KeyForm::Bytes));
        assert_eq!(form(INT4, NUMERIC), Some(KeyForm::Numeric));
        assert_eq!(form(NUMERIC, INT4), None);
        assert_eq!(form(VARCHAR, BPCHAR), Some(KeyForm::Blanks));
        assert_eq!(form(BPCHAR, TEXT), Some(KeyForm::Bytes));
        assert_eq!(form(FLOAT4, FLOAT4), Some(KeyForm::Float4));
        assert_eq!(form(FLOAT4, FLOAT8), None);
        assert_eq!(form(INTERVAL, INTERVAL), None);
        assert_eq!(form(20_000, INT4), None);
        let label = Column { type_kind: 'e', ..local(30_000, -1) };
        assert_eq!(key_form(sent(20_000, -1), &label), Ok(KeyForm::Bytes));
    }

    #[test]
    fn modifiers_that_change_values() {
        let keeps = |from, from_modifier, to, to_modifier| {
            check_stored_as_sent(sent(from, from_modifier), &local(to, to_modifier)).is_ok()
        };
        assert!(keeps(TEXT, -1, VARCHAR, -1));
        assert!(keeps(VARCHAR, 14, VARCHAR, 14));
        assert!(keeps(VARCHAR, 14, VARCHAR, 24));
        assert!(!keeps(VARCHAR, 14, VARCHAR, 9));
        assert!(!keeps(TEXT, -1, VARCHAR, 14));
        let numeric = |precision: i32, scale: i32| ((precision << 16) | (scale & 0x7ff)) + 4;
        assert!(keeps(NUMERIC, numeric(10, 2), NUMERIC, numeric(10, 2)));
        assert!(!keeps(NUMERIC, numeric(10, 3), NUMERIC, numeric(10, 2)));
        assert!(keeps(INT4, -1, NUMERIC, numeric(10, 0)));
        assert!(!keeps(INT4, -1, NUMERIC, numeric(10, -2)));
        assert!(keeps(NUMERIC, numeric(10, 2), NUMERIC, numeric(12, 2)));
        assert!(!keeps(NUMERIC, numeric(10, 2), NUMERIC, numeric(9, 2)));
        assert!(!keeps(NUMERIC, numeric(10, 2), NUMERIC, numeric(12, 3)));
        assert!(!keeps(NUMERIC, -1, NUMERIC, numeric(12, 2)));
        assert!(!keeps(FLOAT8, -1, NUMERIC, numeric(12, 2)));
        assert!(!keeps(TIMESTAMP, -1, TIMESTAMP, 0));
        assert!(keeps(TIMESTAMP, -1, TIMESTAMP, 6));
        assert!(keeps(TIMESTAMP, 2, TIMESTAMP, 3));
        assert!(!keeps(TIMESTAMP, 3, TIMESTAMP, 2));
        assert!(!keeps(TEXT, -1, TIMESTAMP, 6));
        assert!(!keeps(INTERVAL, -1, INTERVAL, 6));
        assert!(keeps(BPCHAR, 9, BPCHAR, 7));
        assert!(keeps(VARBIT, -1, BIT, 7));
        assert!(!keeps(1231, -1, 1231, numeric(5, 2)), "elements of an array");
    }
}
