//! Column types and their random values.

use fastrand::Rng;

/// Number of distinct key values, small so that sessions change the same rows.
const KEY_VALUES: u32 = 60;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
    SmallInt,
    Int,
    BigInt,
    Numeric,
    Real,
    Double,
    Bool,
    Text,
    Varchar,
    Char,
    /// Text that is often too long for a page, so that TOAST stores it out of line.
    LongText,
    LongBytes,
    Bytea,
    Date,
    Time,
    Timestamp,
    TimestampTz,
    Interval,
    Uuid,
    Json,
    Jsonb,
    IntArray,
    TextArray,
    Inet,
    Bits,
    Range,
    Point,
    /// The following types are created with the schema.
    Mood,
    Positive,
    Pair,
    /// The following types have few values, some of which are equal but differ as text.
    LooseNumeric,
    SignedZero,
    Span,
    LooseJsonb,
    NumericArray,
}

impl ValueType {
    /// Types of ordinary columns.
    pub(super) const ALL: [Self; 30] = [
        Self::SmallInt,
        Self::Int,
        Self::BigInt,
        Self::Numeric,
        Self::Real,
        Self::Double,
        Self::Bool,
        Self::Text,
        Self::Varchar,
        Self::Char,
        Self::LongText,
        Self::LongBytes,
        Self::Bytea,
        Self::Date,
        Self::Time,
        Self::Timestamp,
        Self::TimestampTz,
        Self::Interval,
        Self::Uuid,
        Self::Json,
        Self::Jsonb,
        Self::IntArray,
        Self::TextArray,
        Self::Inet,
        Self::Bits,
        Self::Range,
        Self::Point,
        Self::Mood,
        Self::Positive,
        Self::Pair,
    ];

    /// Types with values that are equal but not identical.
    pub(super) const SPELLED: [Self; 5] =
        [Self::LooseNumeric, Self::SignedZero, Self::Span, Self::LooseJsonb, Self::NumericArray];

    /// Types of key columns.
    pub(super) const KEYS: [Self; 8] = [
        Self::Int,
        Self::BigInt,
        Self::SmallInt,
        Self::Text,
        Self::Uuid,
        Self::TimestampTz,
        Self::Numeric,
        Self::Varchar,
    ];

    /// The type's name in SQL; `schema` contains the types that the workload creates.
    pub(super) fn sql(self, schema: &str) -> String {
        let own = |name: &str| format!("{schema}.{name}");
        match self {
            Self::SmallInt => "smallint".into(),
            Self::Int => "integer".into(),
            Self::BigInt => "bigint".into(),
            Self::Numeric => "numeric(14,3)".into(),
            Self::Real => "real".into(),
            Self::Double => "double precision".into(),
            Self::Bool => "boolean".into(),
            Self::Text | Self::LongText => "text".into(),
            Self::Varchar => "varchar(60)".into(),
            Self::Char => "char(12)".into(),
            Self::LongBytes | Self::Bytea => "bytea".into(),
            Self::Date => "date".into(),
            Self::Time => "time".into(),
            Self::Timestamp => "timestamp".into(),
            Self::TimestampTz => "timestamptz".into(),
            Self::Interval => "interval".into(),
            Self::Uuid => "uuid".into(),
            Self::Json => "json".into(),
            Self::Jsonb => "jsonb".into(),
            Self::IntArray => "integer[]".into(),
            Self::TextArray => "text[]".into(),
            Self::Inet => "inet".into(),
            Self::Bits => "bit varying(40)".into(),
            Self::Range => "int4range".into(),
            Self::Point => "point".into(),
            Self::Mood => own("mood"),
            Self::Positive => own("positive"),
            Self::Pair => own("pair"),
            Self::LooseNumeric => "numeric".into(),
            Self::SignedZero => "double precision".into(),
            Self::Span => "interval".into(),
            Self::LooseJsonb => "jsonb".into(),
            Self::NumericArray => "numeric[]".into(),
        }
    }

