//! The format in which the publisher sends values: binary or text.
//!
//! Binary is used if every published column has the same type on both sides, and if both servers
//! read the binary form of that type the same way, whatever their settings. This table lists the
//! types of PostgreSQL 14 to 19; arrays of them, domains over them, and enums (whose binary form is
//! the label) follow their element or base type:
//!
//! | types | binary form |
//! |---|---|
//! | bool, bytea, integers, oid, xid, xid8, floats, numeric, uuid, pg_lsn, date and time types except interval, geometric types, network addresses, bit strings | the same bytes in all versions |
//! | text, varchar, char(n), name, json, jsonb, enums | text in `client_encoding`, which is the same in all sessions of pgapace; jsonb with a version number, which is 1 in all versions |
//! | "char" | one byte; its text form is not always read as the same byte, see [`Misread`] |
//! | interval | since 17 the largest and smallest values mean infinity and -infinity; between servers on both sides of 17, values are checked, see [`Misread`] |
//! | money | not used, because it depends on lc_monetary: sent as text, with the same setting in all sessions of pgapace |
//! | ranges and multiranges that PostgreSQL has itself | one byte of flags, then the bounds in the form of their type, each after its length (`range_send` in `rangetypes.c`); of a multirange, its ranges after their number, each after its length (`multirange_send`). No oids, and the same in all versions |
//! | oid aliases (regclass, …), composites, ranges, multiranges and arrays of user-defined types, extension types | not used, because they contain oids of one database, or are not known to pgapace: sent as text |
//! | tsvector | number of words, each as text with its positions (`tsvectorsend` in `tsvector.c`), the same in all versions; not used for subscribers that read it as another value, see [`reads_tsvector`] |
//! | tsquery, jsonpath, xml, tid, snapshots and all others | not used: sent as text |

use memchr::memmem;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::{ServerVersion, Session, quote_ident};

use engine::relation::RemoteColumn;
use engine::table_name::TableName;
use pgoutput::Column;

use crate::config::Binary;
use crate::error::{Class, Failure, Recovery, Result};
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::recording::PublisherFacts;
use crate::subscriber::catalogue::{Column as LocalColumn, field, oid_array};
use crate::subscriber::mapping::TableMap;
use crate::subscriber::named::named;
use crate::subscriber::state::table_name_arrays;
use crate::subscriber::type_names::TypeNames;

/// Type of values, below all domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueType {
    pub(crate) oid: u32,
    /// `pg_type.typtype`.
    pub(crate) kind: char,
    /// `atttypmod`, -1 for none.
    pub(crate) modifier: i32,
}

/// The properties of both servers that decide whether one reads the other's values correctly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Servers {
    /// The publisher's major version.
    publisher: u32,
    subscriber: ServerVersion,
    /// Whether text of the publisher is converted to another encoding: for the stream, and again by
    /// the subscriber.
    reencoded: (bool, bool),
}

impl Servers {
    /// The subscriber's version.
    pub(crate) fn subscriber(self) -> ServerVersion {
        self.subscriber
    }

    /// Whether the publisher can switch `two_phase` of a slot off.
    pub(crate) fn can_end_two_phase(self) -> bool {
        self.publisher >= 18
    }

    pub(crate) fn of(publisher: &Session, subscriber: &Session) -> Self {
        let encoding = |name| publisher.parameter(name).unwrap_or_default();
        let encodings = (encoding("server_encoding"), encoding("client_encoding"));
        Self::between(publisher.server_version().major(), encodings, subscriber)
    }

    /// With a publisher that was recorded.
    pub(crate) fn recorded(publisher: &PublisherFacts, subscriber: &Session) -> Self {
        let encodings = (&*publisher.server_encoding, &*publisher.client_encoding);
        Self::between(publisher.version, encodings, subscriber)
    }

    fn between(publisher: u32, (from, sent): (&str, &str), subscriber: &Session) -> Self {
        let reencoded = ![from, sent].contains(&"SQL_ASCII") && from != sent;
        let local = subscriber.parameter("server_encoding").unwrap_or_default();
        Self {
            publisher,
            subscriber: subscriber.server_version(),
            reencoded: (reencoded, reencoded && from != local),
        }
    }
}

