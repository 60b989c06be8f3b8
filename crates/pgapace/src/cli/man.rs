//! `pgapace man`: manual pages, of the program and of each verb.

use clap::Args;
use clap_mangen::Man;

use crate::cli::{command, output};
use crate::error::{Class, Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Verb of the page; without one, the page of pgapace itself
    verb: Option<String>,
}

/// Writes one page.
pub(crate) fn run(args: &ManArgs) -> Result<()> {
    let mut page = command();
    page.build();
    if let Some(verb) = &args.verb {
        page = page.find_subcommand(verb).cloned().ok_or_else(|| {
            Failure::new(Class::Config, format!("there is no verb {verb}"))
                .hint("pgapace --help lists the verbs.")
        })?;
    }
    let mut text = Vec::new();
    Man::new(page)
        .render(&mut text)
        .map_err(|e| Failure::internal(format!("cannot write a manual page: {e}")))?;
    output::text(&String::from_utf8_lossy(&text));
    Ok(())
}
