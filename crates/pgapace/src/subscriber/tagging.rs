//! Whether the commits of a run are tagged, and how many sessions may tag them.
//!
//! A tag is of use only where another program can see it: a subscription that reads the subscriber's WAL
//! (`wal_level` = `logical`), or a query for the commit's origin (`track_commit_timestamp`).
//!
//! Each session that tags holds a replication origin, and the server has few of them: 10 by default. A
//! native subscription needs one, and one more for each of its table sync workers. Without one, it fails.
//! So some are left to them, and fewer workers apply instead. An untagged commit among tagged ones is no
//! way out: a subscription in the opposite direction would send it back. Where not even one origin is
//! left, no commit of the subscription is tagged. The session that creates an origin decides:
//! subscriptions start at the same time, in several processes and databases.

use std::fmt::Display;

use wire::{Rows, Session};

use crate::config::{ApplyWorkers, Subscription as Config, TagCommits};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::origin::{MAY_DROP_SQL, PREFIX};

/// How the commits of a run are tagged.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tagging {
    pub(crate) tagged: bool,
    pub(crate) origins: OriginRoom,
    /// Whether sessions leave origins to others. Otherwise the server may refuse some of them.
    leaves_room: bool,
    /// Whether unused origins may be dropped: the server does not record commit timestamps, so no query
    /// asks for the origin of a commit later.
    pub(crate) may_drop: bool,
    /// Names of the subscription's origins.
    own: Vec<String>,
    /// Names of pgapace's origins for databases that were dropped, and for subscriptions that were forgotten. Nothing
    /// else removes them, and each takes the place of another one.
    orphans: Vec<String>,
}

/// The replication origins of the subscriber.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OriginRoom {
    /// The value of [`setting`].
    pub(crate) most: i64,
    /// Those that exist and do not belong to the subscription.
    pub(crate) others: i64,
    /// How many are left free: for a native subscription and its table sync workers.
    pub(crate) reserve: i64,
    /// Other subscriptions of the database that have none: one is left to each of them.
    pub(crate) without: i64,
}

/// How many sessions a run has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RunSessions {
    pub(crate) workers: usize,
    pub(crate) streams: usize,
}

impl RunSessions {
    /// As configured.
    pub(crate) fn of(config: &Config) -> Self {
        Self { workers: config.workers.most(), streams: config.stream_sessions() }
    }
}

impl OriginRoom {
    /// Whether none is left for the first session of a subscription.
    pub(crate) fn is_short(self) -> bool {
        self.most - self.others <= self.reserve
    }

    /// How many origins the subscription may have, if it has one.
    fn free(self) -> usize {
        usize::try_from(self.most - self.others - self.reserve - self.without).unwrap_or(0).max(1)
    }

    /// How many sessions may apply. One origin is left to tables that are copied while others stream.
    pub(crate) fn sessions(self, wanted: RunSessions) -> RunSessions {
        let free = self.free().saturating_sub(1);
        let streams = wanted.streams.min(free / 3);
        RunSessions { workers: wanted.workers.min(free - streams).max(1), streams }
    }
}

/// The setting that limits replication origins, by major version.
pub(crate) fn setting(major: u32) -> &'static str {
    if major >= 18 { "max_active_replication_origins" } else { "max_replication_slots" }
}

/// The query for the number of subscriptions `s` of a database that have no origin. `database` is its oid.
pub(crate) fn without_origin_sql(database: impl Display) -> String {
    format!(
        "SELECT pg_catalog.count(*) FROM pgapace.subscription s WHERE s.id::pg_catalog.text NOT IN ( \
           SELECT pg_catalog.split_part(o.roname, '_', 3) FROM pg_catalog.pg_replication_origin o \
           WHERE pg_catalog.starts_with(o.roname, pg_catalog.concat('{PREFIX}', {database}, '_')))"
    )
}

impl Tagging {
    /// Reads the facts that decide. `prefix`: of the names of the subscription's origins, if it exists.
    pub(crate) fn read(
        session: &mut Session,
        tag_commits: TagCommits,
        prefix: Option<&str>,
    ) -> Result<Self> {
        let rows = session
            .query(&Self::sql(session, tag_commits, prefix.is_some()), &[])
            .map_err(|e| Failure::subscriber(&e, "reading its replication origins"))?;
        Self::of(&rows, tag_commits, prefix)
    }

