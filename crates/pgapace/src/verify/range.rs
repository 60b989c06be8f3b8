//! Ranges of a key. Pure.

use wire::quote_literal;

/// Values of a key, as text.
pub(crate) type KeyText = Vec<String>;

/// A range of keys: everything behind `after`, up to and including `through`. The first range of a
/// table has no lower bound and the last no upper one, so that the ranges cover all rows of both
/// servers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct KeyRange {
    pub(crate) after: Option<KeyText>,
    pub(crate) through: Option<KeyText>,
}

/// A column of the key on one server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyColumn {
    /// The quoted name.
    pub(crate) name: String,
    /// The expression that literals are compared with.
    pub(crate) compared: String,
    /// The type of literals.
    pub(crate) type_sql: String,
}

impl KeyRange {
    /// The conditions of the range on one server.
    pub(crate) fn conditions(&self, key: &[KeyColumn]) -> Vec<String> {
        let names: Vec<_> = key.iter().map(|column| column.compared.as_str()).collect();
        let condition = |operator: &str, bound: &KeyText| {
            format!("ROW({}) {operator} {}", names.join(", "), literal_row(key, bound))
        };
        let after = self.after.iter().map(|bound| condition(">", bound));
        let through = self.through.iter().map(|bound| condition("<=", bound));
        after.chain(through).collect()
    }
}

impl KeyColumn {
    /// A column that is compared with literals of this type. With `casts`, it is cast to that.
    pub(crate) fn of_type(name: String, type_sql: &str, casts: bool) -> Self {
        let compared = if casts { format!("{name}::{type_sql}") } else { name.clone() };
        Self { name, compared, type_sql: type_sql.to_owned() }
    }

    pub(crate) fn literal(&self, value: &str) -> String {
        format!("{}::{}", quote_literal(value), self.type_sql)
    }
}

/// `ROW('5'::bigint, …)`.
pub(crate) fn literal_row(key: &[KeyColumn], values: &[String]) -> String {
    let values: Vec<_> =
        key.iter().zip(values).map(|(column, value)| column.literal(value)).collect();
    format!("ROW({})", values.join(", "))
}

/// Which chunks of a table are compared if only a share of it is. The first is, so that no table is
/// left out; of the others the share is exact.
pub(crate) fn is_sampled(chunk: u64, share: Option<f64>) -> bool {
    let Some(share) = share else { return true };
    let before = |chunk: u64| (chunk as f64 * share).floor();
    chunk == 0 || before(chunk + 1) > before(chunk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_of_ranges() {
        let column = |name: &str, type_sql: &str| KeyColumn {
            name: format!("\"{name}\""),
            compared: format!("\"{name}\""),
            type_sql: type_sql.to_owned(),
        };
        let key = [column("a", "integer"), column("b", "text")];
        let bound = |a: &str, b: &str| Some(vec![a.to_owned(), b.to_owned()]);
        let range = KeyRange { after: bound("1", "it's"), through: bound("2", "") };
        assert_eq!(
            range.conditions(&key),
            [
                "ROW(\"a\", \"b\") > ROW('1'::integer, 'it''s'::text)",
                "ROW(\"a\", \"b\") <= ROW('2'::integer, ''::text)"
            ]
        );
        assert!(KeyRange::default().conditions(&key).is_empty());
    }

    #[test]
    fn a_share_of_the_chunks() {
        let count = |share| (0..1000).filter(|chunk| is_sampled(*chunk, share)).count();
        assert_eq!(count(None), 1000);
        assert_eq!(count(Some(1.0)), 1000);
        assert_eq!(count(Some(0.05)), 51);
        assert!(is_sampled(0, Some(0.000_001)));
    }
}
