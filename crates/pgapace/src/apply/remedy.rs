//! The HINT of a change that the subscriber refuses: what to alter there, so that it can be applied.
//!
//! Statements name the table of the error. It is another one than that of the change if a trigger or a rule writes to it.

use engine::table_name::TableName;
use wire::{ServerError, quote_ident};

use crate::apply::user_code;
use crate::encoding_error::{self, Origin};
use crate::error::{Offender, TEMP_FILES_REMEDY, exceeds_temp_file_limit};
use crate::sqlstate;
use crate::subscriber::catalogue::Column;
use crate::subscriber::conflict::ConflictType;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::missing_label;
use crate::table_name::sql_name;

/// What to do about an error that is no conflict.
pub(crate) fn remedy_of_error(
    said: &ServerError,
    offender: &Offender,
    map: Option<&TableMap>,
) -> String {
    let remedy = match said.code.as_str() {
        _ if let Some(remedy) = of_domain(said) => remedy,
        _ if let Some(remedy) = encoding_error::remedy(said, Origin::Wal) => remedy,
        _ if exceeds_temp_file_limit(said) => format!("On the subscriber: {TEMP_FILES_REMEDY}"),
        sqlstate::NOT_NULL_VIOLATION | sqlstate::CHECK_VIOLATION
            if let Some(remedy) = of_constraint(said, offender, map) =>
        {
            remedy
        }
        sqlstate::FOREIGN_KEY_VIOLATION
        | sqlstate::UNIQUE_VIOLATION
        | sqlstate::EXCLUSION_VIOLATION => remedy_of_conflict(None),
        _ if missing_label::is_reported(said) => {
            let columns =
                map.into_iter().flat_map(|map| (0..map.columns.len()).map(|i| map.local(i)));
            // The statement is for the enum below a domain, which the message names.
            let is_enum = |column: &&Column| {
                column.type_kind == 'e' && column.declared_type == column.base_type
            };
            let enums = columns.filter(is_enum);
            missing_label::hint(said, enums.map(|column| column.type_name.as_str()))
        }
        sqlstate::STRING_DATA_RIGHT_TRUNCATION
        | sqlstate::NUMERIC_VALUE_OUT_OF_RANGE
        | sqlstate::INVALID_DATETIME_FORMAT
        | sqlstate::DATETIME_FIELD_OVERFLOW
        | sqlstate::INVALID_TEXT_REPRESENTATION
        | sqlstate::INVALID_BINARY_REPRESENTATION
        | sqlstate::UNTRANSLATABLE_CHARACTER
        | sqlstate::DATATYPE_MISMATCH
            if map.is_some() || user_code::is_cause(said) =>
        {
            of_value(said, offender, map)
        }
        // The server's hint is for the session that executes the TRUNCATE.
        sqlstate::FEATURE_NOT_SUPPORTED
            if said.routine.as_deref() == Some("heap_truncate_check_FKs") =>
        {
            "On the subscriber, a table that is not truncated references it. Drop that foreign key: ALTER TABLE … \
             DROP CONSTRAINT …"
                .to_owned()
        }
        sqlstate::UNDEFINED_TABLE
        | sqlstate::UNDEFINED_FUNCTION
        | sqlstate::UNDEFINED_OBJECT
        | sqlstate::UNDEFINED_COLUMN
            if let Some(function) = user_code::innermost(said) =>
        {
            format!(
                "Correct the function of the subscriber. If it names an object without its schema: ALTER FUNCTION \
                 {function} SET search_path = …; (changes are applied with an empty search_path, as in a native \
                 subscription)"
            )
        }
        _ if let Some(hint) = &said.hint => {
            let hint = wire::without_passwords(hint.trim_end().trim_end_matches('.'));
            format!("{hint}. Correct the cause on the subscriber")
        }
        _ => "Correct on the subscriber what the message names".to_owned(),
    };
    remedy.trim_end_matches(';').to_owned()
}

pub(crate) const CHANGE_ROW: &str =
    "Change the conflicting row or the constraint on the subscriber";

/// What to do about a change that cannot be applied.
pub(crate) fn remedy_of_conflict(kind: Option<ConflictType>) -> String {
    let choose = kind.map_or(String::new(), |kind| {
        format!(", or choose an action for {} (--on-conflict)", kind.name())
    });
    format!("{CHANGE_ROW}{choose}")
}

/// A constraint of a domain. An error of a constraint of a table names the table, and no data type.
fn of_domain(said: &ServerError) -> Option<String> {
    let name = quote_ident(said.data_type.as_deref()?);
    let domain = match &said.schema {
        Some(schema) => format!("{}.{name}", quote_ident(schema)),
        None => name,
    };
    match (said.code.as_str(), said.constraint.as_deref()) {
        (sqlstate::NOT_NULL_VIOLATION, _) => Some(format!(
            "The domain is NOT NULL on the subscriber: ALTER DOMAIN {domain} DROP NOT NULL"
        )),
        (sqlstate::CHECK_VIOLATION, Some(constraint)) => Some(format!(
            "The publisher's domain does not have this constraint, or has another one: ALTER DOMAIN \
             {domain} DROP CONSTRAINT {};",
            quote_ident(constraint)
        )),
        _ => None,
    }
}