/// A type whose values the subscriber may read as different values without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Misread {
    /// `"char"`: since 15 a byte above 127 is written as `\ooo`, and older servers read only the
    /// backslash. Older servers write the byte itself. Conversion to another encoding may turn it
    /// into several bytes, and the subscriber reads only the first.
    Char,
    /// The same in an array.
    Chars,
    /// name: 63 bytes on the publisher may become more in another encoding, and are truncated.
    Name,
    /// interval and its arrays. Servers from 17 on read the largest interval of older servers as
    /// infinity, and older servers read infinity as the largest interval. In text format only the
    /// first case exists: older servers refuse infinity, and no server reads the text form of the
    /// smallest interval.
    Interval,
}

/// The largest interval before PostgreSQL 17.
const LARGEST_INTERVAL: &str = "178956970 years 7 mons 2147483647 days 2562047788:00:54.775807";

/// infinity and -infinity in binary, each after its length, as in an array or a row.
const INFINITE_INTERVALS: [&[u8; 20]; 2] = [
    b"\0\0\0\x10\x7f\xff\xff\xff\xff\xff\xff\xff\x7f\xff\xff\xff\x7f\xff\xff\xff",
    b"\0\0\0\x10\x80\0\0\0\0\0\0\0\x80\0\0\0\x80\0\0\0",
];

/// Hint for a value that the subscriber would misread.
pub(crate) const MISREAD_HINT: &str = "Change the value, or remove its column from the publication. \
    Bytes of \"char\" and names are read exactly in binary: leave --binary at auto, and give all \
    published columns the same types on both sides.";

impl Misread {
    fn of(sent: ValueType, local: ValueType, servers: Servers, binary: bool) -> Option<Self> {
        use crate::subscriber::oid::{CHAR, CHAR_ARRAY, INTERVAL, INTERVAL_ARRAY, NAME};
        let (publisher, subscriber) = (servers.publisher, servers.subscriber.major());
        let reencoded = servers.reencoded;
        let chars = !binary && if publisher >= 15 { subscriber < 15 } else { reencoded.0 };
        let intervals =
            publisher < 17 && subscriber >= 17 || binary && publisher >= 17 && subscriber < 17;
        match (sent.oid, local.oid) {
            (CHAR, CHAR) if chars => Some(Self::Char),
            (CHAR_ARRAY, CHAR_ARRAY) if chars => Some(Self::Chars),
            (NAME, NAME) if !binary && reencoded.1 => Some(Self::Name),
            (INTERVAL, INTERVAL) | (INTERVAL_ARRAY, INTERVAL_ARRAY) if intervals => {
                Some(Self::Interval)
            }
            _ => None,
        }
    }

    /// Returns a description of the value if the subscriber reads it as a different one.
    pub(crate) fn misread(self, value: Column<'_>) -> Option<String> {
        match value {
            Column::Text(text) => {
                self.is_misread(text).then(|| String::from_utf8_lossy(text).into_owned())
            }
            Column::Binary(bytes) => {
                let infinite = |after_length: &&[u8; 20]| {
                    bytes == &after_length[4..] || memmem::find(bytes, *after_length).is_some()
                };
                let sign = INFINITE_INTERVALS.iter().position(infinite)?;
                let sign = if sign == 0 { "" } else { "-" };
                Some(format!("{sign}infinity (before 17: {sign}178956970 years and more)"))
            }
            Column::Null | Column::Unchanged => None,
        }
    }

    fn is_misread(self, text: &[u8]) -> bool {
        match self {
            Self::Char => text.len() > 1,
            // The text form of an array doubles the backslash.
            Self::Chars => {
                let octal = |bytes: &[u8]| {
                    bytes.starts_with(br"\\") && bytes[2..].iter().all(u8::is_ascii_digit)
                };
                !text.is_ascii() || text.windows(5).any(octal)
            }
            Self::Name => text.len() > 63,
            Self::Interval => memmem::find(text, LARGEST_INTERVAL.as_bytes()).is_some(),
        }
    }
}

/// Whether a row of COPY contains an interval that only one of the servers reads as infinite.
pub(crate) fn has_infinite_interval(row: &[u8], binary: bool) -> bool {
    let holds = |bytes: &[u8]| memmem::find(row, bytes).is_some();
    if !binary {
        return holds(LARGEST_INTERVAL.as_bytes());
    }
    INFINITE_INTERVALS.into_iter().any(|bytes| holds(bytes))
}

