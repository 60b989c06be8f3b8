//! Environment variables of flags that are not settings, read as those of settings are: an empty one is not given, and
//! a boolean has the spellings of postgresql.conf.

use clap::builder::Resettable;
use clap::{Arg, ArgAction, Command};

use crate::config::setting::boolean;

/// The command line without the variables that give nothing, so that no flag conflicts with them.
pub(super) fn without_empty(command: Command) -> Command {
    command
        .mut_args(|arg| if gives_nothing(&arg) { arg.env(Resettable::Reset) } else { arg })
        .mut_subcommands(without_empty)
}

fn gives_nothing(arg: &Arg) -> bool {
    let Some(value) = arg.get_env().and_then(std::env::var_os) else { return false };
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    value.is_empty() || is_flag && value.to_str().is_some_and(|text| boolean(text) == Ok(false))
}
