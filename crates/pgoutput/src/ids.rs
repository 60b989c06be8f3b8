//! The publisher's numbers: transactions, relations, types. None means anything on the subscriber.

use std::fmt;

/// A transaction of the publisher, 32 bits and therefore reused after about four thousand million
/// (`TransactionId` in `src/include/c.h`).
///
/// The order is that of the numbers, not PostgreSQL's circular one: it serves maps, not age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u32);

impl Xid {
    /// `InvalidTransactionId`: no transaction. The publisher never sends it in front of a change.
    pub const INVALID: Self = Self(0);
}

/// The OID of a table on the publisher, by which changes refer to a Relation message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelId(pub u32);

/// The OID of a type on the publisher. Those below 10000 are the same on every server; for others
/// a Type message gives the name (`FirstGenbkiObjectId` in `src/include/access/transam.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TypeOid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for RelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for TypeOid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_as_plain_numbers() {
        assert_eq!(
            format!("{} {:>3} {}", Xid(u32::MAX), RelId(7), TypeOid(25)),
            "4294967295   7 25"
        );
    }
}
