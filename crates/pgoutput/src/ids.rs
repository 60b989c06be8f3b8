//! Identifiers of the publisher: transactions, relations, types. They have no meaning on the
//! subscriber.

use std::fmt;

/// A transaction ID of the publisher (`TransactionId` in `src/include/c.h`). It has 32 bits, so it
/// wraps around after about four billion transactions.
///
/// The order is numeric, not PostgreSQL's circular order. It serves as a map key, not to compare
/// ages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u32);

impl Xid {
    /// `InvalidTransactionId`: no transaction. The publisher never sends it as the xid of a change.
    pub const INVALID: Self = Self(0);
}

/// The OID of a table on the publisher, by which changes refer to a Relation message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelId(pub u32);

/// The OID of a type on the publisher. OIDs below 10000 are the same on every server
/// (`FirstGenbkiObjectId` in `src/include/access/transam.h`). For others, a Type message contains
/// the name.
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
