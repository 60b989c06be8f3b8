//! `pgapace check`.

use clap::Args;

use crate::error::{Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {}

pub(crate) fn run(_args: &CheckArgs) -> Result<()> {
    Err(Failure::internal("not yet"))
}
