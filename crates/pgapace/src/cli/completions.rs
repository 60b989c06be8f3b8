//! `pgapace completions`: the completion script of a shell.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::{Cli, output};

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes the script.
pub(crate) fn run(args: &CompletionsArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pgapace", &mut script);
    output::text(&String::from_utf8_lossy(&script));
}