/// Facts that the stream does not tell about the publisher's types: base types of domains, and
/// which types are enums. Also holds the properties of both servers, and what the stream does not tell of tables.
#[derive(Debug, Clone, Default)]
pub(crate) struct PublisherTypes {
    base_types: FxHashMap<u32, ValueType>,
    /// Declared types, for hints.
    pub(crate) names: TypeNames,
    /// See [`PublishedTable::full_by_name`].
    full_by_name: FxHashSet<TableName>,
    servers: Servers,
    /// Whether values are sent in binary.
    binary: bool,
}

impl PublisherTypes {
    /// Starts without types of tables.
    pub(crate) fn new(servers: Servers, binary: bool) -> Self {
        Self { servers, binary, ..Self::default() }
    }

    pub(crate) fn binary(&self) -> bool {
        self.binary
    }

    /// Whether, and how, the subscriber may misread values of a column.
    pub(crate) fn misread(&self, column: &RemoteColumn, local: &LocalColumn) -> Option<Misread> {
        let local = ValueType {
            oid: local.base_type,
            kind: local.type_kind,
            modifier: local.type_modifier,
        };
        Misread::of(self.sent(column), local, self.servers, self.binary)
    }

    /// Adds the types of a published table.
    pub(crate) fn add(&mut self, table: &PublishedTable) {
        self.names.add(table);
        self.add_identity(table);
        for column in &table.columns {
            if column.declared_type != column.base_type || column.type_kind != 'b' {
                self.base_types.insert(column.declared_type, value_type(column));
            }
        }
    }

    /// Takes what the stream does not tell about a table's replica identity.
    pub(crate) fn add_identity(&mut self, table: &PublishedTable) {
        match table.full_by_name {
            true => self.full_by_name.insert(table.name.clone()),
            false => self.full_by_name.remove(&table.name),
        };
    }

    /// Whether old rows of a table with replica identity FULL may lack values.
    pub(crate) fn is_full_by_name(&self, table: &TableName) -> bool {
        self.full_by_name.contains(table)
    }

    /// The type in which the values of a column are sent; an unknown type stands for itself.
    pub(crate) fn sent(&self, column: &RemoteColumn) -> ValueType {
        let declared = column.type_oid.0;
        let itself = ValueType { oid: declared, kind: 'b', modifier: column.type_modifier };
        self.base_types.get(&declared).copied().unwrap_or(itself)
    }
}

fn value_type(column: &PublishedColumn) -> ValueType {
    ValueType { oid: column.base_type, kind: column.type_kind, modifier: column.base_type_modifier }
}

/// The format of one run, and the reason as a sentence for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) binary: bool,
    pub(crate) reason: String,
}

impl Format {
    /// The name in the output of `status`.
    pub(crate) fn name(&self) -> &'static str {
        if self.binary { "binary" } else { "text" }
    }

    pub(crate) fn text(reason: impl Into<String>) -> Self {
        Self { binary: false, reason: reason.into() }
    }
}

/// Types whose binary form both servers understand (see above), and arrays of them.
const PORTABLE: &[u32] = &[
    16, 17, 18, 19, 20, 21, 23, 25,
    26, // bool, bytea, "char", name, int8, int2, int4, text, oid
    28, 5069, 114, 3802, 2950, 3220, // xid, xid8, json, jsonb, uuid, pg_lsn
    600, 601, 602, 603, 604, 628, 718, // point, lseg, path, box, polygon, line, circle
    700, 701, 1700, // float4, float8, numeric
    829, 774, 869, 650, // macaddr, macaddr8, inet, cidr
    1042, 1043, 1560, 1562, // bpchar, varchar, bit, varbit
    1082, 1083, 1266, 1114, 1184,
    1186, // date, time, timetz, timestamp, timestamptz, interval
    1000, 1001, 1002, 1003, 1016, 1005, 1007, 1009, 1028, // arrays, in the same order
    1011, 271, 199, 3807, 2951, 3221, //
    1017, 1018, 1019, 1020, 1027, 629, 719, //
    1021, 1022, 1231, //
    1040, 775, 1041, 651, //
    1014, 1015, 1561, 1563, //
    1182, 1183, 1270, 1115, 1185, 1187, //
    3904, 3906, 3908, 3910, 3912,
    3926, // int4range, numrange, tsrange, tstzrange, daterange, int8range
    4451, 4532, 4533, 4534, 4535, 4536, // their multiranges
    3905, 3907, 3909, 3911, 3913, 3927, // arrays, in the same order
    6150, 6151, 6152, 6153, 6155, 6157, //
];

