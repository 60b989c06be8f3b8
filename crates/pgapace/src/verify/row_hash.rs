//! The hash of a row, which each server computes. Pure.
//!
//! The hash of a column is the seed of the next one's. So it depends on which column has which value, and
//! no text of the whole row is made: `concat_ws` alone costs more than COPY of the row.
//!
//! A value is hashed by its type's hash function where that tells all values apart that replication
//! tells apart, and by its text otherwise. `hashint8extended` and `timestamp_hash_extended` fold a value to 32
//! bits, so an int8 is hashed in two halves, and `hash_numeric_extended` takes 1.0 for 1.00. These functions
//! return the same on all versions, because hash partitions depend on them.
//!
//! NULL is cheap in the two hashes that are summed: a value stands in its place, another one in each of
//! them. A row with NULL and a row with one of these values have one hash in common, and never both. That
//! suffices where each row has a key, because only rows of one key can have a hash in common. Without a key,
//! rows could exchange their hashes: NULL, NULL and 0, 1 have the same sums as NULL, 1 and 0, NULL. So
//! there the hash by which rows are ordered is the first one. It is alone, so in it NULL is hashed as a
//! column of its own.

use crate::verify::columns::{ColumnSql, HashedBy};

/// Calls are nested this deep at most. Hashes of so many columns each are joined as text.
const DEEPEST: usize = 40;

/// A column of a row that is hashed, which the query around it gives a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowField {
    pub(crate) sql: ColumnSql,
    pub(crate) by: HashedBy,
    /// Whether either server may have a NULL.
    pub(crate) nullable: bool,
}

/// Hashes a text byte by byte, whatever the collation of the database.
pub(crate) fn hash_text(text: &str, seed: &str) -> String {
    format!("pg_catalog.hashtextextended(({text}) COLLATE pg_catalog.\"C\", {seed})")
}

fn hash_int4(value: &str, seed: &str) -> String {
    format!("pg_catalog.hashint4extended({value}, {seed})")
}

/// The hash of a value; NULL for NULL.
pub(crate) fn hash_value(by: HashedBy, value: &str, seed: &str) -> String {
    match by {
        HashedBy::Int4 => hash_int4(value, seed),
        HashedBy::Int8 => {
            let low = format!("(({value} & 4294967295) - 2147483648)::pg_catalog.int4");
            let high = format!("({value} >> 32)::pg_catalog.int4");
            hash_int4(&high, &hash_int4(&low, seed))
        }
        HashedBy::Uuid => format!("pg_catalog.uuid_hash_extended({value}, {seed})"),
        HashedBy::Text => hash_text(value, seed),
    }
}

/// The hashes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowHash {
    /// The hash by which rows are ordered. Of a row without a key, it is summed instead of the first one.
    Order,
    /// The two hashes that are summed.
    First,
    Second,
}

impl RowHash {
    pub(crate) fn seed(self) -> String {
        let seed = match self {
            Self::Order => 0,
            Self::First => 1,
            Self::Second => 2,
        };
        format!("{seed}::pg_catalog.int8")
    }

    /// The value in the place of NULL. It differs between the first and the second hash.
    fn in_place_of_null(self, by: HashedBy) -> &'static str {
        match (by, self) {
            (HashedBy::Int4 | HashedBy::Int8, Self::Second) => "1",
            (HashedBy::Int4 | HashedBy::Int8, _) => "0",
            (HashedBy::Uuid, Self::Second) => "'00000000-0000-0000-0000-000000000001'",
            (HashedBy::Uuid, _) => "'00000000-0000-0000-0000-000000000000'",
            (HashedBy::Text, Self::Second) => "'1'",
            (HashedBy::Text, _) => "''",
        }
    }
}

/// The hash of a row of these columns, each with its name.
pub(crate) fn hash_row(fields: &[(String, &RowField)], hash: RowHash) -> String {
    let seed = hash.seed();
    let chain = |fields: &[(String, &RowField)]| {
        fields.iter().fold(seed.clone(), |seed, (name, field)| {
            if !field.nullable {
                return hash_value(field.by, name, &seed);
            }
            let value = format!("coalesce({name}, {})", hash.in_place_of_null(field.by));
            if hash != RowHash::Order {
                return hash_value(field.by, &value, &seed);
            }
            let is_null = format!("({name} IS NULL)::pg_catalog.int4");
            hash_value(field.by, &value, &hash_int4(&is_null, &seed))
        })
    };
    if fields.len() <= DEEPEST {
        return chain(fields);
    }
    let chains: Vec<_> = fields.chunks(DEEPEST).map(chain).collect();
    hash_text(&format!("pg_catalog.concat_ws(',', {})", chains.join(", ")), &seed)
}

