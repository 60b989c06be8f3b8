//! A look at the publications, in a thread of its own: which tables were added, and which of them can be copied.

use crossbeam_channel::{Receiver, Sender, bounded};
use rustc_hash::FxHashSet;
use wire::Session;

use crate::apply::thread;
use crate::check::same_rows::{self, SameRows};
use crate::error::{Failure, Result};
use crate::publisher::publication::{self, PublicationContents, PublishedTable};
use crate::publisher::session::Publisher;
use crate::sqlstate;
use crate::subscriber::other_subscriptions;
use crate::subscriber::replaced_tables;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::published::{self, PreviousReading};
use crate::subscriber::state::{self, RelationState, SubscriptionId};
use crate::tablesync::subscriber_tables::{self, Obstacle, SubscriberTable};
use engine::table_name::TableName;

/// A table that is new or blocked, with the result of its inspection.
#[derive(Debug)]
pub(super) struct InspectedTable {
    pub(super) table: PublishedTable,
    /// Why the table cannot be copied.
    pub(super) obstacle: Option<Failure>,
}

impl InspectedTable {
    pub(super) fn new(table: PublishedTable, found: Judged) -> Self {
        let obstacle = found.err().map(|obstacle| obstacle.failure(&table));
        Self { table, obstacle }
    }
}

/// The subscriber's table, or why it cannot be copied.
type Judged = std::result::Result<SubscriberTable, Obstacle>;

/// How long a query of a look may take. A look that never ends would look as if all went well.
const QUERY_LIMIT: &str = "SET statement_timeout = '5min'";

/// An answer of an inspection.
pub(super) enum InspectionAnswer {
    /// The contents of the publications; sent first.
    Published {
        /// The records of the tables before the look.
        before: PreviousReading,
        contents: PublicationContents,
    },
    /// The state of the subscriber's tables; sent last.
    Inspected {
        found: Vec<InspectedTable>,
        /// Tables that another session has locked.
        locked: Vec<PublishedTable>,
    },
    /// A publication does not exist; nothing follows.
    PublicationMissing(Failure),
    /// It failed; nothing follows.
    Failed(Failure),
}

/// An inspection of the publications and of the subscriber's tables. It has its own thread and
/// sessions, because connecting may take long, and tables may be locked.
pub(super) struct Inspection {
    pub(super) publisher: Publisher,
    pub(super) subscriber: Subscriber,
    /// The name of the subscription.
    pub(super) subscription: String,
    pub(super) id: SubscriptionId,
    pub(super) owner: OwnedEpoch,
    pub(super) publications: Vec<String>,
    /// The published tables, if they are known already.
    pub(super) published: Option<Vec<PublishedTable>>,
    /// Tables whose copy failed recently.
    pub(super) not_due: FxHashSet<TableName>,
    /// Whether tables are copied that are added.
    pub(super) copies_added: bool,
    /// Whether no table may hold rows that is to be copied.
    pub(super) refuses_rows: bool,
    /// Whether copies keep the rows that are there.
    pub(super) keeps_rows: bool,
}

impl Inspection {
    pub(super) fn start(mut self) -> Result<Receiver<InspectionAnswer>> {
        let (sender, receiver) = bounded(2);
        thread::spawn("refresh".to_owned(), move || {
            if let Err(failure) = self.inspect(&sender) {
                // The leader may have ended.
                drop(sender.send(InspectionAnswer::Failed(failure)));
            }
        })?;
        Ok(receiver)
    }

