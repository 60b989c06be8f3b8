//! The description of a result, borrowed from the input buffer.

use crate::error::{Error, Result};

/// The columns of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowDescription<'a> {
    columns: u16,
    fields: &'a [u8],
}

/// One column of a [`RowDescription`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DescribedColumn<'a> {
    /// The column's name, in the encoding of the session.
    pub name: &'a [u8],
    /// The OID of the table whose column it is; 0 for another expression.
    pub table_oid: u32,
    /// Its number in that table; 0 for another expression.
    pub attnum: i16,
    /// The OID of its type; the base type of a domain.
    pub type_oid: u32,
}

impl<'a> RowDescription<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<RowDescription<'a>> {
        match body.split_first_chunk::<2>() {
            Some((count, fields)) => {
                Ok(RowDescription { columns: u16::from_be_bytes(*count), fields })
            }
            None => Err(Error::protocol("malformed RowDescription")),
        }
    }

    /// The number of columns.
    pub fn len(&self) -> usize {
        usize::from(self.columns)
    }

    /// Whether there are no columns.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// The columns in order. In a malformed description the iterator ends early.
    pub fn columns(&self) -> impl Iterator<Item = DescribedColumn<'a>> + use<'a> {
        let mut rest = self.fields;
        (0..self.columns).map_while(move |_| {
            let end = rest.iter().position(|&byte| byte == 0)?;
            let name = &rest[..end];
            // Table OID (4), column number (2), type OID (4), type length (2), modifier (4),
            // format (2).
            let (fixed, after) = rest[end + 1..].split_first_chunk::<18>()?;
            rest = after;
            Some(DescribedColumn {
                name,
                table_oid: u32::from_be_bytes([fixed[0], fixed[1], fixed[2], fixed[3]]),
                attnum: i16::from_be_bytes([fixed[4], fixed[5]]),
                type_oid: u32::from_be_bytes([fixed[6], fixed[7], fixed[8], fixed[9]]),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_columns_and_survives_truncation() {
        let body = b"\x00\x02a\x00\x00\x00\x40\x01\xff\xf9\x00\x00\x00\x17\x00\x04\xff\xff\xff\xff\x00\x00\
                     bc\x00\x00\x00\x40\x02\x00\x07\x00\x00\x00\x19\xff\xff\xff\xff\xff\xff\x00\x01";
        let description = RowDescription::parse(body).unwrap();
        assert_eq!((description.len(), description.is_empty()), (2, false));
        let columns: Vec<_> = description.columns().collect();
        let a = DescribedColumn { name: b"a", table_oid: 16385, attnum: -7, type_oid: 23 };
        let bc = DescribedColumn { name: b"bc", table_oid: 16386, attnum: 7, type_oid: 25 };
        assert_eq!(columns, [a, bc]);
        for end in 2..body.len() {
            assert!(RowDescription::parse(&body[..end]).unwrap().columns().count() < 2);
        }
        assert!(RowDescription::parse(b"\x00").is_err());
    }
}
