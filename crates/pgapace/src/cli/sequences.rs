//! `pgapace sequences`: gives the target's sequences the publisher's values.

use clap::Args;

use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication;
use crate::publisher::session::Publisher;
use crate::sync::sequences;
use crate::target::session::Target;

#[derive(Debug, Args)]
pub(crate) struct SequencesArgs {
    #[command(flatten)]
    selection: Selection,
}

/// Sets what can be set; what cannot is a failure, after the rest.
pub(crate) fn run(args: &SequencesArgs) -> Result<()> {
    let mut skipped = Vec::new();
    for config in args.selection.subscriptions()? {
        let mut target = Target::new(config.target.clone(), &config.name);
        let mut control = target.connect_first()?;
        let publisher = Publisher::new(config.publisher.clone(), &config.name, target.encoding());
        let mut source = publisher.connect_to_look()?;
        publication::check_exist(&mut source, &config.publications)?;
        let tables = publication::tables(&mut source, &config.publications)?;
        let report = sequences::synchronize(&mut source, &mut control, &tables)?;
        output::line(&format!("{}: {} sequences set", config.name, report.set));
        let reasons = report.skipped.iter().map(|(name, reason)| format!("{name}: {reason}"));
        skipped.extend(reasons);
    }
    if skipped.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Mismatch,
        format!("sequences that could not be set: {}", skipped.join("; ")),
    ))
}
