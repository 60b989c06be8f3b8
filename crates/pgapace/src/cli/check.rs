//! `pgapace check`: prints all blockers, warnings and notes, and the fixes that remove them.

use clap::Args;
use serde::Serialize;

use crate::check;
use crate::check::report::{Finding, Fix, Report, Severity, Side};
use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print a JSON array with one object per blocker, warning and note
    #[arg(long)]
    json: bool,
}

/// A finding as JSON.
#[derive(Debug, Serialize)]
struct Line<'a> {
    subscription: &'a str,
    #[serde(flatten)]
    finding: &'a Finding,
    /// `sql`, `command` or `service`.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix_kind: Option<&'static str>,
}

pub(crate) fn run(args: &CheckArgs) -> Result<()> {
    let mut reports = Vec::new();
    for subscription in args.selection.subscriptions()? {
        reports.push(check::check(&subscription));
    }
    check::same_rows::compare(&mut reports);
    check::origins::add_up(&mut reports);
    check::limits::add_up(&mut reports);
    for report in &mut reports {
        report.findings.sort_by_key(|finding| match finding.side {
            Side::Publisher => 0,
            Side::Subscriber => 1,
            Side::Program => 2,
        });
    }
    if args.json {
        let lines: Vec<_> = reports
            .iter()
            .flat_map(|report| report.findings.iter().map(move |finding| (report, finding)))
            .filter(|(_, finding)| finding.severity != Severity::Ok)
            .map(|(report, finding)| Line {
                subscription: &report.subscription,
                finding,
                fix_kind: finding.fix.as_ref().map(Fix::kind),
            })
            .collect();
        output::json(&lines)?;
    } else {
        for (index, report) in reports.iter().enumerate() {
            if index > 0 {
                output::line("");
            }
            print(report);
        }
    }
    let blockers: usize = reports.iter().map(|report| report.count(Severity::Blocker)).sum();
    if let Some(failure) = reports.into_iter().find_map(|report| report.unreachable) {
        return Err(failure);
    }
    match blockers {
        0 => Ok(()),
        1 => Err(Failure::new(Class::Mismatch, "1 blocker was found")),
        _ => Err(Failure::new(Class::Mismatch, format!("{blockers} blockers were found"))),
    }
}

fn print(report: &Report) {
    output::line(&format!("subscription {}", report.subscription));
    for (index, finding) in report.findings.iter().enumerate() {
        output::line(&format!(
            "  {:<8} {:<10} {}",
            finding.severity, finding.side, finding.message
        ));
        // Several findings with one fix follow each other; it is printed after the last one.
        let next = report.findings.get(index + 1).and_then(|next| next.fix.as_ref());
        match &finding.fix {
            same if same.as_ref() == next => {}
            Some(Fix::Sql(sql)) => {
                output::line(&format!("           SQL on the {}: {sql}", finding.side));
            }
            Some(Fix::Command(command)) => output::line(&format!("           run: {command}")),
            Some(Fix::Service { service, text }) => {
                output::line(&format!("           in {service}: {text}"));
            }
            None => {}
        }
    }
    let count = |severity, word: &str| {
        let count = report.count(severity);
        format!("{count} {word}{}", if count == 1 { "" } else { "s" })
    };
    output::line(&format!(
        "  {}, {}, {}",
        count(Severity::Blocker, "blocker"),
        count(Severity::Warning, "warning"),
        count(Severity::Note, "note")
    ));
}