    /// The query for [`Self::of`]. Without `has_state`, schema `pgapace` may be missing: it does not look for
    /// forgotten subscriptions.
    pub(crate) fn sql(session: &Session, tag_commits: TagCommits, has_state: bool) -> String {
        if tag_commits == TagCommits::Never {
            return "SELECT WHERE false".to_owned();
        }
        let setting = setting(session.server_version().major());
        let without = if has_state { without_origin_sql("here.oid") } else { "0".to_owned() };
        // An origin is created behind the row of its subscription, and both are read under one snapshot.
        let forgotten = if has_state {
            format!(
                "roname OPERATOR(pg_catalog.~) pg_catalog.concat('^{PREFIX}', here.oid, '_[0-9]+_') \
                   AND NOT EXISTS (SELECT FROM pgapace.subscription s WHERE pg_catalog.starts_with( \
                     roname, pg_catalog.concat('{PREFIX}', here.oid, '_', s.id, '_')))"
            )
        } else {
            "false".to_owned()
        };
        format!(
            "SELECT pg_catalog.current_setting('wal_level') OPERATOR(pg_catalog.=) 'logical', \
               pg_catalog.current_setting('track_commit_timestamp') OPERATOR(pg_catalog.=) 'on', \
               pg_catalog.current_setting('{setting}'), \
               pg_catalog.current_setting('max_sync_workers_per_subscription'), \
               pg_catalog.count(roname), \
               coalesce(pg_catalog.string_agg(roname, ',') \
                 FILTER (WHERE pg_catalog.starts_with(roname, '{PREFIX}')), ''), \
               coalesce(pg_catalog.string_agg(roname, ',') \
                 FILTER (WHERE roname OPERATOR(pg_catalog.~) '^{PREFIX}[0-9]+_' AND ({MAY_DROP_SQL}) \
                   AND (NOT EXISTS (SELECT FROM pg_catalog.pg_database d WHERE pg_catalog.starts_with( \
                     roname, pg_catalog.concat('{PREFIX}', d.oid, '_'))) OR {forgotten})), ''), \
               ({without}) \
             FROM pg_catalog.pg_database here LEFT JOIN pg_catalog.pg_replication_origin ON true \
             WHERE here.datname OPERATOR(pg_catalog.=) pg_catalog.current_database() GROUP BY here.oid"
        )
    }

    /// Decides from the row of [`Self::sql`].
    pub(crate) fn of(rows: &Rows, tag_commits: TagCommits, prefix: Option<&str>) -> Result<Self> {
        if tag_commits == TagCommits::Never {
            return Ok(Self::default());
        }
        let none = || Failure::internal("the query for replication origins returned no row");
        let row = rows.first().ok_or_else(none)?;
        let (logical, tracked) = (boolean(&row, 0)?, boolean(&row, 1)?);
        let sync_workers: i64 = field(&row, 3)?;
        let (pgapace, orphans) = (field::<String>(&row, 5)?, field::<String>(&row, 6)?);
        let orphans: Vec<_> =
            orphans.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let is_own = |name: &&str| prefix.is_some_and(|prefix| name.starts_with(prefix));
        let own: Vec<_> = pgapace.split(',').filter(is_own).map(str::to_owned).collect();
        let all: i64 = field(&row, 4)?;
        let origins = OriginRoom {
            most: field(&row, 2)?,
            others: all - i64::try_from(own.len() + orphans.len()).unwrap_or(all),
            reserve: 1 + sync_workers,
            // The subscription itself is one of them while it has no origin.
            without: field::<i64>(&row, 7)? - i64::from(prefix.is_some() && own.is_empty()),
        };
        let always = tag_commits == TagCommits::Always;
        Ok(Self {
            tagged: always || logical || tracked,
            origins,
            leaves_room: !always && (logical || tracked),
            may_drop: !tracked,
            own,
            orphans,
        })
    }

    /// The origins, if some are left to others.
    pub(crate) fn room(&self) -> Option<OriginRoom> {
        self.leaves_room.then_some(self.origins)
    }

    /// The origins that limit the number of sessions. A subscription that leaves none to others leaves one to the
    /// sessions that write beside its own workers.
    pub(crate) fn limits(&self) -> Option<OriginRoom> {
        let all = OriginRoom { reserve: 0, without: 0, ..self.origins };
        self.tagged.then_some(if self.leaves_room { self.origins } else { all })
    }

    /// Whether no origin is left for the subscription, which has none yet.
    pub(crate) fn is_short(&self) -> bool {
        self.leaves_room && self.own.is_empty() && self.origins.is_short()
    }

    /// How many origins the subscription has.
    pub(crate) fn own(&self) -> usize {
        self.own.len()
    }

    /// How many sessions a run has. Commits that are not tagged need no origins.
    pub(crate) fn sessions(&self, config: &Config) -> RunSessions {
        self.fewer(RunSessions::of(config))
    }

    fn fewer(&self, wanted: RunSessions) -> RunSessions {
        let room = self.limits().filter(|_| !self.is_short());
        room.map_or(wanted, |room| room.sessions(wanted))
    }

    /// How many sessions may copy; `None` if origins do not limit them. Origins that stay, or that apply
    /// workers need meanwhile (`beside`), are left to the sessions that apply, of which `wanted` may run.
    pub(crate) fn copy_sessions(&self, wanted: RunSessions, beside: bool) -> Option<usize> {
        let room = self.limits().filter(|_| !self.is_short())?;
        let applying = if beside || !self.may_drop {
            let sessions = room.sessions(wanted);
            sessions.workers + sessions.streams
        } else {
            0
        };
        Some(room.free().saturating_sub(applying).max(1))
    }

    /// Origins of databases and subscriptions that do not exist any more.
    pub(crate) fn orphans(&self) -> Vec<&str> {
        self.orphans.iter().map(String::as_str).collect()
    }

