//! `pgapace demo`.

use clap::Args;

use crate::error::{Failure, Result};

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {}

pub(crate) fn run(_args: &DemoArgs) -> Result<()> {
    Err(Failure::internal("not yet"))
}
