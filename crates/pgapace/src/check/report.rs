//! The report of `check`: all findings about one subscription.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::check::limits::LimitNeed;
use crate::check::origins::OriginNeed;
use crate::check::same_rows::Received;
use crate::error::Failure;

/// The severity of a finding, from harmless to fatal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// No problem.
    Ok,
    /// For information.
    Note,
    /// The subscription works, but may surprise or fail later.
    Warning,
    /// The subscription cannot work.
    Blocker,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Blocker => "BLOCKER",
        })
    }
}

/// The side where something was found, and where its fix belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Publisher,
    Subscriber,
    /// The machine where pgapace runs.
    Program,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Publisher => "publisher",
            Self::Subscriber => "subscriber",
            Self::Program => "program",
        })
    }
}

/// The fix of a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fix {
    /// SQL to run on the side of the finding.
    Sql(String),
    /// A shell command.
    Command(String),
    /// An instruction for the console, or the tools, of a managed service.
    Service { service: &'static str, text: String },
}

impl Fix {
    /// The fix as a hint.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Sql(text) | Self::Command(text) => text,
            Self::Service { service, text } => format!("{service}: {text}"),
        }
    }

    /// The kind as a stable word for programs.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Sql(_) => "sql",
            Self::Command(_) => "command",
            Self::Service { .. } => "service",
        }
    }
}

impl Serialize for Fix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Sql(text) | Self::Command(text) | Self::Service { text, .. } => {
                serializer.serialize_str(text)
            }
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    pub(crate) side: Side,
    /// A stable word for programs that read the report.
    pub(crate) topic: &'static str,
    /// The table, slot or publication that the finding is about.
    pub(crate) object: Option<String>,
    pub(crate) message: String,
    pub(crate) fix: Option<Fix>,
}

impl Finding {
    pub(crate) fn on(&mut self, object: impl Into<String>) -> &mut Self {
        self.object = Some(object.into());
        self
    }

    pub(crate) fn fix(&mut self, fix: Fix) -> &mut Self {
        self.fix = Some(fix);
        self
    }

    pub(crate) fn sql(&mut self, sql: impl Into<String>) -> &mut Self {
        self.fix(Fix::Sql(sql.into()))
    }

    pub(crate) fn command(&mut self, command: impl Into<String>) -> &mut Self {
        self.fix(Fix::Command(command.into()))
    }
}

/// All findings about one subscription.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) subscription: String,
    pub(crate) findings: Vec<Finding>,
    /// The failure to connect to one side, or the loss of a connection.
    pub(crate) unreachable: Option<Failure>,
    /// If the subscription tags as far as origins are left.
    pub(super) origins: Option<OriginNeed>,
    /// How much of the limits of both servers the subscription needs.
    pub(super) limits: Vec<LimitNeed>,
    /// The databases and tables of the subscription; `None` if a server could not be asked.
    pub(super) received: Option<Received>,
}

impl Report {
    pub(crate) fn new(subscription: &str) -> Self {
        Self {
            subscription: subscription.to_owned(),
            findings: Vec::new(),
            unreachable: None,
            origins: None,
            limits: Vec::new(),
            received: None,
        }
    }

    pub(crate) fn add(
        &mut self,
        severity: Severity,
        side: Side,
        topic: &'static str,
        message: impl Into<String>,
    ) -> &mut Finding {
        let message = message.into();
        self.findings.push(Finding { severity, side, topic, object: None, message, fix: None });
        let last = self.findings.len() - 1;
        &mut self.findings[last]
    }

    /// Adds a failed check as a blocker. Detail and hint of the failure become part of the message.
    pub(crate) fn failure(
        &mut self,
        side: Side,
        topic: &'static str,
        failure: &Failure,
    ) -> &mut Finding {
        let mut message = failure.message.clone();
        for more in [&failure.detail, &failure.hint].into_iter().flatten() {
            message.push_str(if message.ends_with('.') { " " } else { ". " });
            message.push_str(more);
        }
        self.add(Severity::Blocker, side, topic, message)
    }

    pub(crate) fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Whether no finding about these topics is worse than a note.
    pub(crate) fn fine(&self, topics: &[&str]) -> bool {
        !self.findings.iter().any(|f| {
            topics.contains(&f.topic) && matches!(f.severity, Severity::Warning | Severity::Blocker)
        })
    }
}

/// Adds findings about one side to a report.
#[derive(Debug)]
pub(crate) struct Reporter<'a> {
    pub(crate) report: &'a mut Report,
    pub(crate) side: Side,
}

impl Reporter<'_> {
    /// Checks that the server is not older than `oldest`, and reports the result.
    pub(crate) fn supports(&mut self, version: wire::ServerVersion, oldest: u32) -> bool {
        let supported = version.major() >= oldest;
        if supported {
            self.ok("version", format!("PostgreSQL {version}"));
        } else {
            self.block(
                "version",
                format!("PostgreSQL {version}: {oldest} is the oldest supported"),
            );
        }
        supported
    }

    pub(crate) fn ok(&mut self, topic: &'static str, message: impl Into<String>) {
        self.report.add(Severity::Ok, self.side, topic, message);
    }

    pub(crate) fn note(&mut self, topic: &'static str, message: impl Into<String>) -> &mut Finding {
        self.report.add(Severity::Note, self.side, topic, message)
    }

    pub(crate) fn warn(&mut self, topic: &'static str, message: impl Into<String>) -> &mut Finding {
        self.report.add(Severity::Warning, self.side, topic, message)
    }

    pub(crate) fn block(
        &mut self,
        topic: &'static str,
        message: impl Into<String>,
    ) -> &mut Finding {
        self.report.add(Severity::Blocker, self.side, topic, message)
    }

    pub(crate) fn failure(&mut self, topic: &'static str, failure: &Failure) -> &mut Finding {
        self.report.failure(self.side, topic, failure)
    }

    /// Runs a group of checks. A failure becomes a finding. After a connection was lost, others that need it fail too: they
    /// find nothing.
    pub(crate) fn group<T>(
        &mut self,
        topic: &'static str,
        checks: impl FnOnce(&mut Self) -> crate::error::Result<T>,
    ) -> Option<T> {
        match checks(self) {
            Ok(value) => Some(value),
            Err(failure) => {
                let is_lost = failure.is_connection_lost();
                if !is_lost || self.report.unreachable.is_none() {
                    self.failure(topic, &failure);
                }
                if is_lost {
                    self.report.unreachable.get_or_insert(failure);
                }
                None
            }
        }
    }
}
