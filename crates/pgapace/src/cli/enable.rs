//! `pgapace enable`: enables a subscription that was disabled because of an error.

use clap::Args;

use crate::cli::{Selection, output};
use crate::error::Result;
use crate::subscriber::state;

#[derive(Debug, Args)]
pub(crate) struct EnableArgs {
    #[command(flatten)]
    selection: Selection,
}

pub(crate) fn run(args: &EnableArgs) -> Result<()> {
    let (mut control, row) = args.selection.existing()?;
    state::set_disabled(&mut control, row.id, None)?;
    output::line(&match row.disabled {
        Some(_) => format!("enabled subscription {}", row.name),
        None => format!("subscription {} was not disabled", row.name),
    });
    Ok(())
}
