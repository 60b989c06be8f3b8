//! SQLSTATEs that the program distinguishes, by the names of PostgreSQL's `errcodes.txt`.

macro_rules! sqlstates {
    ($($name:ident = $code:literal;)+) => {
        $(pub(crate) const $name: &str = $code;)+
    };
}

sqlstates! {
    PROTOCOL_VIOLATION = "08P01";
    FEATURE_NOT_SUPPORTED = "0A000";
    STRING_DATA_RIGHT_TRUNCATION = "22001";
    NUMERIC_VALUE_OUT_OF_RANGE = "22003";
    INVALID_DATETIME_FORMAT = "22007";
    DATETIME_FIELD_OVERFLOW = "22008";
    CHARACTER_NOT_IN_REPERTOIRE = "22021";
    INVALID_PARAMETER_VALUE = "22023";
    INVALID_TEXT_REPRESENTATION = "22P02";
    INVALID_BINARY_REPRESENTATION = "22P03";
    UNTRANSLATABLE_CHARACTER = "22P05";
    NOT_NULL_VIOLATION = "23502";
    FOREIGN_KEY_VIOLATION = "23503";
    UNIQUE_VIOLATION = "23505";
    CHECK_VIOLATION = "23514";
    EXCLUSION_VIOLATION = "23P01";
    INVALID_SQL_STATEMENT_NAME = "26000";
    INVALID_AUTHORIZATION_SPECIFICATION = "28000";
    INVALID_PASSWORD = "28P01";
    INVALID_CATALOG_NAME = "3D000";
    INVALID_SCHEMA_NAME = "3F000";
    INSUFFICIENT_PRIVILEGE = "42501";
    SYNTAX_ERROR = "42601";
    UNDEFINED_COLUMN = "42703";
    UNDEFINED_OBJECT = "42704";
    DUPLICATE_OBJECT = "42710";
    DATATYPE_MISMATCH = "42804";
    UNDEFINED_FUNCTION = "42883";
    UNDEFINED_TABLE = "42P01";
    DUPLICATE_TABLE = "42P07";
    INVALID_COLUMN_REFERENCE = "42P10";
    INVALID_TABLE_DEFINITION = "42P16";
    DISK_FULL = "53100";
    OUT_OF_MEMORY = "53200";
    TOO_MANY_CONNECTIONS = "53300";
    CONFIGURATION_LIMIT_EXCEEDED = "53400";
    OBJECT_NOT_IN_PREREQUISITE_STATE = "55000";
    OBJECT_IN_USE = "55006";
    LOCK_NOT_AVAILABLE = "55P03";
    QUERY_CANCELED = "57014";
    UNDEFINED_FILE = "58P01";
    INTERNAL_ERROR = "XX000";
}

/// Whether the values of a row may be refused because its table has other columns than before: when they are read, when
/// their columns are named, or when they are compared with columns of other types.
pub(crate) fn is_row_type_changed(sqlstate: &str) -> bool {
    matches!(sqlstate, DATATYPE_MISMATCH | INVALID_COLUMN_REFERENCE | UNDEFINED_FUNCTION)
}

/// Whether another row has the value of a unique index, or one that an exclusion constraint forbids beside
/// it.
pub(crate) fn is_taken_value(sqlstate: &str) -> bool {
    matches!(sqlstate, UNIQUE_VIOLATION | EXCLUSION_VIOLATION)
}
