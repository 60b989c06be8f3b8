//! `pgapace completions`: the completion script of a shell.

use clap::Args;
use clap_complete::Shell;

use crate::cli::{command, output};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell that reads the script
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes the script.
pub(crate) fn run(args: &CompletionsArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "pgapace", &mut script);
    output::text(&String::from_utf8_lossy(&script));
}
