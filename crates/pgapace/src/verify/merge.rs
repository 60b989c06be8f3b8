//! Merges the rows of both servers. Pure.
//!
//! Each server sends its rows ordered by a 64-bit hash of their key. Rows of one hash form a group.
//! Within it, rows are matched by key, so that equal hashes of different keys do no harm. Without a
//! key, rows are matched as a multiset. Only one group is in memory; equal rows count as one entry.

use crate::error::{Class, Failure, Result};

/// Most different rows of one group in memory. More have one key only if the key is not unique.
const MOST_IN_GROUP: usize = 10_000;

/// A row as a server sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowEntry {
    /// Hash of the key, or of the row if there is no key. The streams are ordered by it.
    pub(crate) order: i64,
    /// Two hashes of the whole row.
    pub(crate) hashes: (i64, i64),
    /// The key in the text format of COPY, or the whole row if there is no key.
    pub(crate) fields: Vec<u8>,
}

impl RowEntry {
    /// Parses a line: order, two hashes, and the fields.
    pub(crate) fn parse(line: &[u8]) -> Option<Self> {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let mut parts = line.splitn(4, |byte| *byte == b'\t');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (order, first, second) = (number()?, number()?, number()?);
        // A row of a table without columns has no fields.
        let fields = parts.next().unwrap_or_default().to_vec();
        Some(Self { order, hashes: (first, second), fields })
    }

    /// Approximate size in memory.
    pub(crate) fn size(&self) -> usize {
        self.fields.len() + size_of::<Self>()
    }
}

/// The kind of a difference, as seen from the subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// The subscriber lacks the row.
    Missing,
    /// Only the subscriber has the row.
    Extra,
    /// Both have a row of this key, with different values.
    Different,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Extra => "extra",
            Self::Different => "different",
        }
    }
}

/// A difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// As in [`RowEntry::fields`].
    pub(crate) fields: Vec<u8>,
    /// The number of equal rows that it concerns.
    pub(crate) copies: u64,
}

/// Entries of one hash with their numbers on the publisher and on the subscriber.
#[derive(Debug, Default)]
struct Group {
    entries: Vec<(RowEntry, [u64; 2])>,
}

impl Group {
    fn add(&mut self, entry: RowEntry, side: usize) -> Result<()> {
        if let Some((_, counts)) = self.entries.iter_mut().find(|(known, _)| *known == entry) {
            counts[side] += 1;
            return Ok(());
        }
        if self.entries.len() >= MOST_IN_GROUP {
            return Err(Failure::new(
                Class::Mismatch,
                format!("more than {MOST_IN_GROUP} different rows have one key"),
            )
            .hint("Create a unique index on the key on both sides."));
        }
        let mut counts = [0; 2];
        counts[side] = 1;
        self.entries.push((entry, counts));
        Ok(())
    }

    /// Removes the rows that both sides have, pairs the rest by key, and empties the group.
    fn resolve(
        &mut self,
        keyed: bool,
        found: &mut impl FnMut(Finding) -> Result<()>,
    ) -> Result<()> {
        let mut left: Vec<_> = self
            .entries
            .drain(..)
            .filter_map(|(entry, [publisher, subscriber])| {
                let both = publisher.min(subscriber);
                let counts = [publisher - both, subscriber - both];
                (counts != [0, 0]).then_some((entry.fields, counts))
            })
            .collect();
        while let Some((fields, mut counts)) = left.pop() {
            if keyed {
                left.retain(|(other, more)| {
                    let same = *other == fields;
                    if same {
                        counts[0] += more[0];
                        counts[1] += more[1];
                    }
                    !same
                });
            }
            let different = counts[0].min(counts[1]);
            let parts = [
                (Kind::Different, different),
                (Kind::Missing, counts[0] - different),
                (Kind::Extra, counts[1] - different),
            ];
            for (kind, copies) in parts.into_iter().filter(|(_, copies)| *copies > 0) {
                found(Finding { kind, fields: fields.clone(), copies })?;
            }
        }
        Ok(())
    }
}