/// The size of such rows together: bytes of texts, and of values as they are stored.
pub(crate) fn sum_of_bytes(fields: &[(String, &RowField)]) -> String {
    let mut fixed = 0;
    let mut lengths = Vec::new();
    for (name, field) in fields {
        let length = format!("pg_catalog.octet_length({name})");
        match field.by {
            HashedBy::Int4 => fixed += 4,
            HashedBy::Int8 => fixed += 8,
            HashedBy::Uuid => fixed += 16,
            HashedBy::Text if field.nullable => lengths.push(format!("coalesce({length}, 0)")),
            HashedBy::Text => lengths.push(length),
        }
    }
    let fixed = format!("pg_catalog.count(*) * {fixed}");
    match lengths.as_slice() {
        [] => fixed,
        [one] => format!("{fixed} + coalesce(pg_catalog.sum({one}), 0)"),
        // Two texts can be longer than an int4 counts.
        more => format!(
            "{fixed} + coalesce(pg_catalog.sum(0::pg_catalog.int8 + {}), 0)",
            more.join(" + ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(by: HashedBy, nullable: bool) -> RowField {
        let sql = ColumnSql {
            hashed: "c".to_owned(),
            stored: true,
            text: "c::text".to_owned(),
            own: true,
        };
        RowField { sql, by, nullable }
    }

    fn hashed(fields: &[RowField], hash: RowHash) -> String {
        let named = |(number, field)| (format!("c{number}"), field);
        hash_row(&fields.iter().enumerate().map(named).collect::<Vec<_>>(), hash)
    }

    #[test]
    fn a_column_is_the_seed_of_the_next() {
        assert_eq!(hashed(&[], RowHash::First), "1::pg_catalog.int8");
        assert_eq!(
            hashed(&[field(HashedBy::Int4, false), field(HashedBy::Text, false)], RowHash::First),
            "pg_catalog.hashtextextended((c1) COLLATE pg_catalog.\"C\", \
             pg_catalog.hashint4extended(c0, 1::pg_catalog.int8))"
        );
    }

    #[test]
    fn null_is_no_value() {
        let one = [field(HashedBy::Text, true)];
        assert_eq!(
            hashed(&one, RowHash::Order),
            "pg_catalog.hashtextextended((coalesce(c0, '')) COLLATE pg_catalog.\"C\", \
             pg_catalog.hashint4extended((c0 IS NULL)::pg_catalog.int4, 0::pg_catalog.int8))"
        );
        let summed = |value: &str, seed: &str| {
            format!(
                "pg_catalog.hashtextextended((coalesce(c0, {value})) COLLATE pg_catalog.\"C\", \
                 {seed}::pg_catalog.int8)"
            )
        };
        assert_eq!(hashed(&one, RowHash::First), summed("''", "1"));
        assert_eq!(hashed(&one, RowHash::Second), summed("'1'", "2"));
        for by in [HashedBy::Int4, HashedBy::Int8, HashedBy::Uuid, HashedBy::Text] {
            let (first, second) = (RowHash::First, RowHash::Second);
            assert_ne!(first.in_place_of_null(by), second.in_place_of_null(by));
        }
    }

    #[test]
    fn wide_rows_are_not_nested_deeper() {
        let fields = vec![field(HashedBy::Int8, true); 1600];
        let sql = hashed(&fields, RowHash::Order);
        let (mut depth, mut deepest) = (0_usize, 0);
        for c in sql.chars() {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            deepest = deepest.max(depth);
        }
        assert!(deepest <= 3 * DEEPEST + 10, "{deepest}");
        assert_eq!(depth, 0);
    }

    #[test]
    fn sizes() {
        let size = |fields: &[RowField]| {
            sum_of_bytes(&fields.iter().map(|field| ("c".to_owned(), field)).collect::<Vec<_>>())
        };
        let uuid = field(HashedBy::Uuid, true);
        assert_eq!(size(&[uuid.clone(), field(HashedBy::Int4, false)]), "pg_catalog.count(*) * 20");
        assert_eq!(
            size(&[uuid, field(HashedBy::Text, true)]),
            "pg_catalog.count(*) * 16 + \
             coalesce(pg_catalog.sum(coalesce(pg_catalog.octet_length(c), 0)), 0)"
        );
    }
}
