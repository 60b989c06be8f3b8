//! Failures of verbs that work on several tables or subscriptions: one does not stop the others.

use crate::error::{Class, Failure, Result};

/// The failures of a verb, which goes on behind them; each with the tables or subscriptions that it is of.
#[derive(Debug, Default)]
pub(super) struct Failures(Vec<(Vec<String>, Failure)>);

impl Failures {
    /// One that is known is not repeated for another table.
    pub(super) fn add(&mut self, of: String, failure: Failure) {
        let same = |(_, known): &&mut (Vec<String>, Failure)| {
            (&known.message, &known.hint) == (&failure.message, &failure.hint)
        };
        match self.0.iter_mut().find(same) {
            Some((all, _)) if all.contains(&of) => {}
            Some((all, _)) => all.push(of),
            None => self.0.push((vec![of], failure)),
        }
    }

    /// One that ended the work on a subscription.
    pub(super) fn add_of_subscription(&mut self, name: &str, failure: Failure) {
        self.add(format!("subscription {name}"), failure);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first failure, which names all. A request to stop comes before others. `done` is what was not done with
    /// all, and `again` the last step of the user.
    pub(super) fn into_result(mut self, done: &str, again: &str) -> Result<()> {
        self.0.sort_by_key(|(_, failure)| failure.class != Class::Stopped);
        let line = |(of, failure): &(Vec<String>, Failure)| {
            let hint = failure.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
            format!("{}: {}{hint}", of.join(", "), failure.message)
        };
        let lines: Vec<_> = self.0.iter().map(line).collect();
        let names: Vec<_> = self.0.iter().flat_map(|(of, _)| of.clone()).collect();
        let alone = self.0.len() == 1;
        let Some((_, first)) = self.0.into_iter().next() else { return Ok(()) };
        if !alone {
            let message = format!("not all {done}: {}", names.join(", "));
            let failure = Failure { message, ..first };
            return Err(failure
                .detail(lines.join("\n         "))
                .hint(format!("Act on each. {again}")));
        }
        let of_one_subscription =
            |name: &String| name.starts_with("subscription ") && names.len() == 1;
        let is_named = |name: &String| of_one_subscription(name) || first.message.contains(name);
        if names.iter().all(is_named) {
            return Err(first);
        }
        Err(Failure { message: format!("{}: {}", names.join(", "), first.message), ..first })
    }
}

impl IntoIterator for Failures {
    type Item = (Vec<String>, Failure);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