/// Merges two streams in the order of their hashes, and passes each difference to `found`.
pub(crate) fn merge(
    publisher: impl Iterator<Item = Result<RowEntry>>,
    subscriber: impl Iterator<Item = Result<RowEntry>>,
    keyed: bool,
    mut found: impl FnMut(Finding) -> Result<()>,
) -> Result<()> {
    let mut publisher = publisher.peekable();
    let mut subscriber = subscriber.peekable();
    let mut group = Group::default();
    loop {
        let heads = [next_order(&mut publisher)?, next_order(&mut subscriber)?];
        let Some(order) = heads.into_iter().flatten().min() else { return Ok(()) };
        while let Some(entry) = publisher.next_if(|head| is_of(head, order)) {
            group.add(entry?, 0)?;
        }
        while let Some(entry) = subscriber.next_if(|head| is_of(head, order)) {
            group.add(entry?, 1)?;
        }
        // A server that breaks the order would show differences that do not exist.
        for head in [next_order(&mut publisher)?, next_order(&mut subscriber)?] {
            if head.is_some_and(|head| head < order) {
                return Err(Failure::internal("rows arrived in another order than requested"));
            }
        }
        group.resolve(keyed, &mut found)?;
    }
}

fn is_of(head: &Result<RowEntry>, order: i64) -> bool {
    head.as_ref().is_ok_and(|entry| entry.order == order)
}

/// The hash of the next row; `None` at the end.
fn next_order<I: Iterator<Item = Result<RowEntry>>>(
    stream: &mut std::iter::Peekable<I>,
) -> Result<Option<i64>> {
    if let Some(Err(failure)) = stream.next_if(Result::is_err) {
        return Err(failure);
    }
    Ok(stream.peek().and_then(|head| head.as_ref().ok()).map(|entry| entry.order))
}

