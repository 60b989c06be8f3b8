//! A cursor over one frame or message. Every read is checked, and every error has its offset.

use std::str;

use crate::{DecodeError, DecodeErrorKind, Lsn, MAX_COLUMNS, RawName, Timestamp, Xid};

/// The bytes left to read. All numbers are big-endian.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    total: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, total: bytes.len() }
    }

    /// Number of bytes read so far.
    pub(crate) const fn offset(&self) -> usize {
        self.total - self.rest.len()
    }

    /// The bytes left to read.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The bytes read since `earlier`, an older state of this reader.
    #[inline]
    pub(crate) fn read_since(&self, earlier: &Self) -> &'a [u8] {
        // A reader only moves forward, so its rest is a suffix of the earlier rest.
        &earlier.rest[..earlier.rest.len() - self.rest.len()]
    }

    /// An error at the start of the last `width` bytes read.
    #[cold]
    pub(crate) fn error_before(&self, width: usize, kind: DecodeErrorKind) -> DecodeError {
        DecodeError::new(self.offset() - width, kind)
    }

    #[cold]
    fn truncated(&self, needed: usize) -> DecodeError {
        let left = self.rest.len();
        DecodeError::new(self.offset(), DecodeErrorKind::Truncated { needed, left })
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let Some((head, tail)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.truncated(N));
        };
        self.rest = tail;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array::<1>().map(|[byte]| byte)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn lsn(&mut self) -> Result<Lsn, DecodeError> {
        self.u64().map(Lsn)
    }

    /// Reads an LSN that PostgreSQL always sets.
    pub(crate) fn valid_lsn(&mut self) -> Result<Lsn, DecodeError> {
        let lsn = self.lsn()?;
        if !lsn.is_valid() {
            return Err(self.error_before(8, DecodeErrorKind::ZeroLsn));
        }
        Ok(lsn)
    }

    pub(crate) fn timestamp(&mut self) -> Result<Timestamp, DecodeError> {
        self.array().map(i64::from_be_bytes).map(Timestamp)
    }

    pub(crate) fn xid(&mut self) -> Result<Xid, DecodeError> {
        self.u32().map(Xid)
    }

    /// Reads the xid of a streamed transaction, which is never 0.
    #[inline]
    pub(crate) fn valid_xid(&mut self) -> Result<Xid, DecodeError> {
        let xid = self.xid()?;
        if xid == Xid::INVALID {
            return Err(self.error_before(4, DecodeErrorKind::ZeroXid));
        }
        Ok(xid)
    }

    /// Reads the xid in front of a change, which is present only inside a stream block.
    #[inline]
    pub(crate) fn stream_xid(&mut self, in_stream: bool) -> Result<Option<Xid>, DecodeError> {
        if in_stream { self.valid_xid().map(Some) } else { Ok(None) }
    }

    /// Reads a byte of flags in which only the bits of `known` may be set.
    pub(crate) fn flags(&mut self, known: u8) -> Result<u8, DecodeError> {
        let flags = self.u8()?;
        if flags & !known != 0 {
            return Err(self.error_before(1, DecodeErrorKind::UnexpectedFlags(flags)));
        }
        Ok(flags)
    }

    /// Reads a byte that is 0 or 1.
    pub(crate) fn bool(&mut self) -> Result<bool, DecodeError> {
        self.flags(1).map(|flag| flag == 1)
    }

    /// Reads a four-byte length or count, which must not be negative.
    #[inline]
    pub(crate) fn length(&mut self) -> Result<usize, DecodeError> {
        let length = self.i32()?;
        usize::try_from(length)
            .map_err(|_| self.error_before(4, DecodeErrorKind::NegativeLength(length)))
    }

    /// Reads a two-byte number of columns. A negative one exceeds the limit when read as unsigned.
    #[inline]
    pub(crate) fn column_count(&mut self) -> Result<u16, DecodeError> {
        let count = u16::from_be_bytes(self.array()?);
        if count > MAX_COLUMNS {
            return Err(self.error_before(2, DecodeErrorKind::TooManyColumns));
        }
        Ok(count)
    }

    #[inline]
    pub(crate) fn bytes(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let Some((head, tail)) = self.rest.split_at_checked(length) else {
            return Err(self.truncated(length));
        };
        self.rest = tail;
        Ok(head)
    }

    /// Reads a name with its terminating zero byte, whatever its encoding is.
    pub(crate) fn raw_name(&mut self) -> Result<RawName<'a>, DecodeError> {
        let Some(length) = memchr::memchr(0, self.rest) else {
            return Err(DecodeError::new(self.offset(), DecodeErrorKind::MissingNul));
        };
        let name = self.bytes(length)?;
        self.u8()?;
        Ok(RawName(name))
    }

    /// Reads a name by which something is known: it must be UTF-8.
    pub(crate) fn name(&mut self) -> Result<&'a str, DecodeError> {
        let start = self.offset();
        let RawName(name) = self.raw_name()?;
        str::from_utf8(name).map_err(|error| {
            DecodeError::new(start + error.valid_up_to(), DecodeErrorKind::NotUtf8)
        })
    }

    /// Reads a schema name. PostgreSQL sends `pg_catalog` as an empty name
    /// (`logicalrep_write_namespace` in `proto.c`).
    pub(crate) fn schema(&mut self) -> Result<&'a str, DecodeError> {
        let schema = self.name()?;
        Ok(if schema.is_empty() { PG_CATALOG } else { schema })
    }

    /// Checks that no bytes are left.
    #[inline]
    pub(crate) fn finish(&self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(DecodeError::new(self.offset(), DecodeErrorKind::TrailingBytes(self.rest.len())))
    }
}

