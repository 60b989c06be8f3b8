//! The failure of a run whose state on the subscriber was deleted meanwhile.

use crate::config::Subscription as Config;
use crate::error::{Class, Failure};
use crate::sqlstate;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{self, schema};

/// The statements that record progress and statistics fail alike if another process has the subscription and if its
/// rows were deleted. The epoch tells: it is still that of this process, or the row that has it is gone.
pub(super) fn explained(config: &Config, failure: Failure, epoch: Option<i64>) -> Failure {
    if is_of_schema(&failure) {
        return of_schema(config, failure);
    }
    // Tables and code of users meet this SQLSTATE as well.
    if !failure.of_state || failure.sqlstate.as_deref() != Some(sqlstate::NOT_NULL_VIOLATION) {
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

/// Whether a statement has missed a table of schema pgapace, or the schema.
fn is_of_schema(failure: &Failure) -> bool {
    failure.sqlstate.is_some() && failure.message.starts_with(schema::DAMAGED)
}

/// Names the slot, and says whether all of the schema is gone.
fn of_schema(config: &Config, failure: Failure) -> Failure {
    let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let control = subscriber.connect(Purpose::Look);
    match control.and_then(|mut control| schema::version(&mut control)) {
        Ok(0) => schema_was_dropped(config),
        _ => failure.hint(schema::begin_anew(Some(&config.slot))),
    }
}

/// The failure of a run that finds no schema pgapace any more.
pub(super) fn schema_was_dropped(config: &Config) -> Failure {
    let slot = wire::quote_literal(&config.slot);
    Failure::new(
        Class::Subscriber,
        format!("schema pgapace was dropped while subscription {} was running", config.name),
    )
    .hint(format!(
        "Its slot stays on the publisher, and keeps WAL: SELECT pg_drop_replication_slot({slot}) there. To start the \
         subscription anew after that: pgapace run --if-not-empty rebase keeps rows that are equal."
    ))
}

/// The next step when the progress is gone. `drop` says how to drop the subscription.
pub(super) fn anew(drop: &str) -> String {
    format!(
        "Without them nothing can be resumed. Drop the subscription ({drop}) and start it anew: pgapace run \
         --if-not-empty rebase keeps rows that are equal."
    )
}
