//! A change that cannot be applied may be the first sign that its table lacks changes.
//!
//! The publications are read at the start of a run, and now and then while it streams. Between two such looks, the stream
//! may bring a change that follows one which was not published, such as an INSERT of a unique value whose earlier row was
//! deleted meanwhile. So pgapace reads the publications once more before such a failure is final. The next run then treats
//! the table as `--on-missed-changes` says.

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;

use crate::cli::table_name::shell_word;
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Recovery, Result};
use crate::publisher::publication;
use crate::publisher::session::Publisher;
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{self, RelationState, published};

/// Whether a change could not be applied, for a reason that a retry alone does not remove.
pub(super) fn is_of_change(failure: &Failure) -> bool {
    failure.class == Class::Apply
        && failure.offender.is_some()
        && matches!(failure.recovery, Recovery::None)
}

/// Why the next run treats the table of a failed change in another way, if it does.
pub(super) fn next_run_differs(
    config: &Config,
    failure: &Failure,
    shutdown: &Shutdown,
) -> Result<Option<&'static str>> {
    let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let mut control = subscriber.connect(Purpose::Look)?;
    let Some(row) = state::find(&mut control, &config.name)? else { return Ok(None) };
    let (states, recorded) = state::relations_and_published(&mut control, row.id)?;
    let relation = failure.offender.as_deref().and_then(|offender| offender.relation.as_ref());
    // A look of the run that failed may have decided it, or a user.
    match relation.and_then(|key| states.get(key)) {
        Some(RelationState { requested: Some(_), .. }) => return Ok(Some("a copy is requested")),
        Some(state) if state.state == TableSyncState::Blocked => {
            return Ok(Some("the table was blocked"));
        }
        Some(_) | None => {}
    }
    let publisher = Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
    let mut source = publisher.connect_to_look()?;
    let sessions = [source.cancel_handle()];
    let contents = interruptible(shutdown, &sessions, "reading the publications", || {
        publication::read_contents(&mut source, &config.publications)
    })?;
    let changed = !published::unjudged(&recorded, &contents).is_empty();
    Ok(changed.then_some("the publications were changed since they were read"))
}

/// Says of a conflict that its table may lack changes. With `--on-missed-changes ignore` its changes are applied all the
/// same.
pub(super) fn explained(config: &Config, failure: Failure) -> Failure {
    let is_conflict = failure.conflict.is_some()
        || matches!(
            failure.sqlstate.as_deref(),
            Some(sqlstate::UNIQUE_VIOLATION | sqlstate::EXCLUSION_VIOLATION)
        );
    let relation = failure.offender.as_deref().and_then(|offender| offender.relation.as_ref());
    let Some(key) = relation.filter(|_| is_conflict && is_of_change(&failure)) else {
        return failure;
    };
    let Some(state) = state_of(config, key) else { return failure };
    let Some(from) = state.stale_from else { return failure };
    let reason = state.stale_reason.map_or(String::new(), |reason| format!(": {reason}"));
    let copy = shell_word(key);
    let or = failure.hint.as_ref().map_or(String::new(), |hint| format!(" Or: {hint}"));
    let hint = format!(
        "The table may lack changes since {from}{reason}. Copy it again: pgapace resync {copy}, and start pgapace \
         again.{or}"
    );
    failure.hint(hint)
}

/// The state of a table, if it can be read.
fn state_of(config: &Config, key: &TableName) -> Option<RelationState> {
    let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let read = subscriber.connect(Purpose::Look).and_then(|mut control| {
        let row = state::find(&mut control, &config.name)?;
        row.map(|row| state::relations_by_name(&mut control, row.id)).transpose()
    });
    match read {
        Ok(states) => states.and_then(|mut states| states.remove(key)),
        Err(error) => {
            tracing::debug!(%error, "cannot read the state of a table");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_of_change;
    use crate::error::{Class, Failure, Offender, Recovery};
    use pgoutput::{Lsn, Xid};

    #[test]
    fn only_a_change_that_stays_refused_is_looked_at() {
        let offender = Some(Box::new(Offender {
            commit_lsn: Lsn(1),
            is_prepare: false,
            xid: Xid(1),
            table: None,
            relation: None,
            operation: "INSERT",
            key: None,
        }));
        let failure = |class, recovery| Failure {
            recovery,
            offender: offender.clone(),
            ..Failure::new(class, "x")
        };
        assert!(is_of_change(&failure(Class::Apply, Recovery::None)));
        assert!(!is_of_change(&failure(Class::Apply, Recovery::Retry)));
        assert!(!is_of_change(&failure(Class::Busy, Recovery::None)));
        assert!(!is_of_change(&Failure::new(Class::Apply, "x")));
    }
}