    /// Origins that sessions of an earlier run or verb left, which wrote beside its apply workers.
    pub(crate) fn left_by_writers(&self, prefix: &str) -> Vec<&str> {
        if !self.may_drop {
            return Vec::new();
        }
        let own = self.own.iter().map(String::as_str);
        let is_worker = |name: &str| name.strip_prefix(prefix)?.parse::<usize>().ok();
        own.filter(|name| is_worker(name).is_none()).collect()
    }

    /// Origins of the subscription that no session of the run opens at its start.
    pub(crate) fn unused(&self, config: &Config, prefix: &str) -> Vec<&str> {
        self.numbered_from(
            prefix,
            match config.workers {
                ApplyWorkers::Auto => 1,
                // The number behind the workers is that of tables that are copied, and then streams follow.
                ApplyWorkers::Fixed(_) => {
                    let RunSessions { workers, streams } = self.sessions(config);
                    workers + 1 + streams
                }
            },
        )
    }

    /// Origins of the subscription's workers and streams with this number or a higher one, if they may be dropped.
    pub(crate) fn numbered_from(&self, prefix: &str, kept: usize) -> Vec<&str> {
        if !self.may_drop {
            return Vec::new();
        }
        let number = |name: &str| name.strip_prefix(prefix)?.parse::<usize>().ok();
        let unused = |name: &&str| number(name).is_some_and(|number| number >= kept);
        self.own.iter().map(String::as_str).filter(unused).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{OriginRoom, RunSessions, Tagging};

    #[test]
    fn some_origins_are_left_to_others() {
        let sessions = |most, others, workers, streams| {
            let room = OriginRoom { most, others, reserve: 3, without: 0 };
            let RunSessions { workers, streams } = room.sessions(RunSessions { workers, streams });
            (workers, streams)
        };
        // The defaults of PostgreSQL, with nothing else, and with another subscription.
        assert_eq!(sessions(10, 0, 16, 3), (4, 2));
        assert_eq!(sessions(10, 0, 4, 3), (4, 2));
        assert_eq!(sessions(10, 3, 16, 3), (2, 1));
        for others in 5..12 {
            assert_eq!(sessions(10, others, 16, 3), (1, 0), "{others}");
        }
        assert_eq!(sessions(1000, 20, 16, 3), (16, 3));
        assert_eq!(sessions(1000, 20, 1, 0), (1, 0));
    }

    #[test]
    fn one_origin_is_left_to_each_other_subscription() {
        let room = |others, without| OriginRoom { most: 10, others, reserve: 3, without };
        let workers = |room: OriginRoom| {
            let RunSessions { workers, streams } =
                room.sessions(RunSessions { workers: 16, streams: 3 });
            (workers, streams)
        };
        assert_eq!(workers(room(0, 1)), (4, 1));
        assert_eq!(workers(room(0, 11)), (1, 0));
        // Subscriptions that have none do not keep another one from its first.
        assert!(!room(6, 5).is_short());
        assert!(room(7, 0).is_short());
    }

    #[test]
    fn untagged_commits_need_no_origins() {
        let origins = OriginRoom { most: 10, others: 8, reserve: 3, without: 0 };
        let mut tagging =
            Tagging { tagged: true, origins, leaves_room: true, ..Tagging::default() };
        let wanted = RunSessions { workers: 16, streams: 3 };
        assert!(tagging.is_short());
        assert_eq!(tagging.copy_sessions(wanted, false), None);
        // One that has an origin keeps it.
        tagging.own.push("pgapace_5_1_0".to_owned());
        assert!(!tagging.is_short());
        assert_eq!(tagging.copy_sessions(wanted, false), Some(1));
    }

    #[test]
    fn one_origin_is_left_to_the_writers_of_a_subscription_that_leaves_none_to_others() {
        let origins = OriginRoom { most: 10, others: 2, reserve: 3, without: 1 };
        let tagging = Tagging { tagged: true, origins, may_drop: true, ..Tagging::default() };
        let wanted = RunSessions { workers: 16, streams: 3 };
        assert_eq!(tagging.fewer(wanted), RunSessions { workers: 5, streams: 2 });
        assert_eq!(tagging.copy_sessions(wanted, true), Some(1));
        assert_eq!(tagging.copy_sessions(wanted, false), Some(8));
        let untagged = Tagging { tagged: false, ..tagging };
        assert_eq!(untagged.fewer(wanted), wanted);
    }

    #[test]
    fn copies_leave_origins_to_apply_workers() {
        let copies = |others, beside, may_drop| {
            let origins = OriginRoom { most: 10, others, reserve: 3, without: 0 };
            let tagging = Tagging {
                tagged: true,
                origins,
                leaves_room: true,
                may_drop,
                ..Tagging::default()
            };
            tagging.copy_sessions(RunSessions { workers: 16, streams: 3 }, beside)
        };
        assert_eq!(copies(0, false, true), Some(7));
        assert_eq!(copies(0, true, true), Some(1));
        // Origins of copies stay, and would lack later.
        assert_eq!(copies(0, false, false), Some(1));
        assert_eq!(copies(6, false, true), Some(1));
    }
}
