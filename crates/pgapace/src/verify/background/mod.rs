//! Verification in the background of a running subscription (--verify-interval).
//!
//! One thread for each subscription of `pgapace run`, beside its runs: it outlives them, and has sessions of
//! its own. It is a client of the running subscription like the verb `pgapace verify`: both ask for barriers
//! through a row on the subscriber, compare the same chunks and record them alike. So the stream waits for
//! its barriers only.
//!
//! ```text
//!            nothing is due                 a verb wants the lock, a session waits for a lock,
//!          ┌───────────────┐                a server is away, the process ends
//!          ▼               │              ┌────────────────────────────────────────┐
//!       asleep ──► look for tables ──► a pass over the tables that are due ──► what is compared
//!          ▲                                   │                              is recorded; the
//!          └───────────────────────────────────┘                              rest goes on later
//! ```
//!
//! All that it knows is recorded on the subscriber: when each table was verified, and how far the present
//! verification of a table has come. So it goes on there after any interruption. A table that cannot be
//! compared does not stop the others: it is logged, and left until its next turn ([`left_out`]).

mod left_out;
mod pass;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use engine::table_name::TableName;
use wire::Session;

use self::left_out::LeftOut;
use self::pass::Pass;
use crate::apply::thread;
use crate::config::Subscription as Config;
use crate::config::live::LiveSettings;
use crate::error::{Class, Failure, Result};
use crate::observe::board::Board;
use crate::publisher::session::Publisher;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::verification::{schedule, summary};
use crate::subscriber::state::{self, Phase, Subscription, ownership, schema};

/// How often it looks whether a subscription runs, and whether a verb has ended.
const LOOK: Duration = Duration::from_secs(1);
/// The longest sleep: tables may be added.
const LONGEST: Duration = Duration::from_secs(60);
/// After an interruption, which doubles up to [`LONGEST`].
const PAUSE: Duration = Duration::from_secs(2);
/// Tables that are compared under one barrier.
const TABLES_AT_ONCE: usize = 100;

/// A running verification in the background. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct BackgroundVerification {
    ended: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundVerification {
    /// Starts it, if the subscription wants it.
    pub(crate) fn start(settings: &Arc<LiveSettings>, board: &Board) -> Result<Option<Self>> {
        let config = settings.newest();
        if config.verify_interval.is_zero() {
            return Ok(None);
        }
        let ended = Shutdown::default();
        let background = Background {
            settings: Arc::clone(settings),
            config,
            board: board.clone(),
            ended: ended.clone(),
            left_out: LeftOut::default(),
            alone: 0,
            named: HashMap::new(),
        };
        let thread = thread::spawn("verify".to_owned(), move || background.run())?;
        Ok(Some(Self { ended, thread: Some(thread) }))
    }
}

impl Drop for BackgroundVerification {
    fn drop(&mut self) {
        self.ended.request();
        // Its queries are cancelled. One that still connects is left behind: it has nothing to lose.
        for _ in 0..50 {
            let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) else {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            drop(thread.join());
            return;
        }
    }
}

struct Background {
    settings: Arc<LiveSettings>,
    /// The newest ones at the last look.
    config: Arc<Config>,
    board: Board,
    ended: Shutdown,
    left_out: LeftOut,
    /// So many tables are compared alone, because one of them failed together with others.
    alone: usize,
    /// The columns of each table that the log named because they cannot be compared.
    named: NamedColumns,
}

/// Columns by the name of their table.
type NamedColumns = HashMap<TableName, Vec<String>>;

/// The result of one look for work.
enum Looked {
    /// There is nothing to do for this time.
    Nothing(Duration),
    /// Tables were compared.
    Compared,
    /// A verb, or a session that waits for a lock of the pass, comes first.
    Yielded,
}

impl Background {
    fn run(mut self) {
        let (mut pause, mut reported) = (PAUSE, None);
        while !self.ended.requested() {
            let sleep = match self.look() {
                Ok(Looked::Nothing(left)) => left.min(LONGEST),
                Ok(Looked::Compared) => {
                    (pause, reported) = (PAUSE, None);
                    continue;
                }
                Ok(Looked::Yielded) => PAUSE,
                Err(failure) => {
                    if self.ended.requested() {
                        return;
                    }
                    let text = failure.to_string();
                    // A server that is away for hours is named once.
                    if reported.as_ref() != Some(&text) {
                        tracing::warn!(
                            event = "verification_postponed",
                            subscription = self.config.name,
                            error = %failure,
                            "verification in the background goes on later"
                        );
                        reported = Some(text);
                    }
                    pause = (pause * 2).min(LONGEST);
                    pause
                }
            };
            self.ended.sleep(sleep);
        }
    }

