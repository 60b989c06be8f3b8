//! Finds the subscriptions that a verb was asked for, and names those that do not exist.

use crate::cli::output;
use crate::cli::status::collect::{Status, StatusReader};
use crate::error::{Class, Failure, Result};
use crate::subscriber::state;

/// The subscriptions that were found on the subscribers, and those that were not.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) all: Vec<Status>,
    /// Names that were asked for, and are on no subscriber.
    pub(crate) missing: Vec<String>,
    /// The subscriptions of subscribers that lack one which was asked for.
    others: Vec<String>,
    /// Whether a subscriber has no schema pgapace.
    without_schema: bool,
}

impl Found {
    pub(crate) fn read(&mut self, reader: &mut StatusReader) -> Result<()> {
        let statuses = reader.read()?;
        let has_schema = statuses.is_some();
        self.without_schema |= !has_schema;
        let statuses = statuses.unwrap_or_default();
        if let Some(name) = reader.name().filter(|_| statuses.is_empty()) {
            self.missing.push(name.to_owned());
            if has_schema {
                self.others.extend(reader.names()?);
            }
        }
        self.all.extend(statuses);
        Ok(())
    }

    /// Names those that are missing beside others, on standard error.
    pub(crate) fn tell_missing(&self) {
        for name in &self.missing {
            output::remark(&format!("{name}: no subscription on the subscriber"));
        }
    }

    /// The failure if there is none of the subscriptions. `checks`: the exit code is to say whether all are healthy.
    pub(crate) fn none(&self, checks: bool) -> Failure {
        let there_is = if self.without_schema {
            "there is no subscription: the subscriber has no schema pgapace, so pgapace never ran here"
        } else {
            "there is no subscription on the subscriber"
        };
        let failure = match self.missing.as_slice() {
            [] => Failure::new(Class::Unknown, there_is),
            _ if self.without_schema => Failure::new(Class::Unknown, there_is),
            [name] => state::missing(name),
            names => {
                let message = format!(
                    "the subscriber has none of these subscriptions: {}",
                    output::some(names)
                );
                Failure { message, ..state::missing(&names[0]) }
            }
        };
        let failure = match self.others.as_slice() {
            [] if failure.class == Class::Config => failure.hint("It has none."),
            [] => failure,
            others => failure.hint(format!("It has: {}.", output::some(others))),
        };
        Failure { class: if checks { Class::Unknown } else { failure.class }, ..failure }
    }
}