/// The values of fields in the text format of COPY; `None` is NULL. A database with SQL_ASCII may send bytes
/// that are not UTF-8: U+FFFD takes their place, and such a row is not repaired.
pub(crate) fn values(fields: &[u8]) -> Vec<Option<String>> {
    let value = |field: &[u8]| {
        if field == b"\\N" {
            return None;
        }
        let mut bytes = Vec::with_capacity(field.len());
        let mut rest = field.iter();
        while let Some(byte) = rest.next() {
            bytes.push(match (byte, byte == &b'\\') {
                (byte, false) => *byte,
                (_, true) => match rest.next() {
                    Some(b'b') => 8,
                    Some(b'f') => 12,
                    Some(b'n') => b'\n',
                    Some(b'r') => b'\r',
                    Some(b't') => b'\t',
                    Some(b'v') => 11,
                    Some(other) => *other,
                    None => b'\\',
                },
            });
        }
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    fields.split(|byte| *byte == b'\t').map(value).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(order: i64, hash: i64, fields: &str) -> RowEntry {
        RowEntry { order, hashes: (hash, -hash), fields: fields.as_bytes().to_vec() }
    }

    fn merged(
        publisher: &[RowEntry],
        subscriber: &[RowEntry],
        keyed: bool,
    ) -> Vec<(Kind, String, u64)> {
        let mut all = Vec::new();
        let (theirs, ours) = (publisher.iter().cloned(), subscriber.iter().cloned());
        merge(theirs.map(Ok), ours.map(Ok), keyed, |one| {
            all.push((one.kind, String::from_utf8(one.fields).unwrap(), one.copies));
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn parses_what_a_server_sends() {
        let line = b"-9223372036854775808\t1\t-2\ta\tb\\tc\t\\N\n";
        let parsed = RowEntry::parse(line).unwrap();
        assert_eq!((parsed.order, parsed.hashes), (i64::MIN, (1, -2)));
        let fields = [Some("a"), Some("b\tc"), None].map(|text| text.map(str::to_owned));
        assert_eq!(values(&parsed.fields), fields);
        assert_eq!(RowEntry::parse(b"1\t2\tx\ty"), None);
        assert_eq!(RowEntry::parse(b"1\t2"), None);
        assert!(RowEntry::parse(b"1\t2\t3\n").unwrap().fields.is_empty(), "no columns");
    }

    #[test]
    fn finds_missing_extra_and_different_rows() {
        let publisher = [entry(-5, 1, "a"), entry(0, 2, "b"), entry(7, 3, "c")];
        let subscriber = [entry(-9, 9, "z"), entry(0, 4, "b"), entry(7, 3, "c")];
        assert_eq!(
            merged(&publisher, &subscriber, true),
            [
                (Kind::Extra, "z".to_owned(), 1),
                (Kind::Missing, "a".to_owned(), 1),
                (Kind::Different, "b".to_owned(), 1)
            ]
        );
    }

    #[test]
    fn equal_hashes_of_different_keys_do_no_harm() {
        let publisher = [entry(1, 1, "a"), entry(1, 2, "b")];
        let subscriber = [entry(1, 2, "b"), entry(1, 1, "a")];
        assert_eq!(merged(&publisher, &subscriber, true), []);
        let subscriber = [entry(1, 9, "b"), entry(1, 1, "c")];
        let mut found = merged(&publisher, &subscriber, true);
        found.sort_by_key(|(_, fields, _)| fields.clone());
        assert_eq!(
            found,
            [
                (Kind::Missing, "a".to_owned(), 1),
                (Kind::Different, "b".to_owned(), 1),
                (Kind::Extra, "c".to_owned(), 1)
            ]
        );
    }

    #[test]
    fn rows_without_a_key_are_counted() {
        let publisher = [entry(1, 1, "a"), entry(1, 1, "a"), entry(2, 2, "b")];
        let subscriber = [entry(1, 1, "a"), entry(2, 2, "b"), entry(2, 2, "b"), entry(2, 2, "b")];
        assert_eq!(
            merged(&publisher, &subscriber, false),
            [(Kind::Missing, "a".to_owned(), 1), (Kind::Extra, "b".to_owned(), 2)]
        );
    }

    #[test]
    fn a_failing_or_disordered_stream_is_a_failure() {
        let rows = [Ok(entry(1, 1, "a")), Err(Failure::internal("lost"))];
        let ours = [Ok(entry(1, 1, "a")), Ok(entry(2, 2, "b"))];
        assert!(merge(rows.into_iter(), ours.into_iter(), true, |_| Ok(())).is_err());
        let rows = [Ok(entry(2, 1, "a")), Ok(entry(1, 1, "b"))];
        assert!(merge(rows.into_iter(), std::iter::empty(), true, |_| Ok(())).is_err());
    }

    proptest! {
        /// The findings explain the difference between the two multisets of rows.
        #[test]
        fn findings_explain_the_difference(
            publisher in proptest::collection::vec((0i64..4, 0i64..3, 0u8..3), 0..40),
            subscriber in proptest::collection::vec((0i64..4, 0i64..3, 0u8..3), 0..40),
        ) {
            let rows = |all: &[(i64, i64, u8)]| {
                let mut rows: Vec<_> =
                    all.iter().map(|(o, h, k)| entry(*o, *h, &format!("{o}-{k}"))).collect();
                rows.sort_by_key(|row| row.order);
                rows
            };
            let (theirs, ours) = (rows(&publisher), rows(&subscriber));
            let found = merged(&theirs, &ours, true);
            let of = |kind: Kind| found.iter().filter(|f| f.0 == kind).map(|f| f.2).sum::<u64>();
            prop_assert_eq!(
                theirs.len() as i64 - ours.len() as i64,
                of(Kind::Missing) as i64 - of(Kind::Extra) as i64
            );
            let mut sorted = [theirs.clone(), ours.clone()];
            sorted.iter_mut().for_each(|rows| rows.sort_by_key(|r| (r.fields.clone(), r.hashes)));
            prop_assert_eq!(found.is_empty(), sorted[0] == sorted[1]);
        }
    }
}