/// A column that is NOT NULL, a CHECK, or a partition that is missing. `None` if the server names none of these: RAISE
/// may have the same SQLSTATE.
fn of_constraint(
    said: &ServerError,
    offender: &Offender,
    map: Option<&TableMap>,
) -> Option<String> {
    let own = own_table(offender, map);
    if let Some(other) = other_table(said, offender, map) {
        let change = match (said.code.as_str(), &said.column, &said.constraint) {
            (sqlstate::NOT_NULL_VIOLATION, Some(column), _) => {
                format!("ALTER TABLE {other} ALTER COLUMN {} DROP NOT NULL", quote_ident(column))
            }
            (sqlstate::CHECK_VIOLATION, _, Some(constraint)) => {
                format!("ALTER TABLE {other} DROP CONSTRAINT {}", quote_ident(constraint))
            }
            (sqlstate::CHECK_VIOLATION, ..) if lacks_partition(said) => {
                format!("CREATE TABLE … PARTITION OF {other} FOR VALUES …; or DEFAULT")
            }
            _ => return None,
        };
        return Some(format!(
            "On the subscriber, a trigger or a rule of {own} writes to {other}, which refuses the row. Correct \
             either: {change}"
        ));
    }
    match (said.code.as_str(), &said.column, &said.constraint) {
        (sqlstate::NOT_NULL_VIOLATION, Some(column), _) => Some(format!(
            "The column is NOT NULL on the subscriber: ALTER TABLE {own} ALTER COLUMN {} DROP NOT NULL; or, \
             if the publisher has no such column, give it a default",
            quote_ident(column)
        )),
        (sqlstate::CHECK_VIOLATION, _, Some(constraint)) => Some(format!(
            "The publisher does not have this constraint, or has another one: ALTER TABLE {own} DROP \
             CONSTRAINT {};",
            quote_ident(constraint)
        )),
        (sqlstate::CHECK_VIOLATION, ..) if lacks_partition(said) => {
            // A partition may have partitions itself.
            let parent = named_table(said).map_or(own, |table| sql_name(&table));
            Some(format!(
                "If no partition accepts the row: CREATE TABLE … PARTITION OF {parent} FOR VALUES …; or DEFAULT"
            ))
        }
        _ => None,
    }
}

/// A value that is not accepted by the type of a column, or by code of the subscriber.
fn of_value(said: &ServerError, offender: &Offender, map: Option<&TableMap>) -> String {
    let own = own_table(offender, map);
    let changes: Vec<_> = map.map_or_else(Vec::new, |map| {
        let unlike = map.unlike.iter().map(|(remote, declared)| {
            let column = quote_ident(&map.local(*remote).name);
            format!("ALTER COLUMN {column} TYPE {}", declared.as_deref().unwrap_or("…"))
        });
        unlike.collect()
    });
    if user_code::is_cause(said) {
        return format!(
            "A function of the subscriber does not accept the value, perhaps that of a trigger of {own}. Correct the \
             function, or the table to which it writes"
        );
    }
    if changes.is_empty() {
        let another = "nother object of the subscriber does not accept the value: an index expression, a generated column, \
                       a CHECK, a trigger, or a domain. Correct or drop it";
        let alike = map.map(|map| map.named_alike.join(", ")).filter(|names| !names.is_empty());
        return match alike {
            None => format!("The columns of {own} have the publisher's types. A{another}"),
            Some(names) => format!(
                "The columns of {own} have types of the same names as the publisher's. Perhaps one of them is defined in \
                 another way ({names}): pgapace check says how; ALTER TYPE or ALTER DOMAIN, or create it anew. If not, \
                 a{another}"
            ),
        };
    }
    format!(
        "The value does not fit the type of its column on the subscriber. Change that to the \
         publisher's type: ALTER TABLE {own} {};",
        changes.join(", ")
    )
}

/// Whether no partition accepts a row. The message may be in any language.
fn lacks_partition(said: &ServerError) -> bool {
    said.routine.as_deref() == Some("ExecFindPartition")
}

/// The table of the change, for SQL.
fn own_table(offender: &Offender, map: Option<&TableMap>) -> String {
    let map = map.map(|map| map.table.sql_name());
    let relation = || offender.relation.as_ref().map(sql_name);
    map.or_else(relation).or_else(|| offender.table.clone()).unwrap_or_else(|| "…".to_owned())
}

/// The table that the server names, for SQL, if it is not that of the change.
fn other_table(said: &ServerError, offender: &Offender, map: Option<&TableMap>) -> Option<String> {
    let named = named_table(said)?;
    let own = map.map(|map| &map.table.name).or(offender.relation.as_ref());
    // A partition of the table is no other one.
    let has_partitions = map.is_some_and(|map| map.table.partitioned);
    let is_other = own != Some(&named) && (!has_partitions || user_code::is_cause(said));
    is_other.then(|| sql_name(&named))
}

fn named_table(said: &ServerError) -> Option<TableName> {
    let (schema, name) = (said.schema.clone()?, said.table.clone()?);
    Some(TableName { schema, name })
}
