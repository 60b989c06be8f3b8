//! The metrics in the text format of Prometheus. contrib/ has a dashboard and alert rules for them.

use std::fmt::{Display, Write as _};

use crate::observe::board::{RunPhase, Shown};
use crate::subscriber::conflict::ConflictType;

/// Writes families: each with its type and help, then its samples.
#[derive(Default)]
struct Writer(String);

impl Writer {
    fn family(&mut self, kind: &str, name: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP pgapace_{name} {help}\n# TYPE pgapace_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let _ = write!(self.0, "pgapace_{name}");
        for (index, (label, text)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escaped(text));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// A family with one sample per subscription that has a value.
    fn each<T: Display>(
        &mut self,
        (kind, name, help): (&str, &str, &str),
        all: &[(String, Shown)],
        value: impl Fn(&Shown) -> Option<T>,
    ) {
        self.family(kind, name, help);
        for (subscription, shown) in all {
            if let Some(value) = value(shown) {
                self.sample(name, &[("subscription", subscription)], value);
            }
        }
    }

    /// A family with several samples per subscription, by another label.
    fn by<L: AsRef<str>, T: Display>(
        &mut self,
        (kind, name, help): (&str, &str, &str),
        label: &str,
        all: &[(String, Shown)],
        values: impl Fn(&Shown) -> Vec<(L, T)>,
    ) {
        self.family(kind, name, help);
        for (subscription, shown) in all {
            for (text, value) in values(shown) {
                self.sample(name, &[("subscription", subscription), (label, text.as_ref())], value);
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// All metrics of the process.
pub(crate) fn text(all: &[(String, Shown)], started: f64) -> String {
    let mut writer = Writer::default();
    writer.family(GAUGE, "info", "Version of pgapace.");
    writer.sample("info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    writer.family(GAUGE, "start_time_seconds", "Start of the process, in seconds since 1970.");
    writer.sample("start_time_seconds", &[], started);
    state(&mut writer, all);
    stages(&mut writer, all);
    work(&mut writer, all);
    servers(&mut writer, all);
    verified(&mut writer, all);
    writer.0
}

fn state(writer: &mut Writer, all: &[(String, Shown)]) {
    let phase = (GAUGE, "phase", "1 for the phase in which the subscription is.");
    writer.by(phase, "phase", all, |shown| {
        RunPhase::ALL.iter().map(|p| (p.name(), u8::from(*p == shown.phase))).collect()
    });
    let error = "When the last error occurred, in seconds since 1970; 0 without one.";
    writer.each((GAUGE, "last_error_timestamp_seconds", error), all, |shown| {
        Some(shown.error.as_ref().map_or(0.0, |error| error.at))
    });
    let at = "When the figures were made, in seconds since 1970.";
    writer.each((GAUGE, "figures_timestamp_seconds", at), all, |shown| Some(shown.figures.at));
    let tables = (GAUGE, "tables", "Tables by state of their synchronization.");
    writer.by(tables, "state", all, |shown| {
        shown.tables.as_ref().map_or_else(Vec::new, |tables| tables.by_state.clone())
    });
    let stale = "Tables that may lack changes, whatever their state.";
    writer.each((GAUGE, "stale_tables", stale), all, |shown| Some(shown.tables.as_ref()?.stale));
    let retries =
        "Groups and runs that were tried again after an error; sqlstate is none without one.";
    writer.by((COUNTER, "retries_total", retries), "sqlstate", all, |shown| {
        shown.retries.iter().map(|(sqlstate, count)| (sqlstate.clone(), *count)).collect()
    });
}

fn stages(writer: &mut Writer, all: &[(String, Shown)]) {
    let bytes = (GAUGE, "lag_bytes", "WAL of the publisher that the stage has not reached.");
    writer.by(bytes, "stage", all, |shown| {
        let stages = streaming(shown).flat_map(|shown| &shown.figures.stages);
        stages.filter_map(|stage| Some((stage.stage.clone(), stage.lag_bytes?))).collect()
    });
    let seconds =
        (GAUGE, "lag_seconds", "Age of the oldest change that the stage has not reached.");
    writer.by(seconds, "stage", all, |shown| {
        let stages = streaming(shown).flat_map(|shown| &shown.figures.stages);
        stages.filter_map(|stage| Some((stage.stage.clone(), stage.lag_seconds?))).collect()
    });
    let estimate = "Estimate until the lag is zero; absent while it does not shrink.";
    writer.each((GAUGE, "lag_zero_estimate_seconds", estimate), all, |shown| {
        streaming(shown).next()?.figures.seconds_to_zero
    });
}

/// The board, if its figures are those of now.
fn streaming(shown: &Shown) -> impl Iterator<Item = &Shown> {
    Some(shown).filter(|shown| shown.phase == RunPhase::Streaming).into_iter()
}

fn work(writer: &mut Writer, all: &[(String, Shown)]) {
    let received = "Bytes received from the publisher.";
    writer.each((COUNTER, "received_bytes_total", received), all, |s| Some(s.received_bytes));
    let transactions = "Transactions of the publisher that were committed on the subscriber.";
    writer.each((COUNTER, "transactions_total", transactions), all, |s| {
        Some(s.counters.transactions)
    });
    let rows = (COUNTER, "rows_total", "Changes that were committed on the subscriber.");
    writer.by(rows, "operation", all, |shown| {
        let c = &shown.counters;
        let operations = ["insert", "update", "delete", "truncate"];
        operations.into_iter().zip([c.inserts, c.updates, c.deletes, c.truncates]).collect()
    });
    let groups = "Apply groups, each one transaction of the subscriber.";
    writer.each((COUNTER, "groups_total", groups), all, |s| Some(s.counters.groups));
    let dependent = "Apply groups with changes that waited for earlier groups.";
    writer.each((COUNTER, "dependent_groups_total", dependent), all, |s| {
        Some(s.counters.groups_dependent)
    });
    let fallbacks =
        "Apply groups that were rolled back and applied one transaction after the other.";
    writer.each((COUNTER, "fallbacks_total", fallbacks), all, |s| Some(s.counters.fallbacks));
    let victims = "Apply groups that were rolled back because the oldest waited for their locks.";
    writer.each((COUNTER, "victims_total", victims), all, |s| Some(s.counters.victims));
    let serialized = "How often a table was serialized for a while.";
    writer.each((COUNTER, "tables_serialized_total", serialized), all, |s| {
        Some(s.counters.tables_serialized)
    });
    let skipped = "Transactions that were skipped with pgapace skip.";
    writer.each((COUNTER, "transactions_skipped_total", skipped), all, |s| {
        Some(s.counters.transactions_skipped)
    });
    let conflicts = (COUNTER, "conflicts_total", "Conflicts by type.");
    writer.by(conflicts, "type", all, |shown| {
        let counted = shown.counters.conflicts();
        let count = |name: &str| {
            counted.iter().find(|(known, _)| *known == name).map_or(0, |(_, count)| *count)
        };
        ConflictType::ALL.iter().map(|kind| (kind.name(), count(kind.name()))).collect()
    });
    let waits = "Time spent waiting, by reason: the sum over all threads.";
    writer.by((COUNTER, "wait_seconds_total", waits), "reason", all, |shown| {
        let named = shown.counters.waits.named().into_iter();
        named.map(|(reason, time)| (reason, time.as_secs_f64())).collect()
    });
}

fn servers(writer: &mut Writer, all: &[(String, Shown)]) {
    let slot = |shown: &Shown| match &shown.copy {
        Some(copy) if shown.phase == RunPhase::Copying => copy.slot.clone(),
        _ if shown.phase == RunPhase::Retrying => shown.slot.as_deref().cloned(),
        _ => streaming(shown).next()?.figures.slot.clone(),
    };
    let retained = "WAL that the slot retains on the publisher.";
    writer.each((GAUGE, "slot_retained_bytes", retained), all, |s| slot(s)?.retained_bytes);
    let safe = "WAL that can still be written before the slot is lost; absent without a limit.";
    writer.each((GAUGE, "slot_safe_bytes", safe), all, |s| slot(s)?.safe_wal_size);
    let lost = "Time until the slot is lost at the present rate, 0 if its limit is reached; absent if it is not.";
    writer.each((GAUGE, "slot_lost_seconds", lost), all, |s| slot(s)?.lost_in_seconds);
    let workers = "Apply workers that are there.";
    writer.each((GAUGE, "apply_workers", workers), all, |s| {
        Some(streaming(s).next()?.figures.workers.len())
    });
    let blockers =
        "Sessions of others that the oldest transaction, or the copy of a table, waits for.";
    writer.each((GAUGE, "blocking_sessions", blockers), all, |s| {
        Some(streaming(s).next()?.figures.blockers.len())
    });
    let spool = "Bytes in the spool.";
    writer.each((GAUGE, "spool_bytes", spool), all, |s| {
        Some(streaming(s).next()?.figures.spool_bytes)
    });
    let memory = "Bytes that are received and not yet applied.";
    writer.each((GAUGE, "memory_bytes", memory), all, |s| {
        Some(streaming(s).next()?.figures.memory_bytes)
    });
    let limit = "The limit of these bytes: --memory-limit.";
    writer.each((GAUGE, "memory_limit_bytes", limit), all, |s| {
        streaming(s).next().map(|s| s.figures.memory_limit)
    });
}

/// Metrics of `pgapace verify` and of verifications in the background: of the last complete one of each
/// table.
fn verified(writer: &mut Writer, all: &[(String, Shown)]) {
    let summary = |shown: &Shown| shown.verified.clone();
    let lsn =
        "Lowest LSN at which a table was compared, as a number; absent while a table was not.";
    writer.each((GAUGE, "verified_lsn", lsn), all, |s| Some(summary(s)?.lsn?.as_u64()));
    let at = "When the oldest last verification of a table ended, in seconds since 1970.";
    writer.each((GAUGE, "verified_timestamp_seconds", at), all, |s| summary(s)?.oldest_at);
    let last = "When the last verification of a table ended, in seconds since 1970.";
    writer
        .each((GAUGE, "verification_last_timestamp_seconds", last), all, |s| summary(s)?.newest_at);
    let tables = "Tables by the result of their last verification; equal_in_part: some columns were not compared.";
    let tables = (GAUGE, "verified_tables", tables);
    writer.by(tables, "result", all, |shown| {
        summary(shown).map_or_else(Vec::new, |s| {
            let results = [
                ("equal", s.tables_equal),
                ("equal_in_part", s.tables_equal_in_part),
                ("different", s.tables_different),
                ("unverified", s.tables_unverified),
            ];
            results.to_vec()
        })
    });
    let differences = "Rows that differed in the last verification of their table.";
    writer.by((GAUGE, "verification_differences", differences), "kind", all, |shown| {
        summary(shown).map_or_else(Vec::new, |s| {
            let kinds = ["missing", "extra", "different"];
            kinds.into_iter().zip([s.missing, s.extra, s.different]).collect()
        })
    });
    let rows = "Rows of the publisher that were compared in the background (--verify-interval).";
    writer.each((COUNTER, "verification_rows_total", rows), all, |s| Some(s.verified_rows));
    let bytes = "The same in bytes of their text.";
    writer.each((COUNTER, "verification_bytes_total", bytes), all, |s| Some(s.verified_bytes));
}

/// Names of all metrics, for tests of the files in contrib/.
#[cfg(test)]
fn names() -> Vec<String> {
    let text = text(&[], 0.0);
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::{names, text};
    use crate::error::{Class, Failure};
    use crate::observe::board::{Boards, Posted, RunPhase, TableCounts};
    use crate::observe::figures::Figures;
    use crate::subscriber::state::statistics::{Counters, ErrorsOver};
    use crate::subscriber::state::verification::summary::VerificationSummary;
    use pgoutput::Lsn;

    /// Every word of a file that looks like a metric.
    fn metrics_in(file: &str) -> BTreeSet<String> {
        let words = file.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.filter(|word| word.starts_with("pgapace_")).map(str::to_owned).collect()
    }

    #[test]
    fn dashboard_and_alerts_use_metrics_that_exist() {
        let names: BTreeSet<_> = names().into_iter().collect();
        assert!(names.len() > 20);
        let files = [
            include_str!("../../../../contrib/grafana-dashboard.json"),
            include_str!("../../../../contrib/prometheus-alerts.yml"),
        ];
        for file in files {
            let used = metrics_in(file);
            assert!(used.len() > 5, "{used:?}");
            let unknown: Vec<_> = used.difference(&names).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
        let dashboard: serde_json::Value = serde_json::from_str(files[0]).expect("JSON");
        assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() > 5));
    }

    #[test]
    fn the_book_names_metrics_that_exist() {
        // A pattern, a package, a publication and two roles.
        let others =
            ["pgapace_", "pgapace_0", "pgapace_back", "pgapace_publisher", "pgapace_subscriber"];
        let names: BTreeSet<_> = names().into_iter().chain(others.map(str::to_owned)).collect();
        let book = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
        let mut directories = vec![std::path::PathBuf::from(book)];
        let mut seen = 0;
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("the book") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    let used = metrics_in(&std::fs::read_to_string(&path).expect("a page"));
                    let unknown: Vec<_> = used.difference(&names).collect();
                    assert!(unknown.is_empty(), "{}: {unknown:?}", path.display());
                    seen += used.len();
                }
            }
        }
        assert!(seen > 20, "{seen}");
    }

    /// Prometheus takes a rule with labels that match nothing for a rule about nothing.
    #[test]
    fn alerts_compare_series_that_can_match() {
        let rules = include_str!("../../../../contrib/prometheus-alerts.yml");
        let of = |alert: &str| {
            let rule = rules.split("- alert: ").find(|rule| rule.lines().next() == Some(alert));
            let rule = rule.unwrap_or_else(|| panic!("no rule {alert}"));
            rule.lines().find_map(|line| line.trim().strip_prefix("expr: ")).expect("an expr")
        };
        // A process that waits (--standby) is healthy, as long as another one applies.
        assert!(of("PgapaceNotStreaming").contains(r#"phase=~"streaming|copying|standby""#));
        assert!(of("PgapaceNoProcess").starts_with("max by (environment, subscription)"));
        assert!(!of("PgapaceNoProcess").contains("standby"));
        for phase in ["streaming", "copying", "standby"] {
            assert!(RunPhase::ALL.iter().any(|known| known.name() == phase), "{phase}");
        }
        assert!(of("PgapaceTableBlocked").contains("or pgapace_stale_tables > 0"));
    }

    #[test]
    fn stale_tables_are_counted_whatever_their_state() {
        let boards = Boards::default();
        let by_state = vec![("ready".to_owned(), 3)];
        boards.of("shop").set_tables(TableCounts { by_state, stale: 2 });
        let text = text(&boards.all(), 1.5);
        for line in [
            "pgapace_tables{subscription=\"shop\",state=\"ready\"} 3",
            "pgapace_stale_tables{subscription=\"shop\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
    }

    /// Another process shows them then.
    #[test]
    fn nothing_of_the_tables_is_left_when_the_process_has_lost_the_subscription() {
        let boards = Boards::default();
        let board = boards.of("shop");
        let by_state = vec![("blocked".to_owned(), 1)];
        let tables = TableCounts { by_state, stale: 2 };
        let verified = VerificationSummary { missing: 3, ..VerificationSummary::default() };
        let figures = Figures { at: 1.0, spool_bytes: 4, memory_bytes: 5, ..Figures::default() };
        let posted = || Posted {
            figures: figures.clone(),
            counters: Counters { transactions: 7, ..Counters::default() },
            received_bytes: 0,
            retries: Default::default(),
            applied: Lsn(8),
            over: ErrorsOver::All,
        };
        let shows = || {
            let text = text(&boards.all(), 1.5);
            let lines = text.lines().filter(|line| line.starts_with("pgapace_"));
            let gauges = ["tables{", "stale_tables", "verification_differ", "spool", "memory_b"];
            let of = |line: &str| gauges.iter().any(|gauge| line[8..].starts_with(gauge));
            lines.filter(|line| of(line)).count()
        };
        board.enters(RunPhase::Streaming);
        board.post(posted());
        board.set_tables(tables.clone());
        board.set_verified(verified.clone());
        assert_eq!(shows(), 7);
        board.enters(RunPhase::Standby);
        assert_eq!(shows(), 0);
        // Background threads may be late.
        board.set_tables(tables.clone());
        board.set_verified(verified.clone());
        assert_eq!(shows(), 0);
        let line = "pgapace_transactions_total{subscription=\"shop\"} 7";
        assert!(text(&boards.all(), 1.5).contains(line), "counters stay");
        board.enters(RunPhase::Starting);
        board.set_tables(tables);
        assert_eq!(shows(), 2);
        board.failed(&Failure::new(Class::Apply, "it cannot be applied"), None);
        assert_eq!(shows(), 0);
    }

    #[test]
    fn a_retry_after_a_lost_connection_is_counted() {
        let boards = Boards::default();
        let lost = Failure::new(Class::Publisher, "the connection was lost");
        boards.of("shop").failed(&lost, Some(Duration::from_secs(1)));
        let line = "pgapace_retries_total{subscription=\"shop\",sqlstate=\"none\"} 1";
        assert!(text(&boards.all(), 1.5).lines().any(|found| found == line));
        boards.of("shop").failed(&lost, None);
        assert!(text(&boards.all(), 1.5).contains(line), "the last failure is no retry");
    }

    #[test]
    fn labels_are_escaped() {
        let boards = Boards::default();
        boards.of("a\"b\\c\nd");
        let text = text(&boards.all(), 1.5);
        let line = text.lines().find(|line| line.starts_with("pgapace_transactions_total{"));
        assert_eq!(line, Some("pgapace_transactions_total{subscription=\"a\\\"b\\\\c\\nd\"} 0"));
    }
}
