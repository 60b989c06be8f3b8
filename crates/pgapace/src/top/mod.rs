//! `pgapace top`: the present activity of subscriptions, on a terminal. It reads the subscriber only.
//!
//! A thread reads every few seconds, so a subscriber that does not answer delays no key. The view is a
//! function of the last reading and of the keys ([`view`], [`keys`]); `--once` draws it into a buffer.

mod keys;
mod panes;
mod view;

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use crate::cli::output;
use crate::cli::status::collect::{Status, StatusReader};
use crate::cli::status::found::Found;
use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::observe::history::Point;
use keys::{Command, Keys};

/// How many points of the curves are read: ten minutes.
const POINTS: usize = 60;
/// How often keys are looked for.
const KEYS_EVERY: Duration = Duration::from_millis(100);

/// Subscriptions, each with its curves.
type Subscriptions = Vec<(Status, Vec<Point>)>;
/// The result of one look, or the reason of its failure.
type News = std::result::Result<Subscriptions, String>;

/// The status of all subscriptions at one time.
#[derive(Debug, Default)]
struct Seen {
    subscriptions: Subscriptions,
    /// Why the last look failed; the subscriptions are older then.
    failure: Option<String>,
}

/// Prints one frame as text.
pub(crate) fn once(sites: Vec<Site>, (width, height): (u16, u16)) -> Result<()> {
    let (subscriptions, found) = read(&mut readers(sites))?;
    if subscriptions.is_empty() {
        return Err(found.none(true));
    }
    found.tell_missing();
    let seen = Seen { subscriptions, failure: None };
    for index in 0..seen.subscriptions.len() {
        let mut keys = Keys::default();
        keys.select(index);
        let mut terminal = match Terminal::new(TestBackend::new(width, height)) {
            Ok(terminal) => terminal,
            Err(never) => match never {},
        };
        match terminal.draw(|frame| view::draw(frame, &seen, &keys)) {
            Ok(_) => {}
            Err(never) => match never {},
        }
        let buffer = terminal.backend().buffer();
        for row in 0..height {
            let cells = (0..width).map(|column| buffer[(column, row)].symbol());
            output::line(cells.collect::<String>().trim_end());
        }
    }
    Ok(())
}

/// Shows it until a key ends it.
pub(crate) fn run(sites: Vec<Site>, interval: Duration) -> Result<()> {
    let mut readers = readers(sites);
    // Mistakes of the command line are shown before the screen is taken over.
    let (subscriptions, found) = read(&mut readers)?;
    if subscriptions.is_empty() && !found.missing.is_empty() {
        return Err(found.none(true));
    }
    let (orders, inbox) = channel();
    let (sender, seen) = channel();
    std::thread::Builder::new()
        .name("top".to_owned())
        .spawn(move || read_again(&mut readers, &inbox, &sender))
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
    let mut terminal = ratatui::try_init().map_err(|error| not_a_terminal(&error))?;
    let shown = Shown {
        seen: Seen { subscriptions, failure: None },
        keys: Keys::new(interval),
        orders,
        news: seen,
    };
    let ended = shown.run(&mut terminal);
    ratatui::restore();
    ended.map_err(|error| not_a_terminal(&error))
}

fn not_a_terminal(error: &std::io::Error) -> Failure {
    Failure::new(Class::Config, format!("pgapace top needs a terminal: {error}"))
        .hint("pgapace top --once prints one frame as text.")
}

fn readers(sites: Vec<Site>) -> Vec<StatusReader> {
    let subscriber_only = |site: Site| StatusReader::new(Site { publisher: None, ..site });
    sites.into_iter().map(subscriber_only).collect()
}

fn read(readers: &mut [StatusReader]) -> Result<(Subscriptions, Found)> {
    let (mut all, mut found) = (Vec::new(), Found::default());
    for reader in readers {
        found.read(reader)?;
        for status in found.all.drain(..) {
            let history = reader.history(&status.name, POINTS)?;
            all.push((status, history));
        }
    }
    Ok((all, found))
}

/// Reads whenever it is told to, until the receiver is gone.
fn read_again(readers: &mut [StatusReader], inbox: &Receiver<()>, sender: &Sender<News>) {
    while inbox.recv().is_ok() {
        let read = read(readers).map(|(all, _)| all).map_err(|failure| failure.message);
        if sender.send(read).is_err() {
            return;
        }
    }
}

struct Shown {
    seen: Seen,
    keys: Keys,
    orders: Sender<()>,
    news: Receiver<News>,
}

impl Shown {
    fn run(mut self, terminal: &mut ratatui::DefaultTerminal) -> std::io::Result<()> {
        let (mut asked, mut waiting) = (Instant::now(), false);
        loop {
            terminal.draw(|frame| view::draw(frame, &self.seen, &self.keys))?;
            if !waiting && (asked.elapsed() >= self.keys.interval() || self.keys.take_refresh()) {
                // The thread ends only with this one.
                let _ = self.orders.send(());
                (asked, waiting) = (Instant::now(), true);
            }
            if event::poll(KEYS_EVERY)?
                && let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
            {
                self.keys.set_number(self.seen.subscriptions.len());
                if self.keys.press(key) == Command::Quit {
                    return Ok(());
                }
            }
            match self.news.recv_timeout(Duration::ZERO) {
                Ok(Ok(subscriptions)) => {
                    waiting = false;
                    if !self.keys.is_paused() {
                        self.seen = Seen { subscriptions, failure: None };
                    }
                }
                Ok(Err(failure)) => (waiting, self.seen.failure) = (false, Some(failure)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }
}
