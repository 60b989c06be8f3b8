//! A subscription from a database to itself would apply its own changes again without end, and empty the tables that
//! it copies. Everything that applies or copies refuses it before it changes anything. Two databases of one
//! server are fine.
//!
//! A physical copy has the system identifier of its original. So the time at which it was started tells a server
//! from others, and the system identifier tells two that were started in the same microsecond. A standby sends the changes of its primary: as publisher, it must not be one of the subscriber. Its
//! timeline is then the subscriber's; that of a copy that was promoted is another one.

use wire::{Row, Session};

use crate::both_servers::ask_both;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::{primary_timeline, standby_timeline, system_identifier};
use crate::subscriber::catalogue::{boolean, field, first_row};

/// A database of a running server. [`is_same`] compares two.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DatabaseIdentity {
    database: u32,
    server_start: String,
    pub(crate) in_recovery: bool,
}

impl DatabaseIdentity {
    /// SQL of three columns for [`Self::read`]. It is part of the first statement of a session: see [`crate::pooler::backend_sql`].
    pub(crate) const SQL: &str = "\
        (SELECT oid FROM pg_catalog.pg_database \
         WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()), \
        EXTRACT(epoch FROM pg_catalog.pg_postmaster_start_time()), pg_catalog.pg_is_in_recovery()";

    /// Reads the columns of [`Self::SQL`], of which the first one is `at`.
    pub(crate) fn read(row: &Row<'_>, at: usize) -> Result<Self> {
        Ok(Self {
            database: field(row, at)?,
            server_start: field(row, at + 1)?,
            in_recovery: boolean(row, at + 2)?,
        })
    }

    /// Reads it; `failed` makes an error of the side to which the session belongs.
    pub(crate) fn of(
        session: &mut Session,
        failed: impl FnOnce(&wire::Error, &str) -> Failure,
    ) -> Result<Self> {
        let results = session
            .simple(&format!("SELECT {}", Self::SQL))
            .map_err(|e| failed(&e, "reading the identity of the database"))?;
        Self::read(&first_row(&results, "a database")?, 0)
    }
}

/// Refuses a publisher that is the subscriber.
pub(crate) fn refuse(publisher: &mut Session, subscriber: &mut Session) -> Result<()> {
    let (published, subscribed) = ask_both(
        "reading the identity of the database",
        || DatabaseIdentity::of(publisher, Failure::publisher),
        || DatabaseIdentity::of(subscriber, Failure::subscriber),
    );
    refuse_identified((publisher, &published?), (subscriber, &subscribed?))
}

/// The same for databases whose identity is known.
pub(crate) fn refuse_identified(
    (publisher, published): (&mut Session, &DatabaseIdentity),
    (subscriber, subscribed): (&mut Session, &DatabaseIdentity),
) -> Result<()> {
    let problem = if is_same((publisher, published), (subscriber, subscribed)) {
        "publisher and subscriber are the same database"
    } else if published.in_recovery
        && published.database == subscribed.database
        && follows(publisher, subscriber)
    {
        "the publisher is a standby of the subscriber: both are the same database"
    } else {
        return Ok(());
    };
    Err(Failure::new(Class::Config, format!("{problem}, so changes would be applied to it again"))
        .hint("Set --publisher and --subscriber to different databases."))
}

/// Whether two sessions are of the same database.
pub(crate) fn is_same(
    (one, of_one): (&mut Session, &DatabaseIdentity),
    (other, of_other): (&mut Session, &DatabaseIdentity),
) -> bool {
    let differ = |(one, other)| one != other;
    of_one == of_other && !system_identifier(one).zip(system_identifier(other)).is_some_and(differ)
}

/// Whether a standby has the system identifier and the timeline of a primary, as far as both can be read.
fn follows(standby: &mut Session, primary: &mut Session) -> bool {
    let theirs = system_identifier(standby).zip(standby_timeline(standby));
    theirs.is_some() && theirs == system_identifier(primary).zip(primary_timeline(primary))
}
