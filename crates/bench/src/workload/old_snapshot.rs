//! pgbench's transactions, while a session of the subscriber keeps a snapshot: no row version that
//! is removed meanwhile can be reclaimed, neither of the tables nor of the progress.

use super::{Backlog, Scale, User, tpcb};

/// Every transaction updates one of ten branches, whose versions pile up for native and pgapace.
pub(super) fn tpcb(scale: Scale) -> Backlog {
    Backlog { user: User::KeepsSnapshot, ..tpcb::tpcb(scale) }
}

/// Without rows that many transactions update, only the subscriber's records of its progress pile
/// up.
pub(super) fn simple_update(scale: Scale) -> Backlog {
    Backlog { user: User::KeepsSnapshot, ..tpcb::simple_update(scale) }
}

/// The same with as much progress to record as there are transactions.
pub(super) fn single(scale: Scale) -> Backlog {
    Backlog { pgapace: &["--group-transactions=1"], ..simple_update(scale) }
}
