//! `Y`: the name of a type that is not built in.

use crate::reader::Reader;
use crate::{DecodeError, TypeOid, Xid, writer};

/// The name of a type, sent before the [`Relation`](crate::Relation) that uses it
/// (`logicalrep_write_typ` in `proto.c`).
///
/// The publisher sends it only for types with an OID of at least 10000. Other OIDs are the same on
/// every server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TypeInfo<'a> {
    /// The xid of its transaction; only inside a stream block.
    pub xid: Option<Xid>,
    /// The OID of the type on the publisher.
    pub type_oid: TypeOid,
    /// The schema. Never empty: PostgreSQL sends `pg_catalog` as an empty name, and decoding
    /// restores it.
    pub schema: &'a str,
    /// The type name; for a domain, the name of its base type.
    pub name: &'a str,
}

impl<'a> TypeInfo<'a> {
    pub(crate) fn decode(reader: &mut Reader<'a>, in_stream: bool) -> Result<Self, DecodeError> {
        Ok(Self {
            xid: reader.stream_xid(in_stream)?,
            type_oid: TypeOid(reader.u32()?),
            schema: reader.schema()?,
            name: reader.name()?,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        writer::stream_xid(out, self.xid);
        writer::u32(out, self.type_oid.0);
        writer::schema(out, self.schema);
        writer::name(out, self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Message;
    use crate::message::testing::{check, check_in_stream};

    #[test]
    fn type_info() {
        check(
            b"Y\0\0\x40\x05public\0mood\0",
            Message::Type(TypeInfo {
                xid: None,
                type_oid: TypeOid(16389),
                schema: "public",
                name: "mood",
            }),
        );
        check_in_stream(
            b"Y\0\0\x02\xDC\0\0\x30\x39\0mood\0",
            Message::Type(TypeInfo {
                xid: Some(Xid(732)),
                type_oid: TypeOid(12345),
                schema: "pg_catalog",
                name: "mood",
            }),
        );
    }
}