/// The schema whose name is sent as an empty string.
pub(crate) const PG_CATALOG: &str = "pg_catalog";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_big_endian_and_the_offset_follows() {
        let mut reader = Reader::new(b"\x01\0\0\0\x02\xFF\xFF\xFF\xFE\0\0\0\0\0\0\0\x03");
        assert_eq!(reader.u8(), Ok(1));
        assert_eq!(reader.u32(), Ok(2));
        assert_eq!(reader.i32(), Ok(-2));
        assert_eq!((reader.u64(), reader.offset()), (Ok(3), 17));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn a_truncated_field_is_an_error_at_its_first_byte() {
        let mut reader = Reader::new(b"\x01\0\0");
        reader.u8().unwrap();
        let kind = DecodeErrorKind::Truncated { needed: 4, left: 2 };
        assert_eq!(reader.u32(), Err(DecodeError::new(1, kind)));
    }

    #[test]
    fn negative_lengths_and_too_many_columns_are_rejected() {
        let kind = DecodeErrorKind::NegativeLength(-1);
        assert_eq!(Reader::new(b"\xFF\xFF\xFF\xFF").length(), Err(DecodeError::new(0, kind)));
        assert_eq!(Reader::new(&1664_u16.to_be_bytes()).column_count(), Ok(1664));
        for count in [1665, u16::MAX] {
            assert_eq!(
                Reader::new(&count.to_be_bytes()).column_count(),
                Err(DecodeError::new(0, DecodeErrorKind::TooManyColumns))
            );
        }
    }

    #[test]
    fn names_are_utf8_and_end_at_the_zero_byte() {
        let mut reader = Reader::new("größe\0\0".as_bytes());
        assert_eq!(reader.name(), Ok("größe"));
        assert_eq!(reader.schema(), Ok("pg_catalog"));
        assert_eq!(
            reader.name(),
            Err(DecodeError::new(9, DecodeErrorKind::MissingNul)),
            "nothing is left"
        );
        assert_eq!(
            Reader::new(b"ab\xFFc\0").name(),
            Err(DecodeError::new(2, DecodeErrorKind::NotUtf8))
        );
    }

    #[test]
    fn unknown_flags_and_trailing_bytes_are_rejected() {
        let mut reader = Reader::new(b"\x03\x04rest");
        assert_eq!(reader.flags(3), Ok(3));
        assert_eq!(reader.flags(3), Err(DecodeError::new(1, DecodeErrorKind::UnexpectedFlags(4))));
        assert_eq!(reader.finish(), Err(DecodeError::new(2, DecodeErrorKind::TrailingBytes(4))));
    }

    #[test]
    fn required_lsns_and_xids_are_not_zero() {
        assert_eq!(
            Reader::new(&[0; 8]).valid_lsn(),
            Err(DecodeError::new(0, DecodeErrorKind::ZeroLsn))
        );
        assert_eq!(
            Reader::new(&[0; 4]).stream_xid(true),
            Err(DecodeError::new(0, DecodeErrorKind::ZeroXid))
        );
        assert_eq!(Reader::new(&[]).stream_xid(false), Ok(None));
    }
}