    /// A type with smaller precision or length, or another type, that still accepts all values.
    pub(super) fn narrow_sql(self, schema: &str) -> String {
        match self {
            Self::BigInt => "numeric(20,0)".into(),
            Self::Numeric | Self::LooseNumeric => "numeric(14,1)".into(),
            Self::Double => "real".into(),
            Self::Varchar => "varchar(40)".into(),
            Self::Char => "char(10)".into(),
            Self::Time => "time(1)".into(),
            Self::Timestamp => "timestamp(2)".into(),
            Self::TimestampTz => "timestamptz(0)".into(),
            Self::Interval | Self::Span => "interval(1)".into(),
            Self::Bits => "bit varying(35)".into(),
            Self::IntArray => "numeric(12,0)[]".into(),
            Self::NumericArray => "numeric(12,1)[]".into(),
            Self::TextArray => "varchar(30)[]".into(),
            _ => self.sql(schema),
        }
    }

    /// Whether the type has an equality operator, which REPLICA IDENTITY FULL requires.
    pub(super) fn has_equality(self) -> bool {
        !matches!(self, Self::Json | Self::Point)
    }

    /// Whether values are numbers that can be added to.
    pub(super) fn is_number(self) -> bool {
        matches!(self, Self::Int | Self::BigInt | Self::Numeric)
    }

    /// Whether values are strings of unlimited length.
    pub(super) fn is_text(self) -> bool {
        matches!(self, Self::Text | Self::LongText)
    }

    /// A random value as an SQL expression.
    ///
    /// Equal values of a type have the same text (never both `1.0` and `1.00`), except for the
    /// types in [`Self::SPELLED`]. With REPLICA IDENTITY FULL the native apply worker may otherwise
    /// change another row that is equal.
    pub(super) fn random(self, rng: &mut Rng, schema: &str) -> String {
        let sql = self.sql(schema);
        match self {
            Self::SmallInt | Self::Int | Self::BigInt => self.integer(rng).to_string(),
            Self::Numeric => {
                format!("{}.{:03}", rng.i64(-9_999_999..=9_999_999), rng.u32(0..1000))
            }
            Self::Real | Self::Double => match rng.u8(0..8) {
                0 => format!("'NaN'::{sql}"),
                1 => format!("'-Infinity'::{sql}"),
                2 => format!("'{}e20'::{sql}", rng.i32(1..999)),
                _ => format!("{}::{sql}", f64::from(rng.i32(1..100_000)) / 7.0),
            },
            Self::Bool => rng.bool().to_string(),
            Self::Text | Self::Varchar | Self::Char => {
                quoted(&short_text(rng, if self == Self::Char { 8 } else { 30 }))
            }
            Self::LongText => long_text(rng),
            Self::LongBytes => format!("decode({}, 'hex')", long_text(rng)),
            Self::Bytea => format!("'\\x{:016x}00ff'::bytea", rng.u64(..)),
            Self::Date => match rng.u8(0..10) {
                0 => "'infinity'::date".into(),
                1 => "'0044-03-15 BC'::date".into(),
                _ => format!("'2020-01-01'::date + {}", rng.i32(-20_000..20_000)),
            },
            Self::Time => format!("'00:00'::time + {} * '1 microsecond'::interval", micros(rng)),
            Self::Timestamp | Self::TimestampTz => match rng.u8(0..10) {
                0 => format!("'-infinity'::{sql}"),
                _ => format!(
                    "'2020-01-01 00:00:00+00'::{sql} + {} * '1 microsecond'::interval",
                    i64::from(rng.i32(..)) * 1_000_003
                ),
            },
            Self::Interval => format!("{} * '1 microsecond'::interval", micros(rng)),
            Self::Uuid => uuid(rng.u64(..), rng.u64(..)),
            Self::Json | Self::Jsonb => format!(
                "'{{\"n\": {}, \"a\": [1, null, \"{}\"], \"o\": {{\"k\": true}}}}'::{sql}",
                rng.i32(..),
                rng.alphanumeric()
            ),
            Self::IntArray => match rng.u8(0..6) {
                0 => format!("'{{}}'::{sql}"),
                1 => format!("'{{{{1,2}},{{NULL,{}}}}}'::{sql}", rng.i32(..)),
                2 => format!("'[0:1]={{7,{}}}'::{sql}", rng.i32(..)),
                _ => format!("ARRAY[{},NULL,{}]", rng.i32(0..99), rng.i32(0..99)),
            },
            Self::TextArray => format!(
                "ARRAY[{},NULL,'NULL','',{}]",
                quoted(&short_text(rng, 6)),
                quoted(&short_text(rng, 6))
            ),
            Self::Inet => format!("'10.{}.{}.0/24'::inet", rng.u8(..), rng.u8(..)),
            Self::Bits => format!("B'{:b}'", rng.u32(..)),
            Self::Range => match rng.u8(0..4) {
                0 => "'empty'::int4range".into(),
                1 => format!("int4range({}, NULL)", rng.i32(0..50)),
                _ => format!("int4range({}, {})", rng.i32(0..50), rng.i32(50..99)),
            },
            Self::Point => format!("point({}, {})", rng.i32(0..99), rng.i32(0..99)),
            Self::Mood => {
                let moods = ["sad", "ok", "'quite' happy"];
                format!("{}::{sql}", quoted(moods[rng.usize(..moods.len())]))
            }
            Self::Positive => rng.i32(1..1_000_000).to_string(),
            Self::Pair => {
                format!("ROW({}, {})::{sql}", rng.i32(0..99), quoted(&short_text(rng, 10)))
            }
            Self::LooseNumeric => one_of(rng, &["1", "1.0", "1.00", "2.50", "2.5"], &sql),
            Self::SignedZero => one_of(rng, &["0", "-0", "1"], &sql),
            Self::Span => one_of(rng, &["1 mon", "30 days", "720:00", "-1 day", "-24:00"], &sql),
            Self::LooseJsonb => one_of(rng, &["{\"a\": 1}", "{\"a\": 1.0}", "[]"], &sql),
            Self::NumericArray => one_of(rng, &["{1,NULL}", "{1.0,NULL}", "{1.00,NULL}"], &sql),
        }
    }

