//! The failure of a run whose state on the subscriber was deleted meanwhile.

use crate::config::Subscription as Config;
use crate::error::{Class, Failure};
use crate::sqlstate;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state;

/// The statements that record progress and statistics fail alike if another process has the subscription and if its
/// rows were deleted. The epoch tells: it is still that of this process, or the row that has it is gone.
pub(super) fn explained(config: &Config, failure: Failure, epoch: Option<i64>) -> Failure {
    let of_table = failure.offender.as_ref().is_some_and(|offender| offender.relation.is_some());
    if of_table || failure.sqlstate.as_deref() != Some(sqlstate::NOT_NULL_VIOLATION) {
        return failure;
    }
    let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let control = subscriber.connect(Purpose::Control);
    let found = control.and_then(|mut control| state::find(&mut control, &config.name));
    let (deleted, hint) = match found {
        Ok(Some(row)) if Some(row.epoch) == epoch => ("pgapace.progress", anew("pgapace drop")),
        Ok(None) => {
            let slot = wire::quote_literal(&config.slot);
            let drop = format!("on the publisher, SELECT pg_drop_replication_slot({slot});");
            ("pgapace.subscription", anew(&drop))
        }
        Ok(Some(_)) | Err(_) => return failure,
    };
    let message = format!("rows of {deleted} were deleted while the subscription was running");
    Failure { class: Class::Subscriber, message, detail: None, ..failure }.hint(hint)
}

/// The next step when the progress is gone. `drop` says how to drop the subscription.
pub(super) fn anew(drop: &str) -> String {
    format!(
        "Without them nothing can be resumed. Drop the subscription ({drop}) and start it anew: pgapace run \
         --if-not-empty rebase keeps rows that are equal."
    )
}
