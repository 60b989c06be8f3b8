//! The statements that control transactions, and that every session prepares when it is opened.

use std::collections::VecDeque;

use wire::Session;

use crate::apply::apply_session::Identity;
use crate::apply::encoder::Encoder;
use crate::apply::expected::Expected;
use crate::apply::work::Work;
use crate::error::{Failure, Result};
use crate::subscriber::citus;
use crate::subscriber::session::{
    BEGIN, Purpose, deciding_settings_sql, encoding_sql, has_other_encoding,
};
use crate::subscriber::state::prepared;
use crate::subscriber::state::progress::{RECORD_TYPES, RecordCheck, record_sql};
use crate::subscriber::statement::copy::TYPES_SQL;

/// Prepares the statements that every transaction uses, on a session that is not in a transaction. They
/// are prepared when this returns. A Parse without a Sync would leave a transaction open, which holds a
/// lock on the progress until the first group comes.
pub(crate) fn prepare_control(
    session: &mut Session,
    identity: Identity,
    purpose: Purpose,
) -> Result<()> {
    session.queue_parse("begin", "BEGIN", &[]);
    session.queue_parse("begin_in_doubt", BEGIN, &[]);
    session.queue_parse("commit", "COMMIT", &[]);
    session.queue_parse("commit_and_chain", "COMMIT AND CHAIN", &[]);
    session.queue_parse("nothing", "SELECT WHERE false", &[]);
    session.queue_parse("savepoint", "SAVEPOINT pgapace_part", &[]);
    session.queue_parse("release", "RELEASE SAVEPOINT pgapace_part", &[]);
    session.queue_parse("column_types", TYPES_SQL, &[]);
    let Identity { citus, encoding, .. } = identity;
    let settings = deciding_settings_sql(session, purpose, citus, encoding);
    session.queue_parse("settings", &settings, &[]);
    session.queue_parse("encoding", &encoding_sql(encoding), &[]);
    let Identity { progress_of, tagged, ordered, .. } = identity;
    prepared::queue_parses(session, tagged);
    if citus {
        session.queue_parse("replica_role", citus::REPLICA_ROLE, &[]);
        session.queue_parse("two_phase", citus::TWO_PHASE, &[]);
    }
    let check = if ordered { RecordCheck::Ordered } else { RecordCheck::Unordered };
    for (name, check) in [("progress", check), ("progress_following", RecordCheck::Following)] {
        session.queue_parse(name, &record_sql(progress_of, tagged, check), &RECORD_TYPES);
    }
    session.finish_queued().map_err(|e| Failure::subscriber(&e, "preparing statements"))
}

/// Queues one of the statements that [`prepare_control`] has prepared.
pub(super) fn queue_control(
    session: &mut Session,
    statement: &str,
    awaited: Expected,
    expected: &mut VecDeque<Expected>,
) -> Result<()> {
    session
        .queue_bind(statement, std::iter::empty())
        .map_err(|e| Failure::subscriber(&e, "queueing a statement"))?;
    session.queue_execute();
    expected.push_back(awaited);
    Ok(())
}

impl Encoder {
    /// Queues the begin of a subscriber transaction, whose first part this is. If others come, each can
    /// be rolled back alone.
    pub(crate) fn begin(
        &mut self,
        session: &mut Session,
        work: &Work,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        work.tables.iter().flatten().take(1).for_each(|map| self.in_doubt.heed(map));
        if has_other_encoding(session, self.identity.encoding) {
            self.in_doubt.unknown();
        }
        let begin = if self.in_doubt.any() { "begin_in_doubt" } else { "begin" };
        queue_control(session, begin, Expected::Control, expected)?;
        self.ensure_all_settings(session, expected)?;
        if self.identity.citus {
            queue_control(session, "replica_role", Expected::Control, expected)?;
        }
        if self.savepoints && work.part.end_lsn.is_none() {
            queue_control(session, "savepoint", Expected::Control, expected)?;
        }
        Ok(())
    }

    /// Queues a statement that does nothing, for its reply.
    pub(crate) fn nothing(
        &mut self,
        session: &mut Session,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        queue_control(session, "nothing", Expected::Control, expected)?;
        session.queue_flush();
        Ok(())
    }
}
