//! `pgapace switchover`: moves writes from the publisher to the subscriber, and back.

mod lag;

use std::time::{Duration, Instant};

use clap::Args;
use wire::Session;

use crate::cli::status::health::MaxLag;
use crate::cli::table_name::split;
use crate::cli::time::{LONGEST, time};
use crate::cli::{Selection, output};
use crate::config::{Site, Subscription as Config, check_name};
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::ownership::{self, OwnerProcess};
use crate::subscriber::state::{self, Subscription};
use crate::switchover::back::{self, Returned};
use crate::switchover::way_back::WayBack;
use crate::switchover::{self, CHECKS, Findings, Request, Sides, Writes};
use lag::LagBound;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("action").required(true))]
pub(crate) struct SwitchoverArgs {
    #[command(flatten)]
    selection: Selection,

    /// Check everything, and change nothing
    #[arg(long, group = "action")]
    pub(super) plan: bool,

    /// Switch over
    #[arg(long, group = "action")]
    go: bool,

    /// Move writes back to the publisher, after a switchover
    #[arg(long, group = "action")]
    back: bool,

    /// Undo an interrupted switchover
    #[arg(long, group = "action")]
    abort: bool,

    /// Maximum time without writes on either side. After it everything is undone
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time(0..=LONGEST))]
    deadline: Duration,

    /// Wait until the lag is no more than this before writes are stopped
    ///
    /// Units are those of PostgreSQL, as for pgapace status --max-lag.
    #[arg(long, value_name = "LAG")]
    max_lag: Option<MaxLag>,

    /// Time during which the lag must be no more than --max-lag
    #[arg(long, value_name = "TIME", default_value = "10s", requires = "max_lag", value_parser = time(0..=LONGEST))]
    lag_for: Duration,

    /// Maximum time to wait for that
    #[arg(long, value_name = "TIME", default_value = "10min", requires = "max_lag", value_parser = time(0..=LONGEST))]
    lag_timeout: Duration,

    /// Shell command that stops writes, instead of a read-only database and the end of its sessions
    #[arg(long, value_name = "COMMAND", value_parser = command)]
    stop_writes: Option<String>,

    /// Shell command that undoes --stop-writes
    #[arg(long, value_name = "COMMAND", value_parser = command)]
    resume_writes: Option<String>,

    /// Shell command that leads applications to the new side. It may be run again
    #[arg(long, value_name = "COMMAND", value_parser = command)]
    open: Option<String>,

    /// Compare this table while writes are stopped, and undo everything if rows differ; repeat it
    ///
    /// all stands for all published tables. Clients cannot write during the comparison.
    #[arg(long, value_name = "TABLE|all")]
    verify: Vec<String>,

    /// Maximum age of a pgapace verify that found all tables equal, such as 1d
    #[arg(long, value_name = "AGE", value_parser = age)]
    verified_within: Option<Duration>,

    /// Values of each sequence to skip
    #[arg(long, value_name = "VALUES", default_value_t = 0)]
    margin: u64,

    /// Do not look whether roles and privileges of the publisher exist on the subscriber
    #[arg(long)]
    ignore_roles: bool,

    /// Other subscriptions between the same databases end later, while applications stay stopped
    #[arg(long)]
    with_others: bool,

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