    fn inspect(&mut self, sender: &Sender<InspectionAnswer>) -> Result<()> {
        let mut session = self.subscriber.connect(Purpose::Look)?;
        session
            .simple(QUERY_LIMIT)
            .map_err(|e| Failure::subscriber(&e, "preparing a look at its tables"))?;
        // The session on the publisher, if this look has one.
        let mut asked = None;
        let mut published = match self.published.take() {
            Some(published) => published,
            None => {
                let before = published::read(&mut session, self.id)?;
                let publisher = asked.insert(self.connect_to_publisher()?);
                let contents = publication::read_contents(publisher, &self.publications)?;
                // After the contents: those of a publication that was dropped before them must not count as read.
                let missing = publication::missing(publisher, &self.publications)?;
                if let Some(failure) = publication::missing_failure(&missing) {
                    drop(sender.send(InspectionAnswer::PublicationMissing(failure)));
                    return Ok(());
                }
                // What is to become of a table of which both servers have another one is decided by the contents.
                let made_anew = before.made_anew(&contents);
                replaced_tables::look(&mut session, self.id, self.owner, &made_anew)?;
                let tables = contents.tables.clone();
                // The leader may have ended.
                drop(sender.send(InspectionAnswer::Published { before, contents }));
                tables
            }
        };
        let states = state::relations_by_name(&mut session, self.id)?;
        published.retain(|table| {
            may_be_judged(states.get(&table.name)) && !self.not_due.contains(&table.name)
        });
        let must_be_empty = |table: &PublishedTable, subscriber: &SubscriberTable| {
            let state = states.get(&table.name);
            let copies = self.copies_added || state.is_some_and(|state| state.copy_wanted);
            let emptied = state.is_some_and(|state| subscriber.is_partly_copied(state));
            self.refuses_rows && copies && !emptied
        };
        let (mut judged, mut locked) = (Vec::new(), Vec::new());
        match subscriber_tables::fit(&mut session, &published, must_be_empty) {
            // A locked table must not prevent the inspection of the others.
            Err(failure) if is_locked(&failure) => {
                for table in published {
                    let one = std::slice::from_ref(&table);
                    match subscriber_tables::fit(&mut session, one, must_be_empty) {
                        Err(failure) if is_locked(&failure) => locked.push(table),
                        one => judged.extend(one?.into_iter().map(|one| (table.clone(), one))),
                    }
                }
            }
            all => judged.extend(published.into_iter().zip(all?)),
        }
        self.tell_whose_rows(&mut session, asked, &mut judged)?;
        let found =
            judged.into_iter().map(|(table, one)| InspectedTable::new(table, one)).collect();
        drop(sender.send(InspectionAnswer::Inspected { found, locked }));
        Ok(())
    }

    fn connect_to_publisher(&self) -> Result<Session> {
        let mut publisher = self.publisher.connect_to_look()?;
        publisher
            .simple(QUERY_LIMIT)
            .map_err(|e| Failure::publisher(&e, "preparing to read the publications"))?;
        Ok(publisher)
    }

    /// A table that is not empty because another subscription has copied the same rows needs other steps than one that
    /// holds rows of its own. An empty one is not copied either ([`claim`](crate::tablesync::claim)).
    fn tell_whose_rows(
        &self,
        session: &mut Session,
        publisher: Option<Session>,
        judged: &mut [(PublishedTable, Judged)],
    ) -> Result<()> {
        let is_asked = |(_, one): &&mut (_, Judged)| match one {
            Ok(_) => self.copies_added,
            Err(obstacle) => matches!(obstacle, Obstacle::NotEmpty),
        };
        let judged: Vec<_> = judged.iter_mut().filter(is_asked).collect();
        let tables: Vec<_> = judged.iter().map(|(table, _)| table.clone()).collect();
        let names: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
        let others = other_subscriptions::list(session, &self.subscription, &names)?;
        if others.is_empty() {
            return Ok(());
        }
        let mut publisher = publisher.map_or_else(|| self.connect_to_publisher(), Ok)?;
        let mut same = same_rows::among(&mut publisher, others, &self.publications, &tables)?;
        if self.keeps_rows {
            same.retain(SameRows::is_earlier);
        }
        for ((_, one), failure) in judged.into_iter().zip(same_rows::of_each(&same, &tables)) {
            if let Some(failure) = failure {
                *one = Err(Obstacle::Unfit(failure));
            }
        }
        Ok(())
    }
}

/// Whether an inspection may decide about a table: it is new, or it was blocked because it could
/// not be copied.
pub(super) fn may_be_judged(state: Option<&RelationState>) -> bool {
    state.is_none_or(RelationState::is_tried_again)
}

/// Whether the lock of a table was not granted within the session's lock_timeout.
fn is_locked(failure: &Failure) -> bool {
    failure.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE)
}
