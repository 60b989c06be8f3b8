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
    JSON_ARRAY = 199;
    CIDR = 650;
    FLOAT4 = 700;
    FLOAT8 = 701;
    MACADDR8 = 774;
    MONEY = 790;
    MACADDR = 829;
    INET = 869;
    BOOL_ARRAY = 1000;
    BYTEA_ARRAY = 1001;
    CHAR_ARRAY = 1002;
    NAME_ARRAY = 1003;
    INT2_ARRAY = 1005;
    INT4_ARRAY = 1007;
    TEXT_ARRAY = 1009;
    BPCHAR_ARRAY = 1014;
    VARCHAR_ARRAY = 1015;
    INT8_ARRAY = 1016;
    FLOAT4_ARRAY = 1021;
    FLOAT8_ARRAY = 1022;
    OID_ARRAY = 1028;
    BPCHAR = 1042;
    VARCHAR = 1043;
    DATE = 1082;
    TIME = 1083;
    TIMESTAMP = 1114;
    TIMESTAMP_ARRAY = 1115;
    DATE_ARRAY = 1182;
    TIMESTAMPTZ = 1184;
    TIMESTAMPTZ_ARRAY = 1185;
    INTERVAL = 1186;
    INTERVAL_ARRAY = 1187;
    NUMERIC_ARRAY = 1231;
    TIMETZ = 1266;
    BIT = 1560;
    BIT_ARRAY = 1561;
    VARBIT = 1562;
    VARBIT_ARRAY = 1563;
    NUMERIC = 1700;
    UUID = 2950;
    UUID_ARRAY = 2951;
    PG_LSN = 3220;
    JSONB = 3802;
    JSONB_ARRAY = 3807;
    INT4RANGE = 3904;
    NUMRANGE = 3906;
    TSRANGE = 3908;
    TSTZRANGE = 3910;
    DATERANGE = 3912;
    INT8RANGE = 3926;
    XID8 = 5069;
}
