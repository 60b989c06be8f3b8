//! `pgapace man`: manual pages, of the program and of each verb.

use clap::Args;
use clap_mangen::Man;

use crate::cli::{command, output};
use crate::error::{Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Verb of the page; without one, the page of pgapace itself
    #[arg(value_parser = known_verb)]
    verb: Option<String>,
}

/// Refuses an unknown verb as any other wrong argument.
fn known_verb(verb: &str) -> std::result::Result<String, String> {
    let mut page = command();
    page.build();
    let known = page.find_subcommand(verb).map(|_| verb.to_owned());
    known.ok_or_else(|| "there is no such verb; pgapace --help lists them".to_owned())
}

/// Writes one page.
pub(crate) fn run(args: &ManArgs) -> Result<()> {
    let mut page = command();
    page.build();
    if let Some(verb) = &args.verb {
        page = page
            .find_subcommand(verb)
            .cloned()
            .ok_or_else(|| Failure::internal(format!("verb {verb} has no page")))?;
    }
    let mut text = Vec::new();
    Man::new(page)
        .render(&mut text)
        .map_err(|e| Failure::internal(format!("cannot write a manual page: {e}")))?;
    output::text(&String::from_utf8_lossy(&text));
    Ok(())
}
