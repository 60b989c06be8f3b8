//! `pgapace status`.

use clap::Args;

use crate::error::{Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {}

pub(crate) fn run(_args: &StatusArgs) -> Result<()> {
    Err(Failure::internal("not yet"))
}