/// A shell command. An unset variable of a script gives none, which would do nothing and succeed.
fn command(text: &str) -> std::result::Result<String, String> {
    match text.trim().is_empty() {
        true => Err("the command is empty".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn age(text: &str) -> std::result::Result<Duration, String> {
    match text.parse()? {
        MaxLag::Seconds(seconds) => {
            Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
        }
        MaxLag::Bytes(_) => Err("give a unit of time: ms, s, min, h, d".to_owned()),
    }
}

/// The log line of a second signal: it holds in every step of the verb.
const LEFT: &str = "the second signal ends the process; pgapace switchover --abort undoes what was begun, or says that \
                    nothing can be undone: then the same command again finishes it";
/// Completes "stopped during …".
const CONNECTING: &str = "connecting";
/// How long the process that stood aside may take to apply the way back.
const WAY_BACK_WITHIN: Duration = Duration::from_secs(10);
/// Between two looks for it.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Sessions on both servers, for one direction.
struct Direction {
    config: Config,
    site: Site,
    subscriber: Subscriber,
    publisher: Publisher,
    control: Session,
    source: Session,
    row: Subscription,
}

impl Direction {
    /// From the publisher to the subscriber, as the user names them.
    fn given(selection: &Selection) -> Result<Self> {
        let (name, site) = selection.one_by_name()?;
        if site.publisher.is_none() {
            return Err(Failure::new(Class::Config, "--publisher is not given")
                .hint("Pass --publisher as for pgapace run, or the same --config."));
        }
        let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
        let mut control = subscriber.connect_first()?;
        let row = state::find_existing(&mut control, &name)?;
        let config = selection.with_recorded(&row)?;
        let publisher = Publisher::new(config.publisher.clone(), &name, subscriber.encoding());
        let source = publisher.connect_to_look()?;
        Ok(Self { config, site, subscriber, publisher, control, source, row })
    }

    /// The other way round, if the way back has begun.
    fn reversed(&self, back: &WayBack, stop: &Shutdown) -> Result<Option<Self>> {
        let config = self.config.reversed(back);
        let site = Site {
            subscriber: config.subscriber.clone(),
            publisher: Some(config.publisher.clone()),
            name: Some(back.name.clone()),
            slot: None,
            busy_timeout: self.site.busy_timeout,
        };
        let back = back.clone();
        abandonable(stop, CONNECTING, move || Self::of_way_back(config, site, &back))?
    }

    fn of_way_back(config: Config, site: Site, back: &WayBack) -> Result<Option<Self>> {
        let mut subscriber = Subscriber::new(config.subscriber.clone(), &back.name);
        let mut control = subscriber.connect_first()?;
        let Some(row) = back::subscription(&mut control, back)? else { return Ok(None) };
        let publisher = Publisher::new(config.publisher.clone(), &back.name, subscriber.encoding());
        let source = publisher.connect_to_look()?;
        Ok(Some(Self { config, site, subscriber, publisher, control, source, row }))
    }

    fn sides<'a>(&'a mut self, stop: &'a Shutdown) -> Sides<'a> {
        Sides {
            stop,
            control: &mut self.control,
            source: &mut self.source,
            row: &self.row,
            config: &self.config,
            publisher: &self.publisher,
            subscriber: &self.subscriber,
        }
    }

    /// Whether the side that takes writes next can send only its own changes.
    fn filters_origins(&self) -> bool {
        self.control.server_version().major() >= 16
    }
}

pub(crate) fn run(args: &SwitchoverArgs) -> Result<()> {
    let stop = Shutdown::on_signals_or_leave(Class::Stopped.exit_code(), LEFT)?;
    let selection = args.selection.clone();
    let mut forward = abandonable(&stop, CONNECTING, move || Direction::given(&selection))??;
    let sessions = forward.sides(&stop).cancel_handles();
    let returned = interruptible(&stop, &sessions, CHECKS, || {
        let returned = back::returned(&mut forward.source, &forward.row.name)?;
        if args.plan || args.go {
            let sessions = (&mut forward.control, &mut forward.source);
            back::check_complete(sessions, &forward.row, returned.as_ref())?;
        }
        Ok(returned)
    })?;
    if args.abort {
        return abort(forward, returned, &stop);
    }
    if args.back {
        return go_back(args, forward, returned, &stop);
    }
    let name = args.back_name.clone().unwrap_or_else(|| format!("{}_back", forward.row.name));
    check_name(&name, "back-name")?;
    let back = (!args.no_back).then(|| WayBack {
        name,
        publications: vec![args.back_publication.clone()],
        origin_none: forward.filters_origins(),
        generation: 0,
    });
    switch(args, forward, back, &stop)
}

/// Moves writes back. The first subscription begins anew, as the way back of the way back.
fn go_back(
    args: &SwitchoverArgs,
    mut forward: Direction,
    returned: Option<Returned>,
    stop: &Shutdown,
) -> Result<()> {
    let sessions = forward.sides(stop).cancel_handles();
    let back = interruptible(stop, &sessions, CHECKS, || {
        switchover::lock(&mut forward.control, &forward.row)?;
        if returned.is_none() {
            switchover::lost::refuse(&mut forward.sides(stop))?;
        }
        back::to_return(&mut forward.control, &forward.row, returned)
    })?;
    let reversed = forward.reversed(&back, stop)?.ok_or_else(|| {
        Failure::new(
            Class::NotRunning,
            format!("the way back, {}, has not begun on the former publisher", back.name),
        )
        .hint(format!(
            "Start pgapace run with the settings of {}: it applies it.",
            forward.row.name
        ))
    })?;
    let again = (!args.no_back).then(|| WayBack {
        name: forward.row.name.clone(),
        publications: forward.row.publications.clone(),
        // It begins anew as it was.
        origin_none: forward.row.filters_origins(),
        generation: 0,
    });
    switch(args, reversed, again, stop)
}

fn switch(
    args: &SwitchoverArgs,
    mut direction: Direction,
    back: Option<WayBack>,
    stop: &Shutdown,
) -> Result<()> {
    let all = args.verify.iter().any(|table| table == "all");
    let tables = || if all { Vec::new() } else { args.verify.iter().map(|t| split(t)).collect() };
    let request = Request {
        stop_writes: args.stop_writes.as_deref(),
        resume_writes: args.resume_writes.as_deref(),
        open: args.open.as_deref(),
        back,
        deadline: args.deadline,
        margin: args.margin,
        verify: (!args.verify.is_empty()).then(tables),
        verified_within: args.verified_within,
        ignore_roles: args.ignore_roles,
        with_others: args.with_others,
        returns: args.back,
    };
    let name = direction.row.name.clone();
    if args.plan {
        let mut sides = direction.sides(stop);
        let sessions = sides.cancel_handles();
        interruptible(stop, &sessions, CHECKS, || switchover::refuse_under_way(&mut sides))?;
        return plan(&switchover::plan(&mut sides, &request)?, &name);
    }
    // One that has ended has no lag any more: only its last steps are left.
    if let Some(most) = args.max_lag
        && !switchover::has_ended(&mut direction.control, &direction.row)?
    {
        let bound = LagBound { most, lasts: args.lag_for, patience: args.lag_timeout };
        bound.wait(&direction.site, &name, stop)?;
    }
    let done = switchover::go(&mut direction.sides(stop), &request)?;
    let already = if done.outage.is_none() { " already" } else { "" };
    output::offer(&format!("subscription {name} was{already} switched over at {}", done.end_lsn));
    if let Some(outage) = done.outage {
        output::offer(&format!("  nobody could write for {} ms", outage.as_millis()));
    }
    let Some(back) = done.back else { return Ok(()) };
    let reversed = direction.config.reversed(&back);
    // The process that stands aside waits for the end of this session.
    drop(direction);
    let name = &back.name;
    let side = if args.back { "new side" } else { "old side" };
    output::offer(&match way_back_owner(&reversed, stop) {
        Ok(Some(owner)) => {
            format!("  the way back, {name}, is applied (backend {} of the {side})", owner.pid)
        }
        Ok(None) | Err(_) if stop.requested() => format!(
            "  pgapace status shows whether the way back, {name}, is applied: stopped before it was"
        ),
        Ok(None) => format!(
            "  nobody applies the way back, {name}: start pgapace run with the same settings as before; its log says why \
             if it has ended"
        ),
        Err(failure) => {
            // The way back calls this side its subscriber.
            let message = failure.message.strip_prefix("subscriber: ").unwrap_or(&failure.message);
            let refuses = if failure.is_refused() { " refuses a session" } else { "" };
            format!(
                "  whether the way back, {name}, is applied is not known: the {side}{refuses}: {message}\n  \
                 pgapace run applies it when the {side} accepts its sessions"
            )
        }
    });
    Ok(())
}

/// Returns the session that applies the way back. The switchover is done, so an old side that is away is no error, and
/// any other failure only says that this is not known. A signal ends the wait.
fn way_back_owner(config: &Config, stop: &Shutdown) -> Result<Option<OwnerProcess>> {
    let subscriber =
        Subscriber::new(config.subscriber.clone(), &config.name).connecting_within(WAY_BACK_WITHIN);
    let deadline = Instant::now() + WAY_BACK_WITHIN;
    let over = || Instant::now() >= deadline || stop.requested();
    loop {
        let owner = subscriber.connect(Purpose::Look).and_then(|mut session| {
            session.set_read_timeout(Some(WAY_BACK_WITHIN));
            wait_for_owner(&mut session, &config.name, &over)
        });
        match owner {
            Err(failure) if failure.is_transient() && !over() => {}
            result => return result,
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn wait_for_owner(
    session: &mut Session,
    name: &str,
    over: &dyn Fn() -> bool,
) -> Result<Option<OwnerProcess>> {
    loop {
        // The process that is waited for creates or upgrades the schema.
        let row = if state::schema::version(session)? < state::schema::newest() {
            None
        } else {
            state::find(session, name)?
        };
        if let Some(row) = row
            && row.phase == state::Phase::Streaming
            && let Some(owner) = ownership::owner(session, row.id)?
        {
            return Ok(Some(owner));
        }
        if over() {
            return Ok(None);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn abort(mut forward: Direction, returned: Option<Returned>, stop: &Shutdown) -> Result<()> {
    let sessions = forward.sides(stop).cancel_handles();
    let (back, was_last) = interruptible(stop, &sessions, CHECKS, || {
        let (control, row) = (&mut forward.control, &forward.row);
        let was_last = match &returned {
            Some(returned) => back::was_last(control, &row.name, returned)?,
            None => false,
        };
        let back = match &returned {
            Some(returned) if !returned.opened => Some(returned.back.clone()),
            _ => back::way_back(control, row).ok(),
        };
        Ok((back, was_last))
    })?;
    let reversed = match back {
        Some(back) => forward.reversed(&back, stop)?,
        None => None,
    };
    let attempt = |side: &mut Direction| switchover::abort(&mut side.sides(stop));
    let attempted = match reversed.map(|mut side| attempt(&mut side)) {
        None | Some(Ok(None)) => attempt(&mut forward),
        Some(done) => done,
    };
    let aborted = match (attempted, returned) {
        (Ok(None), None) => {
            interruptible(stop, &sessions, CHECKS, || {
                switchover::lost::refuse(&mut forward.sides(stop))
            })?;
            None
        }
        (Ok(aborted), None) => aborted,
        (Ok(Some(writes)), Some(_)) => Some(writes),
        (Err(failure), Some(_)) if !was_last || failure.class != Class::Config => {
            return Err(failure);
        }
        (Ok(None) | Err(_), Some(Returned { back, .. })) => {
            return Err(Failure::new(
                Class::Config,
                format!("{} is switched over: nothing can be undone", back.name),
            )
            .detail(switchover::NOT_BEGUN_SINCE)
            .hint("Writes are on the publisher. An interrupted command can be run again: if it is done, it says so."));
        }
        (Err(failure), None) => return Err(failure),
    };
    output::line(match &aborted {
        Some(_) => "the switchover was undone: writes stay where they were",
        None => "no switchover was begun",
    });
    if let Some(writes) = aborted.filter(|writes| *writes != Writes::Taken) {
        output::line(&format!("  {}", writes.said()));
    }
    Ok(())
}

fn plan(found: &Findings, name: &str) -> Result<()> {
    let Findings { problems, notes } = found;
    if problems.is_empty() {
        output::line(&format!("subscription {name} can be switched over"));
    }
    for note in notes {
        output::line(&format!("  {note}"));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::new(Class::Config, format!("{name} cannot be switched over"))
        .detail(problems.join("\n         ")))
}
