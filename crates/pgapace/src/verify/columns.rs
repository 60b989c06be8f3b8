//! How a column is compared: SQL expressions for both servers whose values are equal exactly if
//! replication would leave the value as it is. Pure.
//!
//! A column is compared by its text, as the type's output function writes it under the settings of
//! [`super::pair`]. Text is what replication carries, so it tells all values apart that replication can tell
//! apart. Some types have a cheaper form that does the same ([`HashedBy`]). Built-in types have an exact
//! text under these settings: floats and geometric types with `extra_float_digits` = 3, money with
//! `lc_monetary` = C, bytea in hex. For a base type of an extension, it is not known whether the text is
//! exact, or which of its settings it depends on. So these types are compared by their send functions, which
//! COPY BINARY and pg_upgrade rely on, if both servers have the type. Arrays, ranges, composites and domains
//! of them are compared as text.
//!
//! The text of a composite, and of a range of a user, is exact in UTF8 only. `record_out` and `range_out` quote
//! by `isspace`, which depends on LC_CTYPE for the bytes of other encodings: equal values could have
//! different texts ([`RecordForm`]). There, a composite of built-in types is compared by `record_send`, and
//! what has other types in it is not comparable.
//!
//! If the types differ, the publisher does what replication does: it casts the text of its value to
//! the subscriber's type with its modifier, under the settings of the sessions that apply ([`super::reading`]).
//! That needs a type that the publisher has too.

use wire::quote_ident;

use crate::subscriber::oid::{self, FIRST_USER_OID};
use crate::verify::reading::Reading;

/// xml: its cast to text does not call the output function.
const XML: u32 = 142;

/// A column on one server. Type and modifier are those below all domains.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SideColumn {
    pub(crate) name: String,
    pub(crate) type_oid: u32,
    /// With its schema unless it is built in.
    pub(crate) type_name: String,
    /// The same with its modifier.
    pub(crate) type_sql: String,
    /// Without its schema.
    pub(crate) bare_name: String,
    /// `pg_type.typtype` and `typcategory`.
    pub(crate) kind: char,
    pub(crate) category: char,
    pub(crate) modifier: i32,
    pub(crate) is_array: bool,
    /// The quoted name of the send function, if there is one.
    pub(crate) send: Option<String>,
    pub(crate) not_null: bool,
    pub(crate) generated: bool,
    /// Whether strings of the column are ordered byte by byte; true for types without a collation.
    pub(crate) byte_order: bool,
    /// Whether the role may read the column.
    pub(crate) readable: bool,
    pub(crate) record: RecordForm,
    /// Whether quotes in such a text depend on LC_CTYPE of the database.
    pub(crate) quotes_by_locale: bool,
    /// How well the order of the values agrees with that of the rows (`pg_stats.correlation`), if
    /// that is known.
    pub(crate) correlation: Option<f64>,
}

/// Whether the text of a type is made by `record_out`, or by `range_out` for a range of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecordForm {
    /// No part of it is.
    None,
    /// The type is a composite of built-in types with these oids.
    OfBuiltIns(Vec<u32>),
    Other,
}

impl SideColumn {
    fn built_in(&self) -> bool {
        self.type_oid < FIRST_USER_OID
    }

    /// A base type that an extension or a user created.
    pub(crate) fn of_extension(&self) -> bool {
        !self.built_in() && self.kind == 'b' && !self.is_array
    }

    /// Whether nothing changed that a comparison rests on.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let with = |column: &Self| Self { correlation: None, ..column.clone() };
        with(self) == with(other)
    }

    /// The name of the type that a cast of another server must find.
    pub(crate) fn needed_type(&self) -> &str {
        &self.type_name
    }

    pub(crate) fn literals(&self) -> LiteralType {
        let type_sql = match self.type_oid {
            oid::INT2 | oid::INT4 | oid::INT8 => "pg_catalog.int8".to_owned(),
            // `character` and `bit` would be character(1) and bit(1).
            _ if self.built_in() => format!("pg_catalog.{}", quote_ident(&self.bare_name)),
            _ => self.type_name.clone(),
        };
        LiteralType { type_sql, casts: self.kind == 'e' }
    }
}

/// The type of literals that are compared with a column. It has no modifier, which could cut them, and its range includes
/// that of the other server's column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LiteralType {
    pub(crate) type_sql: String,
    /// Whether the column must be cast to it: the operators of anyenum take no domain over an enum
    /// (`check_generic_type_consistency` in `parse_coerce.c`). An index serves the column with the cast as well.
    pub(crate) casts: bool,
}

