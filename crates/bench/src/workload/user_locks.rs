//! A session of the subscriber locks the table again and again. Its lock waits for a group that waits for its
//! turn to commit, and the locks of earlier groups wait behind it, so groups have to give way.

use super::{Backlog, Scale, User, random};

pub(super) fn user_locks(scale: Scale) -> Backlog {
    Backlog { user: User::Locks("t"), ..random::update(scale) }
}
