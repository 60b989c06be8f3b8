//! `pgapace verify`: compares the published tables of both servers at one LSN.
//!
//! Two snapshots show the same state of the publisher ([`pair`]). Several pairs of sessions read under
//! them ([`sessions`]). They take chunks of tables ([`work`]), and each server counts its rows and sums
//! two hashes of each ([`sql`]). If the sums differ, both send a hash of each row in the order of
//! another hash, and two streams are merged ([`merge`]). So neither the size of a table nor the number
//! of differences needs memory here, and no order of a collation matters.
//!
//! Why not by `ORDER BY key`: the order of strings depends on the collation and on the version of its
//! library, and two servers with different orders would show differences that do not exist. Ranges of
//! the key are used only where its order is certain ([`key`]).
//!
//! A running subscription can do the same all the time ([`background`]).

pub(crate) mod background;
pub(crate) mod columns;
pub(crate) mod compare;
pub(crate) mod exclusive;
pub(crate) mod facts;
pub(crate) mod keeper;
pub(crate) mod key;
pub(crate) mod merge;
pub(crate) mod pair;
pub(crate) mod plan;
pub(crate) mod prepare;
pub(crate) mod progress;
pub(crate) mod range;
pub(crate) mod rate;
pub(crate) mod reading;
pub(crate) mod record;
pub(crate) mod requirements;
pub(crate) mod row_hash;
pub(crate) mod run;
pub(crate) mod sessions;
pub(crate) mod sql;
pub(crate) mod whole;
pub(crate) mod work;
