//! The result table on the terminal.

use crate::outcome::{Outcome, Runner};

/// Prints the head of the table.
pub(crate) fn print_head(outcome: &Outcome) {
    println!(
        "PostgreSQL {}, regime {}, scale {}, {}, {}",
        outcome.server_version,
        outcome.regime,
        outcome.scale,
        outcome.program_version,
        outcome.machine
    );
    println!(
        "{:<22} {:>12} {:>12} {:>12} {:<7} {:>9} {:>9}  parity",
        "", "raw", "native", "pgapace", "", "x native", "x raw"
    );
}

/// Prints one line and its notes.
pub(crate) fn print_line(outcome: &Outcome) {
    let value = |value: Option<f64>, runner| {
        let mark = if outcome.is_projected(runner) { "~" } else { "" };
        value.map_or("-".into(), |value| format!("{mark}{}", figure(value)))
    };
    println!(
        "{:<22} {:>12} {:>12} {:>12} {:<7} {:>9} {:>9}  {}",
        outcome.workload,
        value(outcome.raw, Runner::Receiver),
        value(outcome.native, Runner::Native),
        value(outcome.pgapace, Runner::Pgapace),
        outcome.unit,
        ratio(outcome.ratio_native),
        ratio(outcome.ratio_raw),
        parity(outcome.parity)
    );
    if let Some(microseconds) = outcome.client_us_per_change {
        println!("    client us per change: {microseconds:.2}");
    }
    for note in &outcome.notes {
        println!("    {note}");
    }
}

/// Prints the duration of each workload and of its phases.
pub(crate) fn print_times(outcomes: &[Outcome]) {
    let total: f64 = outcomes.iter().map(|outcome| outcome.seconds).sum();
    println!("seconds: {total:.0}");
    for outcome in outcomes.iter().filter(|outcome| outcome.seconds > 0.0) {
        let phases: Vec<_> =
            outcome.phases.iter().map(|(name, seconds)| format!("{name} {seconds:.1}")).collect();
        println!("{:<22} {:>8.1}   {}", outcome.workload, outcome.seconds, phases.join(", "));
    }
}

/// Whether the tables were equal, in one word.
pub(crate) fn parity(parity: Option<bool>) -> &'static str {
    match parity {
        Some(true) => "equal",
        Some(false) => "DIFFERS",
        None => "-",
    }
}

/// Formats a number with enough digits for comparison.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

pub(crate) fn ratio(value: Option<f64>) -> String {
    value.map_or("-".into(), |ratio| format!("{ratio:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_enough_digits() {
        assert_eq!(figure(12345.6), "12346");
        assert_eq!(figure(123.45), "123.5");
        assert_eq!(figure(0.1234), "0.123");
        assert_eq!(ratio(None), "-");
        assert_eq!(ratio(Some(2.005)), "2.00");
    }
}