    /// A random key value as an SQL expression.
    pub(super) fn random_key(self, rng: &mut Rng) -> String {
        let key = self.key(rng.u32(1..=KEY_VALUES));
        match self {
            Self::LooseNumeric => format!("{key}.{}", "0".repeat(rng.usize(1..4))),
            _ => key,
        }
    }

    /// Two adjacent key values for a range of rows.
    pub(super) fn random_key_range(self, rng: &mut Rng) -> (String, String) {
        let first = rng.u32(1..=KEY_VALUES);
        (self.key(first), self.key(first + rng.u32(1..5)))
    }

    fn key(self, number: u32) -> String {
        match self {
            Self::Text | Self::Varchar => quoted(&format!("key \\ '{number:03}'")),
            Self::Uuid => uuid(0, u64::from(number)),
            Self::TimestampTz => {
                format!("'2020-01-01 00:00:00+00'::timestamptz + {number} * '1 hour'::interval")
            }
            Self::Numeric => format!("{number}.250"),
            _ => number.to_string(),
        }
    }

    fn integer(self, rng: &mut Rng) -> i64 {
        let (low, high): (i64, i64) = match self {
            Self::SmallInt => (i16::MIN.into(), i16::MAX.into()),
            // Less than the range of the type, so that an addition does not overflow.
            Self::Int => (-2_000_000_000, 2_000_000_000),
            _ => (-9_000_000_000_000_000_000, 9_000_000_000_000_000_000),
        };
        if rng.bool() { rng.i64(0..100) } else { rng.i64(low..=high) }
    }
}

/// A string literal for any text.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn one_of(rng: &mut Rng, values: &[&str], sql: &str) -> String {
    format!("{}::{sql}", quoted(values[rng.usize(..values.len())]))
}

fn micros(rng: &mut Rng) -> i64 {
    rng.i64(0..86_000_000_000)
}

fn uuid(high: u64, low: u64) -> String {
    let hex = format!("{high:016x}{low:016x}");
    format!("'{hex}'::uuid")
}

fn short_text(rng: &mut Rng, length_max: usize) -> String {
    let odd =
        ["", "NULL", "\\N", "it's", "a\tb\nc\r", "{\"x\"}", "Ωß漢字🐘", "\\x41", "$1", "--", "%"];
    if rng.u8(0..4) == 0 {
        return odd[rng.usize(..odd.len())].to_string();
    }
    let length = rng.usize(1..=length_max);
    std::iter::repeat_with(|| rng.lowercase()).take(length).collect()
}

/// Hexadecimal digits: either few, or more than fit into a page even when compressed.
fn long_text(rng: &mut Rng) -> String {
    let start = rng.u32(..);
    let pieces = if rng.u8(0..3) == 0 { rng.u32(1..4) } else { rng.u32(150..400) };
    format!(
        "(SELECT string_agg(md5(({start} + i)::text), '') FROM generate_series(1, {pieces}) AS i)"
    )
}
