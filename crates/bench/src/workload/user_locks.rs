//! A session on the subscriber locks the table again and again. Its lock waits for the groups that are executed,
//! and the groups behind them wait for it. If a later group has its lock on the table before an earlier one,
//! it has to give way.

use super::{Backlog, Scale, User, random};

pub(super) fn user_locks(scale: Scale) -> Backlog {
    Backlog { user: User::Locks("t"), ..random::update(scale) }
}