/// tsvector, and its array.
const TSVECTORS: [u32; 2] = [3614, 3643];

/// Whether a server reads the same tsvector from binary as from text. Before these releases, one with positions took more
/// bytes (`tsvectorrecv` in `tsvector.c`). The server then takes it for another value (`silly_cmp_tsvector`), and refuses
/// large ones.
fn reads_tsvector(version: ServerVersion) -> bool {
    let first_minor = match version.major() {
        ..=14 => 10,
        15 => 5,
        16 => 1,
        17.. => 0,
    };
    version.minor() >= first_minor
}

/// text, varchar and bpchar have the same binary form.
const TEXTS: [u32; 3] = [25, 1043, 1042];

/// Whether a subscriber reads the binary form of one type as the same value of the other type, except for the values that
/// [`Misread`] describes.
pub(crate) fn agree(
    (from, from_kind): (u32, char),
    (to, to_kind): (u32, char),
    subscriber: ServerVersion,
) -> bool {
    // The binary form of an enum is its label.
    from_kind == 'e' && to_kind == 'e'
        || from == to && PORTABLE.contains(&from)
        || from == to && TSVECTORS.contains(&from) && reads_tsvector(subscriber)
        || TEXTS.contains(&from) && TEXTS.contains(&to)
}

/// Reads the declared types of the columns of published tables; `ord` is the position of the table.
/// Most columns have a built-in type, which needs no second query.
const COLUMNS_SQL: &str = concat!(
    "\
SELECT w.ord, a.attname, a.atttypid
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
);

const BASE_TYPES_SQL: &str = "\
WITH RECURSIVE chain AS (
  SELECT declared, declared AS typ FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS d (declared)
  UNION ALL
  SELECT c.declared, t.typbasetype
  FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype = 'd'
)
SELECT c.declared, t.oid, t.typtype
FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype <> 'd'";

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the types of the subscriber's columns")
}

/// Declared types of the subscriber's columns, by position of the table and name of the column.
fn declared_types(
    session: &mut Session,
    published: &[PublishedTable],
) -> Result<FxHashMap<(usize, String), u32>> {
    let [schemas, names] = table_name_arrays(published.iter().map(|table| &table.name));
    let rows =
        session.query(COLUMNS_SQL, &[Some(&schemas), Some(&names)]).map_err(|e| failed(&e))?;
    rows.iter()
        .map(|row| {
            let ordinal: usize = field(&row, 0)?;
            Ok(((ordinal - 1, field(&row, 1)?), field(&row, 2)?))
        })
        .collect()
}

/// The base types of these types, with their `typtype`. Types in [`PORTABLE`] are left out.
fn base_types(
    session: &mut Session,
    declared: impl Iterator<Item = u32>,
) -> Result<FxHashMap<u32, (u32, char)>> {
    let mut unknown: Vec<_> = declared.filter(|oid| !PORTABLE.contains(oid)).collect();
    unknown.sort_unstable();
    unknown.dedup();
    if unknown.is_empty() {
        return Ok(FxHashMap::default());
    }
    let rows =
        session.query(BASE_TYPES_SQL, &[Some(&oid_array(&unknown))]).map_err(|e| failed(&e))?;
    rows.iter().map(|row| Ok((field(&row, 0)?, (field(&row, 1)?, field(&row, 2)?)))).collect()
}

fn type_name(session: &mut Session, oid: u32) -> Result<String> {
    let sql = format!("SELECT pg_catalog.format_type({oid}, NULL)");
    let rows = session.query(&sql, &[]).map_err(|e| failed(&e))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)).unwrap_or_default())
}

/// Why a column needs text: `local` is the subscriber's type, with its `typtype`. A type that appeared on the publisher
/// during the run may have no name.
fn why_text(
    column: &str,
    publisher: &str,
    (local, subscriber): ((u32, char), &str),
    version: ServerVersion,
) -> String {
    if agree(local, local, version) {
        format!("{column}: publisher type {publisher}, subscriber type {subscriber}")
    } else {
        format!("{column}: values of type {subscriber} are sent as text")
    }
}