    /// Looks for tables that are due, and compares them.
    fn look(&mut self) -> Result<Looked> {
        self.config = self.settings.newest();
        let mut subscriber = Subscriber::new(self.config.subscriber.clone(), &self.config.name);
        let mut control = subscriber.connect_first()?;
        let Some(row) = self.running(&mut control)? else { return Ok(Looked::Nothing(LOOK)) };
        let due = self.due(&mut control, &row)?;
        let tables = match due {
            Ok(tables) => tables,
            Err(left) => return Ok(Looked::Nothing(left)),
        };
        let encoding = subscriber.encoding();
        let publisher = Publisher::new(self.config.publisher.clone(), &self.config.name, encoding);
        let pass = Pass {
            config: &self.config,
            board: &self.board,
            ended: &self.ended,
            publisher: &publisher,
            subscriber: &subscriber,
            row: &row,
        };
        let compared = pass.tables(control, &tables, &mut self.named);
        let compared = self.judge(&tables, compared);
        if let Ok(mut session) = subscriber.connect_first()
            && let Ok(summary) = summary::read(&mut session, row.id)
        {
            self.board.set_verified(summary);
        }
        compared
    }

    /// The result of a pass. If several tables failed together, those that are left are compared alone, so
    /// that the one that cannot be compared is found.
    fn judge(&mut self, tables: &[TableName], compared: Result<bool>) -> Result<Looked> {
        let failure = match compared {
            Ok(true) => {
                tables.iter().for_each(|table| self.left_out.remove(table));
                return Ok(Looked::Compared);
            }
            Ok(false) => return Ok(Looked::Yielded),
            Err(failure) if is_of_servers(&failure) => return Err(failure),
            Err(failure) => failure,
        };
        let [table] = tables else {
            self.alone = tables.len();
            return Ok(Looked::Compared);
        };
        if self.left_out.add(table, &failure, self.config.verify_interval) {
            tracing::warn!(
                event = "verification_failed",
                subscription = self.config.name,
                table = table.to_string(),
                error = %failure,
                "table could not be verified in the background"
            );
        }
        Ok(Looked::Compared)
    }

    /// The subscription, if it streams, so that barriers can be taken.
    fn running(&self, control: &mut Session) -> Result<Option<Subscription>> {
        if schema::version(control)? != schema::newest() {
            return Ok(None);
        }
        let row = state::find(control, &self.config.name)?;
        let Some(row) = row.filter(|row| row.phase == Phase::Streaming) else { return Ok(None) };
        let runs = ownership::owner(control, row.id)?.is_some();
        Ok(runs.then_some(row))
    }

    /// Tables that are due, or the time until one is.
    fn due(
        &mut self,
        control: &mut Session,
        row: &Subscription,
    ) -> Result<std::result::Result<Vec<TableName>, Duration>> {
        schedule::forget_others(control, row.id)?;
        let interval = self.config.verify_interval;
        let mut tables = schedule::read(control, row.id, interval)?;
        let mut left = LONGEST;
        tables.retain(|table| {
            let out = self.left_out.left(&table.name);
            let wait = out.map_or(table.due_in, |out| out.max(table.due_in));
            left = left.min(wait.max(LOOK));
            wait.is_zero()
        });
        // Those that failed before are compared alone, after the others.
        let failed = |table: &schedule::ScheduledTable| self.left_out.left(&table.name).is_some();
        let (alone, mut tables): (Vec<_>, Vec<_>) = tables.into_iter().partition(failed);
        if tables.is_empty() {
            tables.extend(alone.into_iter().take(1));
        }
        if tables.is_empty() {
            return Ok(Err(left));
        }
        tables.truncate(if self.alone > 0 { 1 } else { TABLES_AT_ONCE });
        self.alone = self.alone.saturating_sub(1);
        Ok(Ok(tables.into_iter().map(|table| table.name).collect()))
    }
}

/// Whether nothing else can be compared now either.
fn is_of_servers(failure: &Failure) -> bool {
    failure.is_connection_lost() || matches!(failure.class, Class::Busy | Class::Stopped)
}
