//! What was found: collected, never stopped at.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::error::Failure;

/// How bad a finding is, from harmless to fatal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Works, but may surprise or break later.
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

/// Where something was found, and where its fix belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    Publisher,
    Subscriber,
    /// Where pgapace runs.
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

/// What mends a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fix {
    /// SQL for the side of the finding.
    Sql(String),
    /// A command for a shell.
    Command(String),
}

impl Serialize for Fix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Sql(text) | Self::Command(text) => serializer.serialize_str(text),
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    pub(crate) side: Side,
    /// What it is about, as a stable word for programs.
    pub(crate) topic: &'static str,
    /// The table, slot or publication.
    pub(crate) object: Option<String>,
    pub(crate) message: String,
    pub(crate) fix: Option<Fix>,
}

impl Finding {
    pub(crate) fn on(&mut self, object: impl Into<String>) -> &mut Self {
        self.object = Some(object.into());
        self
    }

    pub(crate) fn sql(&mut self, sql: impl Into<String>) -> &mut Self {
        self.fix = Some(Fix::Sql(sql.into()));
        self
    }

    pub(crate) fn command(&mut self, command: impl Into<String>) -> &mut Self {
        self.fix = Some(Fix::Command(command.into()));
        self
    }
}

/// Everything about one subscription.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) subscription: String,
    pub(crate) findings: Vec<Finding>,
    /// A side that could not be reached at all.
    pub(crate) unreachable: Option<Failure>,
}

impl Report {
    pub(crate) fn new(subscription: &str) -> Self {
        Self { subscription: subscription.to_owned(), findings: Vec::new(), unreachable: None }
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

    /// A failure of the program's own checks, as a blocker; its hint becomes part of the message.
    pub(crate) fn failure(
        &mut self,
        side: Side,
        topic: &'static str,
        failure: &Failure,
    ) -> &mut Finding {
        let mut message = failure.message.clone();
        for more in [&failure.detail, &failure.hint].into_iter().flatten() {
            message.push_str(". ");
            message.push_str(more);
        }
        self.add(Severity::Blocker, side, topic, message)
    }

    pub(crate) fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Whether nothing worse than a note was found of a topic: then one `ok` line stands for it.
    pub(crate) fn fine(&self, topics: &[&str]) -> bool {
        !self.findings.iter().any(|f| {
            topics.contains(&f.topic) && matches!(f.severity, Severity::Warning | Severity::Blocker)
        })
    }
}

/// A side's reporter: findings of one server.
#[derive(Debug)]
pub(crate) struct Reporter<'a> {
    pub(crate) report: &'a mut Report,
    pub(crate) side: Side,
}

impl Reporter<'_> {
    /// Whether the side's server is not older than this; says so either way.
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

    /// Runs a group of checks; one that cannot be done is a finding too.
    pub(crate) fn group<T>(
        &mut self,
        topic: &'static str,
        checks: impl FnOnce(&mut Self) -> crate::error::Result<T>,
    ) -> Option<T> {
        match checks(self) {
            Ok(value) => Some(value),
            Err(failure) => {
                self.failure(topic, &failure);
                None
            }
        }
    }
}
