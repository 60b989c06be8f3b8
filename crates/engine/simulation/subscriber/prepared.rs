//! Prepared transactions, and the rows of `pgapace.prepared` about them.

use pgoutput::{Lsn, Timestamp, Xid};

use crate::simulation::history::{History, Preparation};
use crate::simulation::subscriber::commands::Fault;
use crate::simulation::subscriber::commits::Logged;
use crate::simulation::subscriber::sessions::Session;
use crate::simulation::subscriber::{Database, Done, Status, Stop, Tx};

/// A transaction of the publisher that is prepared on the subscriber, or is about to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreparedHere {
    pub(crate) xid: Xid,
    pub(crate) prepare_lsn: Lsn,
    pub(crate) time: Timestamp,
}

impl PreparedHere {
    pub(crate) fn of(one: &Preparation, history: &History) -> Self {
        let &Preparation { xid, prepare_lsn, .. } = one;
        Self { xid, prepare_lsn, time: history.time(prepare_lsn) }
    }
}

/// Its name on the subscriber has no time.
impl PartialEq for PreparedHere {
    fn eq(&self, other: &Self) -> bool {
        (self.xid, self.prepare_lsn) == (other.xid, other.prepare_lsn)
    }
}

/// The state of a prepared transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Prepared,
    Committed,
    Absent,
}

/// A row of `pgapace.prepared`.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) of: PreparedHere,
    /// Written by the prepared transaction itself.
    pub(super) committed: bool,
    pub(super) created: Tx,
    pub(super) deleted: Tx,
}

/// A row of `pg_prepared_xacts`, and what the transaction has changed.
#[derive(Debug)]
pub(super) struct PreparedTransaction {
    pub(super) of: PreparedHere,
    pub(super) tx: Tx,
    pub(super) delta: u64,
    pub(super) changed: u16,
    pub(super) truncated: u16,
}

impl Database {
    /// PREPARE TRANSACTION, which is durable when it is answered.
    pub(super) fn prepare(&mut self, number: usize, of: PreparedHere) -> Done<()> {
        if self.prepared.iter().any(|one| one.of == of) {
            return Err(Stop::Fail(Fault::Name));
        }
        let session = &mut self.sessions[number];
        let tx = std::mem::take(&mut session.tx);
        let Session { delta, changed, truncated, .. } = *session;
        self.prepared.push(PreparedTransaction { of, tx, delta, changed, truncated });
        self.durable = self.commits;
        Ok(())
    }

    /// Records, in a commit of its own, that these are about to be prepared.
    pub(crate) fn note_prepared(&mut self, all: &[PreparedHere]) {
        let created = self.small_commit();
        for of in all {
            let is_first = |note: &Note| note.of == *of && !note.committed && self.is_there(note);
            let first = self.notes.iter().position(is_first);
            match first {
                Some(at) if self.notes[at].of.time == of.time => continue,
                // Of one that was never prepared, before the publisher went back in time.
                Some(at) => self.notes[at].deleted = created,
                None => (),
            }
            self.notes.push(Note { of: *of, committed: false, created, deleted: 0 });
        }
    }

    fn notes_of(&self, of: PreparedHere) -> impl Iterator<Item = &Note> {
        self.notes.iter().filter(move |note| note.of == of && self.is_there(note))
    }

    /// Whether it can be seen.
    fn is_there(&self, note: &Note) -> bool {
        self.is_committed(note.created) && !self.is_committed(note.deleted)
    }

    pub(super) fn delete_notes(&mut self, of: PreparedHere, tx: Tx) {
        for at in 0..self.notes.len() {
            if self.notes[at].of == of && self.is_there(&self.notes[at]) {
                self.notes[at].deleted = tx;
            }
        }
    }

    pub(crate) fn forget_prepared(&mut self, of: PreparedHere) {
        let tx = self.small_commit();
        self.delete_notes(of, tx);
    }

    /// Whether the records say that it has committed.
    pub(crate) fn has_committed(&self, of: PreparedHere) -> bool {
        self.notes_of(of).any(|note| note.committed)
    }

    /// COMMIT PREPARED or ROLLBACK PREPARED, which are durable when they are answered. Whether it was
    /// prepared.
    pub(crate) fn resolve(
        &mut self,
        of: PreparedHere,
        commit: bool,
        history: &History,
    ) -> Result<bool, String> {
        let Some(place) = self.prepared.iter().position(|one| one.of == of) else {
            return Ok(false);
        };
        let PreparedTransaction { tx, delta, .. } = self.prepared.swap_remove(place);
        if commit {
            let (visible, through) = match history.number(of.xid) {
                Some(number) => (1 << number, history.transactions[number].end_lsn),
                None if history.empty.contains(&of.xid) => (0, Lsn(0)),
                None => return Err(format!("P1: {of:?} did not happen")),
            };
            if self.followed_before.is_none() && self.committed & visible != 0 {
                return Err(format!("P3: {of:?} is committed twice"));
            }
            self.log_commit(tx, delta, Logged { visible, recorded: 0 });
            self.durable = self.commits;
            self.check_visible(visible, through, history)?;
        } else {
            self.status[tx] = Status::Aborted;
        }
        Ok(true)
    }

    /// The transactions that are prepared, or were about to be.
    pub(crate) fn known_prepared(&self) -> Vec<(PreparedHere, Standing)> {
        let is_first = |note: &&Note| !note.committed && self.is_there(note);
        let noted = self.notes.iter().filter(is_first).map(|note| note.of);
        let mut all: Vec<_> = self.prepared.iter().map(|one| one.of).collect();
        for of in noted {
            if !all.contains(&of) {
                all.push(of);
            }
        }
        let standing = |of: PreparedHere| {
            if self.has_committed(of) {
                Standing::Committed
            } else if self.prepared.iter().any(|one| one.of == of) {
                Standing::Prepared
            } else {
                Standing::Absent
            }
        };
        all.into_iter().map(|of| (of, standing(of))).collect()
    }

    /// Whether a transaction is prepared, so that a crash does not lose it.
    pub(crate) fn is_prepared(&self, xid: Xid) -> bool {
        self.prepared.iter().any(|one| one.of.xid == xid)
    }
}
