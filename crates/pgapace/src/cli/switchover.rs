//! `pgapace switchover`: moves writes from the publisher to the subscriber.

use std::time::Duration;

use clap::Args;

use crate::cli::{Selection, output};
use crate::config::check_name;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state;
use crate::switchover::{self, Request};

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("action").required(true))]
pub(crate) struct SwitchoverArgs {
    #[command(flatten)]
    selection: Selection,

    /// Check everything, and change nothing
    #[arg(long, group = "action")]
    plan: bool,

    /// Switch over
    #[arg(long, group = "action")]
    go: bool,

    /// Undo an interrupted switchover
    #[arg(long, group = "action")]
    abort: bool,

    /// Longest time in seconds for which nobody can write. After it everything is undone
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    deadline: u64,

    /// Shell command that stops writes, instead of a read-only database and the end of its sessions
    #[arg(long, value_name = "COMMAND")]
    stop_writes: Option<String>,

    /// Shell command that undoes --stop-writes
    #[arg(long, value_name = "COMMAND")]
    resume_writes: Option<String>,

    /// Shell command that leads applications to the new side. It may be run again
    #[arg(long, value_name = "COMMAND")]
    open: Option<String>,

    /// Values of each sequence to skip
    #[arg(long, value_name = "VALUES", default_value_t = 0)]
    margin: u64,

    /// Name of the subscription and slot of the way back [default: --name with _back]
    #[arg(long, value_name = "NAME")]
    back_name: Option<String>,

    /// Publication of the subscriber for the way back
    #[arg(long, value_name = "NAME", default_value = "pgapace_back")]
    back_publication: String,

    /// Switch over without a way back
    #[arg(long, conflicts_with_all = ["back_name", "back_publication"])]
    no_back: bool,
}

pub(crate) fn run(args: &SwitchoverArgs) -> Result<()> {
    let (name, site) = args.selection.one_by_name()?;
    let info = site
        .publisher
        .clone()
        .ok_or_else(|| Failure::new(Class::Config, "--publisher is not given"))?;
    let back = args.back_name.clone().unwrap_or_else(|| format!("{name}_back"));
    check_name(&back, "back-name")?;
    let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
    let mut control = subscriber.connect_first()?;
    let row = state::find_in_any(&mut control, &name)?.ok_or_else(|| {
        Failure::new(Class::Config, format!("the subscriber has no subscription {name:?}"))
    })?;
    let mut source = Publisher::new(info, &name, subscriber.encoding()).connect_to_look()?;
    if args.abort {
        let aborted = switchover::abort(&mut control, &mut source, &row)?;
        output::line(if aborted {
            "the switchover was undone: the publisher takes writes"
        } else {
            "no switchover was begun"
        });
        return Ok(());
    }
    let request = Request {
        stop_writes: args.stop_writes.as_deref(),
        resume_writes: args.resume_writes.as_deref(),
        open: args.open.as_deref(),
        back: (!args.no_back).then_some(back.as_str()),
        back_publication: &args.back_publication,
        deadline: Duration::from_secs(args.deadline),
        margin: args.margin,
    };
    if args.plan {
        return plan(&switchover::plan(&mut control, &mut source, &row, &request)?, &name);
    }
    let done = switchover::go(&mut control, &mut source, &row, &request)?;
    output::line(&format!("subscription {name} was switched over at {}", done.fence));
    if let Some(outage) = done.outage {
        output::line(&format!("  nobody could write for {} ms", outage.as_millis()));
    }
    if request.back.is_some() {
        output::line(&format!(
            "way back: pgapace run --publisher (the new side) --subscriber (the old side) --name {back} \
             --publication {} --create-slot=false --copy-data=false",
            args.back_publication
        ));
    }
    Ok(())
}

fn plan(problems: &[String], name: &str) -> Result<()> {
    if problems.is_empty() {
        output::line(&format!("subscription {name} can be switched over"));
        return Ok(());
    }
    Err(Failure::new(Class::Config, format!("{name} cannot be switched over"))
        .detail(problems.join("\n         ")))
}