/// SQL for one column on one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ColumnSql {
    /// The expression that is hashed, of the type that [`ComparedColumn::by`] needs.
    pub(crate) hashed: String,
    /// Whether that is the column itself, so that nothing is computed.
    pub(crate) stored: bool,
    /// The text by which a value is named, NULL for NULL.
    pub(crate) text: String,
    /// Whether that is the text of the column's own type, which can be read as a value of it.
    pub(crate) own: bool,
}

/// Which function hashes a column, on both servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HashedBy {
    Int4,
    Int8,
    Uuid,
    Text,
}

/// How a column is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ComparedColumn {
    pub(crate) name: String,
    pub(crate) publisher: ColumnSql,
    pub(crate) subscriber: ColumnSql,
    pub(crate) by: HashedBy,
    /// Whether either server may have a NULL.
    pub(crate) nullable: bool,
    /// Whether it can be a part of the key: its text can be read as a value.
    pub(crate) names_rows: bool,
}

/// Types whose cast to text calls the output function and nothing else.
fn casts_by_output(type_oid: u32) -> bool {
    matches!(
        type_oid,
        oid::INT2
            | oid::INT4
            | oid::INT8
            | oid::FLOAT4
            | oid::FLOAT8
            | oid::NUMERIC
            | oid::TEXT
            | oid::VARCHAR
            | oid::DATE
            | oid::TIME
            | oid::TIMESTAMP
            | oid::TIMESTAMPTZ
            | oid::UUID
            | oid::JSON
            | oid::JSONB
            | oid::BYTEA
    )
}

/// The output text of an expression. `format` calls the output function, where a cast to text may
/// call another function: it cuts the blanks of bpchar, and writes `true` for `t`.
pub(crate) fn output_text(expression: &str) -> String {
    format!(
        "CASE WHEN {expression} IS DISTINCT FROM NULL \
         THEN pg_catalog.format('%s', {expression}) END"
    )
}

/// A column as its own type writes it.
fn text_of(column: &SideColumn) -> String {
    let value = quote_ident(&column.name);
    match column.type_oid != XML && casts_by_output(column.type_oid) {
        true => format!("{value}::pg_catalog.text"),
        false => output_text(&value),
    }
}

fn plain(column: &SideColumn) -> ColumnSql {
    ColumnSql { own: true, ..as_text(text_of(column)) }
}

/// The binary form of a column in hex.
fn bytes_of(column: &SideColumn, function: &str) -> String {
    format!("pg_catalog.encode({function}({}), 'hex')", quote_ident(&column.name))
}

/// A column that is compared in its binary form, and named by its text.
fn sent(column: &SideColumn, function: &str) -> ColumnSql {
    let (hashed, text) = (bytes_of(column, function), text_of(column));
    ColumnSql { hashed, stored: false, text, own: true }
}

/// An expression of type text.
fn as_text(text: String) -> ColumnSql {
    ColumnSql { hashed: text.clone(), stored: false, text, own: false }
}

/// The cheapest exact form of a column whose type is the same on both servers.
fn exact(column: &SideColumn, other: &SideColumn) -> (HashedBy, ColumnSql) {
    let value = quote_ident(&column.name);
    let (by, hashed) = match column.type_oid {
        oid::INT4 => (HashedBy::Int4, value),
        oid::INT2 | oid::BOOL => (HashedBy::Int4, format!("{value}::pg_catalog.int4")),
        oid::INT8 => (HashedBy::Int8, value),
        oid::UUID => (HashedBy::Uuid, value),
        // The text is the value.
        oid::TEXT => (HashedBy::Text, value),
        // The cast cuts blanks, with which all values are filled up to the same length.
        oid::BPCHAR if column.modifier > 0 && column.modifier == other.modifier => {
            (HashedBy::Text, format!("{value}::pg_catalog.text"))
        }
        oid::DATE => (HashedBy::Text, bytes_of(column, "pg_catalog.date_send")),
        oid::TIMESTAMP => (HashedBy::Text, bytes_of(column, "pg_catalog.timestamp_send")),
        oid::TIMESTAMPTZ => (HashedBy::Text, bytes_of(column, "pg_catalog.timestamptz_send")),
        _ => (HashedBy::Text, text_of(column)),
    };
    let stored = hashed == quote_ident(&column.name);
    (by, ColumnSql { hashed, stored, text: text_of(column), own: true })
}