/// Chooses the format of a run. Missing tables and columns are reported elsewhere.
pub(crate) fn choose(
    control: &mut Session,
    published: &[PublishedTable],
    wanted: Binary,
) -> Result<Format> {
    if wanted == Binary::Off {
        return Ok(Format::text("--binary is off"));
    }
    let version = control.server_version();
    let declared = declared_types(control, published)?;
    let under = base_types(control, declared.values().copied())?;
    for (number, table) in published.iter().enumerate() {
        for column in &table.columns {
            let Some(declared) = declared.get(&(number, column.name.clone())) else { continue };
            let local = under.get(declared).copied().unwrap_or((*declared, 'b'));
            let name = || format!("{}.{}", table.name, column.name);
            if !agree((column.base_type, column.type_kind), local, version) {
                let subscriber = type_name(control, local.0)?;
                let publisher = &column.base_type_name;
                let reason = why_text(&name(), publisher, (local, &subscriber), version);
                return Ok(Format::text(reason));
            }
        }
    }
    Ok(Format { binary: true, reason: "all types agree".to_owned() })
}

/// Checks that a table whose first change arrives during a run can be read in binary. If not, the
/// run ends, and the next run requests text.
pub(crate) fn check_binary(
    session: &mut Session,
    map: &TableMap,
    types: &mut PublisherTypes,
) -> Result<()> {
    let version = session.server_version();
    for (index, column) in map.remote.columns.iter().enumerate() {
        let (sent, local) = (types.sent(column), map.local(index));
        let base = (local.base_type, local.type_kind);
        if !agree((sent.oid, sent.kind), base, version) {
            let name = format!("{}.{}", map.remote.name, column.name);
            let publisher = types.names.of(session, &[column])?.pop().flatten();
            let publisher = publisher.unwrap_or_else(|| format!("with OID {}", column.type_oid.0));
            let local = (base, &*local.type_name);
            return Err(needs_text(why_text(&name, &publisher, local, version)));
        }
    }
    Ok(())
}

/// How a table copy finds values that the subscriber would misread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Search {
    /// A condition on the publisher is true for their rows.
    Condition(String),
    /// [`has_infinite_interval`] is called for each copied row.
    Row,
}

/// A column whose values the subscriber may misread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MisreadColumn {
    pub(crate) name: String,
    pub(crate) search: Search,
}

/// Returns the columns whose values the subscriber may misread. `local` returns oid and `typtype`
/// of a column's base type.
pub(crate) fn misread_columns(
    published: &PublishedTable,
    servers: Servers,
    binary: bool,
    local: impl Fn(&str) -> Option<(u32, char)>,
) -> Vec<MisreadColumn> {
    let misread = |column: &PublishedColumn| {
        let (oid, kind) = local(&column.name)?;
        let local = ValueType { oid, kind, modifier: -1 };
        let quoted = quote_ident(&column.name);
        let beyond_ascii =
            |value: &str| format!("{value}::\"char\"::pg_catalog.int4 OPERATOR(pg_catalog.<) 0");
        let search = match Misread::of(value_type(column), local, servers, binary)? {
            Misread::Interval => Search::Row,
            Misread::Char => Search::Condition(beyond_ascii(&quoted)),
            Misread::Chars => Search::Condition(format!(
                "EXISTS (SELECT FROM pg_catalog.unnest({quoted}) AS e WHERE {})",
                beyond_ascii("e")
            )),
            Misread::Name => Search::Condition(format!(
                "pg_catalog.octet_length(pg_catalog.convert_to({quoted}::pg_catalog.text, 'UTF8')) \
                 OPERATOR(pg_catalog.>) 63"
            )),
        };
        Some(MisreadColumn { name: column.name.clone(), search })
    };
    published.columns.iter().filter_map(misread).collect()
}

fn needs_text(reason: String) -> Failure {
    let failure = Failure::new(Class::Mismatch, reason);
    Failure { recovery: Recovery::SendText, ..failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tsvector_is_binary_where_it_is_read_as_from_text() {
        let versions = [
            ("14.9", false),
            ("14.10", true),
            ("15.4", false),
            ("15.5", true),
            ("16.0", false),
            ("16.1", true),
            ("17.0", true),
            ("19beta1", true),
        ];
        for (version, is_binary) in versions {
            let subscriber = ServerVersion::parse(version).unwrap();
            for oid in TSVECTORS {
                assert_eq!(agree((oid, 'b'), (oid, 'b'), subscriber), is_binary, "{version}");
            }
            let range = (3910, 'r');
            assert!(agree(range, range, subscriber));
        }
    }
}
