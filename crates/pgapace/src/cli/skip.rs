//! `pgapace skip`: skips one transaction of the publisher.

use clap::Args;
use pgoutput::Lsn;

use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::{self, progress, statistics};
use crate::switchover;

#[derive(Debug, Args)]
pub(crate) struct SkipArgs {
    #[command(flatten)]
    selection: Selection,

    /// Commit LSN of the transaction, or the LSN of its PREPARE, as in the error message; none cancels an earlier request
    #[arg(long, value_name = "LSN|none", value_parser = parse)]
    lsn: Skip,
}

#[derive(Debug, Clone, Copy)]
struct Skip(Option<Lsn>);

fn parse(text: &str) -> std::result::Result<Skip, String> {
    if text == "none" {
        return Ok(Skip(None));
    }
    let lsn = text.parse::<Lsn>().map_err(|e| format!("{e}; an LSN looks like 16/B374D848"))?;
    Ok(Skip(Some(lsn)))
}

pub(crate) fn run(args: &SkipArgs) -> Result<()> {
    let (mut control, row) = args.selection.existing()?;
    switchover::refuse_ended(&mut control, &row)?;
    let Skip(lsn) = args.lsn;
    if let Some(lsn) = lsn
        && let Some(applied) = progress::read(&mut control, row.id)?
        && lsn < applied.with_held(applied.through)
    {
        return Err(Failure::new(
            Class::Config,
            format!(
                "the transaction with LSN {lsn} cannot be skipped: {} is applied",
                applied.through
            ),
        )
        .hint("The error message and pgapace status have the LSN of the one that failed."));
    }
    state::set_skip(&mut control, row.id, lsn)?;
    if let Some(lsn) = lsn
        && let Some(failed) = statistics::failed_transaction(&mut control, row.id)?
        && failed != lsn
    {
        output::remark(&format!(
            "pgapace: warning: the last error of subscription {} is of another transaction, with LSN {failed}",
            row.name
        ));
    }
    output::line(&match lsn {
        Some(lsn) => format!(
            "subscription {} skips the transaction with LSN {lsn} after its next start",
            row.name
        ),
        None => format!("subscription {} skips nothing", row.name),
    });
    Ok(())
}