/// The text of the publisher's column as the subscriber stores it in a column of another type.
fn converted(publisher: &SideColumn, subscriber: &SideColumn) -> ColumnSql {
    let text = text_of(publisher);
    let cast = output_text(&format!("({text})::{}", subscriber.type_sql));
    match is_cut(&text, subscriber) {
        Some(condition) => as_text(format!("CASE WHEN {condition} THEN {text} ELSE {cast} END")),
        None => as_text(cast),
    }
}

/// An explicit cast cuts strings that are too long, where replication refuses them; those in an array too. The condition is
/// true for such a text. It stays as it is, so that it differs.
fn is_cut(text: &str, subscriber: &SideColumn) -> Option<String> {
    let modifier = i64::from(subscriber.modifier);
    let too_long = |value: &str| match subscriber.type_oid {
        _ if modifier < 0 => None,
        oid::VARCHAR | oid::BPCHAR | oid::VARCHAR_ARRAY | oid::BPCHAR_ARRAY => Some(format!(
            "pg_catalog.char_length(pg_catalog.rtrim({value}, ' ')) > {}",
            modifier - 4
        )),
        oid::BIT | oid::BIT_ARRAY => {
            Some(format!("pg_catalog.length(({value})::pg_catalog.varbit) <> {modifier}"))
        }
        oid::VARBIT | oid::VARBIT_ARRAY => {
            Some(format!("pg_catalog.length(({value})::pg_catalog.varbit) > {modifier}"))
        }
        _ => None,
    };
    if !subscriber.is_array {
        return too_long(text);
    }
    let elements = format!("pg_catalog.unnest(({text})::pg_catalog.text[]) AS e (element)");
    Some(format!("EXISTS (SELECT FROM {elements} WHERE {})", too_long("e.element")?))
}

/// Whether values name objects of the database, which have other oids on the other server, or are missing there.
fn names_objects(column: &SideColumn) -> bool {
    let name = column.bare_name.trim_start_matches('_');
    column.built_in() && (name.starts_with("reg") || name == "aclitem")
}

/// Whether a value needs no conversion: both types have the same name, and the subscriber's modifier
/// changes nothing. Types of extensions may be in different schemas.
fn same_type(publisher: &SideColumn, subscriber: &SideColumn) -> bool {
    let same_name = if publisher.built_in() && subscriber.built_in() {
        publisher.type_oid == subscriber.type_oid
    } else {
        publisher.built_in() == subscriber.built_in()
            && publisher.bare_name == subscriber.bare_name
            && publisher.kind == subscriber.kind
    };
    same_name && (subscriber.modifier == -1 || publisher.modifier == subscriber.modifier)
}

/// The send functions of both types, if their texts depend on the locale and their binary forms do not. The
/// binary form of a composite has the oids of its types, which are the same on all servers if they are built
/// in.
fn by_record_send<'a>(
    publisher: &'a SideColumn,
    subscriber: &'a SideColumn,
) -> Result<Option<[&'a str; 2]>, String> {
    let depends = publisher.quotes_by_locale || subscriber.quotes_by_locale;
    let forms = (&publisher.record, &subscriber.record);
    if !depends || forms == (&RecordForm::None, &RecordForm::None) {
        return Ok(None);
    }
    match (forms, &publisher.send, &subscriber.send) {
        ((RecordForm::OfBuiltIns(a), RecordForm::OfBuiltIns(b)), Some(theirs), Some(ours))
            if a == b =>
        {
            Ok(Some([theirs, ours]))
        }
        _ => Err(format!(
            "the text of type {} depends on LC_CTYPE in databases with a single-byte encoding",
            publisher.type_name
        )),
    }
}

