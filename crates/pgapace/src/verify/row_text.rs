//! The text of a row, of which the hashes are taken. Pure.
//!
//! `concat_ws` calls the output function of each column and copies the text, so it costs about as much
//! as COPY of the row in text format. `ROW(…)::text` costs twice as much, and `record_out` quotes by
//! `isspace`, which depends on the locale for some single-byte encodings: equal rows could have
//! different texts. Hash functions of types are cheaper, but not exact: `hashint8extended` folds a
//! value to 32 bits, and `hash_numeric_extended` does not tell 1.0 and 1.00 apart.
//!
//! Different rows have different texts. The texts of most types are never empty and have no
//! separator in them. Strings and other types are followed by their lengths at the end of the row; one
//! of them needs none. `concat_ws` leaves NULL out, so a row with a NULL has another form, which begins
//! with 0 and has the lengths of all strings: no text and no length is NULL.

use crate::subscriber::oid;
use crate::verify::columns::ColumnSql;

/// No text of a type with [`is_plain`] has it.
const SEPARATOR: &str = "E'\\x1f'";

/// A function takes 100 arguments.
const MOST_ARGUMENTS: usize = 90;

/// A column on one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowField {
    pub(crate) sql: ColumnSql,
    /// Whether either server may have a NULL.
    pub(crate) nullable: bool,
    /// See [`is_plain`].
    pub(crate) plain: bool,
}

/// Whether the text of a type is never empty and never has a separator.
pub(crate) fn is_plain(type_oid: u32) -> bool {
    matches!(
        type_oid,
        oid::BOOL
            | oid::BYTEA
            | oid::INT2
            | oid::INT4
            | oid::INT8
            | oid::OID
            | oid::FLOAT4
            | oid::FLOAT8
            | oid::NUMERIC
            | oid::MONEY
            | oid::DATE
            | oid::TIME
            | oid::TIMETZ
            | oid::TIMESTAMP
            | oid::TIMESTAMPTZ
            | oid::INTERVAL
            | oid::UUID
            | oid::JSON
            | oid::JSONB
            | oid::INET
            | oid::CIDR
            | oid::MACADDR
            | oid::PG_LSN
    )
}

/// SQL for the text of a row. If `converts`, lengths are counted in characters, because the servers
/// have different encodings.
pub(crate) fn row_text(fields: &[RowField], converts: bool) -> String {
    if let [only] = fields
        && !only.nullable
    {
        return only.sql.compared().to_owned();
    }
    let length = |field: &RowField| {
        let function = if converts { "char_length" } else { "octet_length" };
        format!("pg_catalog.{function}({})", field.sql.length)
    };
    let values = || fields.iter().map(|field| field.sql.value.clone());
    let lengths: Vec<_> = fields.iter().filter(|field| !field.plain).map(length).collect();
    let but_one = &lengths[..lengths.len().saturating_sub(1)];
    let whole = || std::iter::once("'1'".to_owned()).chain(values()).chain(but_one.iter().cloned());
    let whole = joined(&whole().collect::<Vec<_>>());
    let nullable: Vec<_> =
        fields.iter().filter(|field| field.nullable).map(|field| field.sql.value.clone()).collect();
    if nullable.is_empty() {
        return whole;
    }
    let parts = std::iter::once("'0'".to_owned()).chain(values()).chain(lengths.iter().cloned());
    let mut separated = Vec::new();
    for part in parts {
        if !separated.is_empty() {
            separated.push(SEPARATOR.to_owned());
        }
        separated.push(part);
    }
    let nulls: Vec<_> = nullable
        .chunks(MOST_ARGUMENTS)
        .map(|some| format!("pg_catalog.num_nulls({})", some.join(", ")))
        .collect();
    format!(
        "CASE {} WHEN 0 THEN {whole} ELSE {} END",
        nulls.join(" + "),
        in_groups(&separated, |group| format!("pg_catalog.concat({group})"))
    )
}

fn joined(parts: &[String]) -> String {
    in_groups(parts, |group| format!("pg_catalog.concat_ws({SEPARATOR}, {group})"))
}

/// Calls a function that joins texts, of many in two levels.
fn in_groups(parts: &[String], call: impl Fn(&str) -> String) -> String {
    if parts.len() <= MOST_ARGUMENTS {
        return call(&parts.join(", "));
    }
    let groups: Vec<_> =
        parts.chunks(MOST_ARGUMENTS).map(|group| call(&group.join(", "))).collect();
    call(&groups.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &str, nullable: bool, plain: bool) -> RowField {
        let sql = ColumnSql {
            value: name.to_owned(),
            text: format!("{name}::text"),
            length: name.to_owned(),
            sent: false,
        };
        RowField { sql, nullable, plain }
    }

    #[test]
    fn one_column_is_its_text() {
        assert_eq!(row_text(&[field("a", false, false)], false), "a::text");
    }

    #[test]
    fn strings_but_one_have_lengths() {
        let fields = [field("a", false, false), field("b", false, true), field("c", false, false)];
        assert_eq!(
            row_text(&fields, false),
            "pg_catalog.concat_ws(E'\\x1f', '1', a, b, c, pg_catalog.octet_length(a))"
        );
    }

    #[test]
    fn a_row_with_a_null_has_another_form() {
        let fields = [field("a", false, true), field("b", true, false)];
        assert_eq!(
            row_text(&fields, true),
            "CASE pg_catalog.num_nulls(b) WHEN 0 THEN pg_catalog.concat_ws(E'\\x1f', '1', a, b) \
             ELSE pg_catalog.concat('0', E'\\x1f', a, E'\\x1f', b, E'\\x1f', \
             pg_catalog.char_length(b)) END"
        );
    }

    #[test]
    fn many_columns_are_joined_in_groups() {
        let fields: Vec<_> = (0..200).map(|n| field(&format!("c{n}"), true, true)).collect();
        let text = row_text(&fields, false);
        let calls = text.split("pg_catalog.").skip(1);
        assert!(calls.clone().all(|call| call.matches(", c").count() <= MOST_ARGUMENTS));
        assert_eq!(calls.count(), 3 + 1 + 3 + 1 + 5);
    }
}
