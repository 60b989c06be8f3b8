//! The number of workers in use and its reason, as `pgapace status` shows them.

use std::fmt::{self, Display, Formatter};

use engine::dispatch::scaling::{Decision, Reason, Tried};

/// How many workers are in use, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkersInUse {
    pub(crate) decision: Decision,
    /// The most that there may be.
    pub(crate) most: usize,
    /// Whether there may be fewer than configured, for lack of replication origins.
    pub(crate) limited_by_origins: bool,
}

/// The reason.
impl Display for WorkersInUse {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.decision.reason {
            Reason::Fixed => write!(f, "set by --workers")?,
            Reason::OneByOne => {
                write!(f, "transactions are committed one by one, in one pipeline")?;
            }
            Reason::Unmeasured => write!(f, "no backlog was measured yet")?,
            Reason::TooManyStatements { workers } => {
                write!(f, "the sessions of {workers} would first prepare statements for too long")?;
            }
            Reason::Trial { than } => write!(f, "measuring whether they apply more than {than}")?,
            Reason::Measured { more, fewer } => {
                let mut comparisons = [fewer, more].into_iter().flatten().peekable();
                if comparisons.peek().is_none() {
                    write!(f, "no other number was measured yet")?;
                }
                while let Some(Tried { workers, percent }) = comparisons.next() {
                    let than = if percent > 0 { "more" } else { "less" };
                    write!(f, "{workers} applied {} % {than}", percent.unsigned_abs())?;
                    if comparisons.peek().is_some() {
                        write!(f, ", ")?;
                    }
                }
            }
        }
        if self.limited_by_origins {
            write!(f, "; at most {}, for lack of replication origins", self.most)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Decision, Reason, Tried, WorkersInUse};

    #[test]
    fn reasons_are_sentences() {
        let said = |reason, limited_by_origins| {
            let decision = Decision { workers: 4, reason };
            WorkersInUse { decision, most: 5, limited_by_origins }.to_string()
        };
        assert_eq!(
            said(Reason::Trial { than: 2 }, false),
            "measuring whether they apply more than 2"
        );
        let more = Some(Tried { workers: 6, percent: -12 });
        let fewer = Some(Tried { workers: 3, percent: 2 });
        assert_eq!(
            said(Reason::Measured { more, fewer }, true),
            "3 applied 2 % more, 6 applied 12 % less; at most 5, for lack of replication origins"
        );
        let none = Reason::Measured { more: None, fewer: None };
        assert_eq!(said(none, false), "no other number was measured yet");
    }
}