/// Decides how a column is compared, or returns the reason why it cannot be. `on_publisher` tells
/// whether the publisher has a type of this name, and `reading` how the subscriber reads texts.
pub(crate) fn compare(
    publisher: &SideColumn,
    subscriber: &SideColumn,
    on_publisher: impl Fn(&str) -> bool,
    reading: &Reading,
) -> Result<ComparedColumn, String> {
    let compared = |by, theirs, ours| {
        Ok(ComparedColumn {
            name: publisher.name.clone(),
            publisher: theirs,
            subscriber: ours,
            by,
            nullable: !(publisher.not_null && subscriber.not_null),
            names_rows: true,
        })
    };
    if same_type(publisher, subscriber) {
        let functions = (&publisher.send, &subscriber.send);
        if let Some([theirs, ours]) = by_record_send(publisher, subscriber)? {
            let bytes = |column, function| as_text(bytes_of(column, function));
            return compared(HashedBy::Text, bytes(publisher, theirs), bytes(subscriber, ours))
                .map(|column| ComparedColumn { names_rows: false, ..column });
        }
        if let (Some(theirs), Some(ours)) = functions
            && publisher.of_extension()
        {
            return compared(HashedBy::Text, sent(publisher, theirs), sent(subscriber, ours));
        }
        if !publisher.built_in() {
            return compared(HashedBy::Text, plain(publisher), plain(subscriber));
        }
        let ((by, theirs), (_, ours)) =
            (exact(publisher, subscriber), exact(subscriber, publisher));
        return compared(by, theirs, ours);
    }
    // The output of an enum is its label. Strings of extensions (citext) are stored as they are.
    if subscriber.kind == 'e' || subscriber.of_extension() && subscriber.category == 'S' {
        return compared(HashedBy::Text, plain(publisher), plain(subscriber));
    }
    if names_objects(subscriber) {
        return Err(format!(
            "publisher type {}, subscriber type {}, whose values name objects of the subscriber",
            publisher.type_sql, subscriber.type_sql
        ));
    }
    if subscriber.record != RecordForm::None {
        by_record_send(publisher, subscriber)?;
    }
    let castable = subscriber.built_in() || publisher.bare_name == subscriber.bare_name;
    if castable && on_publisher(subscriber.needed_type()) {
        let theirs = match reading.of_other(publisher, subscriber, &text_of(publisher))? {
            Some(text) => as_text(text),
            None => converted(publisher, subscriber),
        };
        return compared(HashedBy::Text, theirs, plain(subscriber));
    }
    Err(format!(
        "publisher type {}, subscriber type {}, which the publisher cannot convert to",
        publisher.type_sql, subscriber.type_sql
    ))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::verify) fn column(type_oid: u32, type_sql: &str, modifier: i32) -> SideColumn {
        SideColumn {
            name: "c".to_owned(),
            type_oid,
            type_name: type_sql.to_owned(),
            type_sql: type_sql.to_owned(),
            bare_name: type_sql.to_owned(),
            kind: 'b',
            category: 'U',
            modifier,
            is_array: false,
            send: None,
            not_null: false,
            generated: false,
            byte_order: true,
            readable: true,
            record: RecordForm::None,
            quotes_by_locale: false,
            correlation: None,
        }
    }

    fn of_extension(name: &str, send: Option<&str>) -> SideColumn {
        SideColumn { send: send.map(str::to_owned), ..column(20_000, name, -1) }
    }

    fn compared(publisher: &SideColumn, subscriber: &SideColumn) -> ComparedColumn {
        compare(publisher, subscriber, |_| true, &Reading::default()).unwrap()
    }

    #[test]
    fn the_same_type_is_compared_as_it_is() {
        let one = compared(&column(oid::INT4, "integer", -1), &column(oid::INT4, "integer", -1));
        assert_eq!((&one.publisher, one.by), (&one.subscriber, HashedBy::Int4));
        assert_eq!(one.publisher.hashed, "\"c\"");
        assert_eq!(one.publisher.text, "\"c\"::pg_catalog.text");
        // A modifier that the publisher's column has not may change the value.
        let other = compared(
            &column(oid::NUMERIC, "numeric", -1),
            &column(oid::NUMERIC, "numeric(10,2)", 655_366),
        );
        assert_eq!(other.by, HashedBy::Text);
        assert!(other.publisher.hashed.contains("::numeric(10,2)"), "{other:?}");
        assert_eq!(other.subscriber.hashed, "\"c\"::pg_catalog.text");
    }

    #[test]
    fn the_output_function_is_not_always_the_cast() {
        let bpchar = column(oid::BPCHAR, "character(5)", 9);
        assert!(compared(&bpchar, &bpchar).publisher.text.contains("format('%s', \"c\")"));
        // Without a length, blanks at the end are part of the value.
        let unlimited = column(oid::BPCHAR, "bpchar", -1);
        for publisher in [&unlimited, &bpchar] {
            assert!(compared(publisher, &unlimited).publisher.hashed.contains("format('%s'"));
        }
        assert_eq!(compared(&bpchar, &bpchar).publisher.hashed, "\"c\"::pg_catalog.text");
    }

    #[test]
    fn strings_that_are_too_long_stay_as_they_are() {
        let text = column(oid::TEXT, "text", -1);
        let short = column(oid::VARCHAR, "character varying(3)", 7);
        let value = compared(&text, &short).publisher.hashed;
        assert!(value.contains("pg_catalog.char_length") && value.contains("> 3"), "{value}");
        let array = column(oid::VARCHAR_ARRAY, "character varying(3)[]", 7);
        let value = compared(&text, &SideColumn { is_array: true, ..array }).publisher.hashed;
        assert!(value.contains("e.element, ' ')) > 3"), "{value}");
    }

    #[test]
    fn names_of_objects_cannot_be_compared_with_other_types() {
        let class = column(2205, "regclass", -1);
        let refused = compare(&column(oid::OID, "oid", -1), &class, |_| true, &Reading::default());
        assert!(refused.unwrap_err().contains("name objects"));
        assert!(compared(&class, &class).publisher.own, "the same names on both sides");
    }

    #[test]
    fn types_of_extensions_are_compared_by_their_send_functions() {
        let theirs = of_extension("vector", Some("public.vector_send"));
        let ours = of_extension("vector", Some("ext.vector_send"));
        let both = compared(&theirs, &ours);
        assert_eq!(both.publisher.hashed, "pg_catalog.encode(public.vector_send(\"c\"), 'hex')");
        assert_eq!(both.subscriber.hashed, "pg_catalog.encode(ext.vector_send(\"c\"), 'hex')");
        let without = compared(&of_extension("box3d", None), &of_extension("box3d", None));
        assert!(without.publisher.hashed.contains("format('%s', \"c\")"));
    }

    #[test]
    fn text_is_compared_with_labels_and_strings_of_extensions() {
        let text = column(oid::TEXT, "text", -1);
        let citext = SideColumn { category: 'S', ..of_extension("citext", Some("citextsend")) };
        let label = SideColumn { kind: 'e', ..column(20_001, "mood", -1) };
        for subscriber in [&citext, &label] {
            let one = compare(&text, subscriber, |_| false, &Reading::default()).unwrap();
            assert_eq!(one.publisher.hashed, "\"c\"::pg_catalog.text");
        }
    }

    /// Where quotes depend on the locale, oids of built-in types alone make the binary form comparable.
    #[test]
    fn composites_in_single_byte_encodings() {
        let alike = Reading::default();
        let pair = |record: RecordForm, quotes_by_locale: bool| SideColumn {
            kind: 'c',
            send: Some("pg_catalog.record_send".to_owned()),
            record,
            quotes_by_locale,
            ..column(20_002, "pair", -1)
        };
        let built_in = || RecordForm::OfBuiltIns(vec![oid::INT4, oid::TEXT]);
        let text =
            compare(&pair(built_in(), false), &pair(built_in(), false), |_| true, &alike).unwrap();
        assert!(text.names_rows && !text.publisher.hashed.contains("record_send"));
        let bytes =
            compare(&pair(built_in(), false), &pair(built_in(), true), |_| true, &alike).unwrap();
        assert_eq!(
            bytes.publisher.hashed,
            "pg_catalog.encode(pg_catalog.record_send(\"c\"), 'hex')"
        );
        assert_eq!((bytes.publisher.text, bytes.names_rows), (bytes.publisher.hashed, false));
        let others = [RecordForm::Other, RecordForm::OfBuiltIns(vec![oid::INT4]), RecordForm::None];
        for other in others {
            let refused = compare(&pair(built_in(), true), &pair(other, false), |_| true, &alike);
            assert!(refused.unwrap_err().contains("LC_CTYPE"));
        }
        let text = column(oid::TEXT, "text", -1);
        assert!(compare(&text, &pair(built_in(), true), |_| true, &alike).is_err());
        assert!(
            compare(&pair(built_in(), true), &text, |_| true, &alike).is_ok(),
            "stored as it was sent"
        );
    }

    #[test]
    fn a_type_that_the_publisher_lacks_cannot_be_compared() {
        let alike = Reading::default();
        let (text, other) = (column(oid::TEXT, "text", -1), of_extension("shape", None));
        assert!(compare(&text, &other, |_| true, &alike).unwrap_err().contains("shape"));
        assert!(compare(&text, &column(9999, "newer", -1), |_| false, &alike).is_err());
    }
}
