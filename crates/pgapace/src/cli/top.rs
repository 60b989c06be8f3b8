//! `pgapace top`: the present activity of subscriptions, on a terminal.

use std::time::Duration;

use clap::Args;

use crate::cli::Selection;
use crate::cli::time::time;
use crate::error::Result;
use crate::top;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print one frame of each subscription as text, and end
    #[arg(long)]
    once: bool,

    /// With --once: columns and rows of a frame
    #[arg(long, value_name = "COLUMNSxROWS", default_value = "80x24", value_parser = parse_size)]
    size: (u16, u16),

    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time(1..=30))]
    interval: Duration,
}

fn parse_size(text: &str) -> std::result::Result<(u16, u16), String> {
    let (columns, rows) = text.split_once('x').ok_or("a size looks like 80x24")?;
    let number = |text: &str, least: u16| match text.parse::<u16>() {
        Ok(number) if (least..=1000).contains(&number) => Ok(number),
        _ => Err(format!("{text:?} is no number from {least} to 1000")),
    };
    Ok((number(columns, 40)?, number(rows, 16)?))
}

pub(crate) fn run(args: &TopArgs) -> Result<()> {
    let sites = args.selection.subscriber_only()?;
    if args.once {
        return top::once(sites, args.size);
    }
    top::run(sites, args.interval)
}
