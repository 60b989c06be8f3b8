//! `pgapace report`: one HTML file about subscriptions, to attach to a ticket.

use std::fs::{OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::status::collect::StatusReader;
use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::report;

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    selection: Selection,

    /// Time that the curves show
    #[arg(long, value_name = "MINUTES", default_value = "1440",
        value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: u64,

    /// The file to write; - is standard output
    #[arg(value_name = "FILE", default_value = "pgapace-report.html")]
    pub(super) file: PathBuf,
}

pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let sites = args.selection.subscriber_only()?;
    let mut readers: Vec<_> = sites.into_iter().map(StatusReader::new).collect();
    let report = report::make(&mut readers, args.minutes)?;
    if args.file.as_os_str() == "-" {
        output::text(&report);
        return Ok(());
    }
    let shown = args.file.display();
    write(&args.file, &report)
        .map_err(|error| Failure::new(Class::Config, format!("cannot write {shown}: {error}")))?;
    output::line(&format!("{shown} is written"));
    Ok(())
}

/// Only the owner may read the file, also if it was there: the report quotes rows, in error texts and in queries of sessions
/// that block.
fn write(path: &Path, report: &str) -> io::Result<()> {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    let metadata = file.metadata()?;
    // A device or pipe is not the report's own.
    if metadata.is_file() && metadata.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    file.write_all(report.as_bytes())
}
