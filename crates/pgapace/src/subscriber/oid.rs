//! Oids of built-in types, as in PostgreSQL's `pg_type.dat`, and where they end.

/// Smaller OIDs are those of objects that every database has (`FirstNormalObjectId` in `transam.h`).
pub(crate) const FIRST_USER_OID: u32 = 16_384;

macro_rules! oids {
    ($($name:ident = $oid:literal;)+) => {
        $(pub(crate) const $name: u32 = $oid;)+
    };
}

oids! {
    BOOL = 16;
    BYTEA = 17;
    CHAR = 18;
    NAME = 19;
    INT8 = 20;
    INT2 = 21;
    INT4 = 23;
    TEXT = 25;
    OID = 26;
    TID = 27;
    XID = 28;
    CID = 29;
    JSON = 114;
    CIDR = 650;
    FLOAT4 = 700;
    FLOAT8 = 701;
    MACADDR8 = 774;
    MONEY = 790;
    MACADDR = 829;
    INET = 869;
    CHAR_ARRAY = 1002;
    INT4_ARRAY = 1007;
    TEXT_ARRAY = 1009;
    BPCHAR = 1042;
    VARCHAR = 1043;
    DATE = 1082;
    TIME = 1083;
    TIMESTAMP = 1114;
    TIMESTAMPTZ = 1184;
    INTERVAL = 1186;
    INTERVAL_ARRAY = 1187;
    TIMETZ = 1266;
    BIT = 1560;
    VARBIT = 1562;
    NUMERIC = 1700;
    UUID = 2950;
    PG_LSN = 3220;
    JSONB = 3802;
    XID8 = 5069;
}
