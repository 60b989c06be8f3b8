//! Requests of verbs to the process that runs a subscription, as rows of schema `pgapace`. And a setting of the subscriber
//! that a reload may change while apply sessions commit synchronously.

use wire::{PreparedStatement, Session};

use crate::error::{Failure, Result};
use crate::hand_over;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::state::ownership::OwnedEpoch;

/// The requests for a subscription that are recorded now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Requests {
    /// A barrier ([`crate::barrier`]). One whose slot is being created counts: its keeper may have failed.
    pub(crate) barrier: bool,
    /// The subscription itself ([`crate::hand_over`]).
    pub(crate) hand_over: Option<hand_over::Request>,
    /// The subscriber's `synchronous_standby_names` is not empty.
    pub(crate) has_standbys: bool,
}

/// Reads all requests at once, because this is done several times per second.
pub(crate) fn find(session: &mut Session, owner: OwnedEpoch) -> Result<Requests> {
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pgapace.barrier \
           WHERE subscription = {id} AND state IN ('requested', 'creating')), ({}), \
           pg_catalog.current_setting('synchronous_standby_names') <> ''",
        hand_over::request_sql(owner),
        id = owner.id.0
    );
    let doing = "looking for requests in schema pgapace";
    let statement = PreparedStatement { name: "requests", sql: &sql };
    let results = session
        .query_prepared_each([(statement, &[])])
        .map_err(|e| Failure::subscriber(&e, doing))?;
    let row = first_row(&results, doing)?;
    Ok(Requests {
        barrier: boolean(&row, 0)?,
        hand_over: row.get(1).map(|_| boolean(&row, 1)).transpose()?.map(hand_over::Request::of),
        has_standbys: boolean(&row, 2)?,
    })
}
