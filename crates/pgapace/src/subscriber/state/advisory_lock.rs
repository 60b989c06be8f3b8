//! Advisory locks of pgapace, as `pg_locks` shows them to every role.

use std::fmt::Display;

/// SQL: whether `l`, a row of `pg_locks`, is an advisory lock of this class that a session of this database
/// holds. `class` is the first of the lock's two keys: a number, or an expression of type int4. The second
/// key is `l.objid`.
pub(crate) fn is_held(class: impl Display) -> String {
    // pg_locks shows the keys without their sign.
    format!(
        "l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 \
         AND l.classid::pg_catalog.int8 = {class}::pg_catalog.int8 & 4294967295 \
         AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d \
           WHERE d.datname = pg_catalog.current_database())"
    )
}
