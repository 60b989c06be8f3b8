//! Preparation of a backlog: the tables on both sides, the slot, the changes.

use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use pgoutput::Lsn;
use testbed::compare::{Checksum, compare_tables, published_tables, table_checksum};
use testbed::postgres::Client;
use testbed::{Cluster, TableName};

use super::{BASE, DATABASE, ROUND};
use crate::environment::{Environment, MARKER, PUBLICATION, SLOT, lsn};
use crate::workload::{Backlog, Write, twophase};

/// A backlog in a slot.
pub(super) struct Prepared {
    pub(super) start: Lsn,
    pub(super) end: Lsn,
    tables: Vec<(TableName, Checksum)>,
}

impl Prepared {
    /// The differences between the tables of the round and the publisher's.
    pub(super) fn differences(&self, environment: &Environment) -> Result<Vec<String>> {
        let mut subscriber = environment.subscriber.connect(ROUND)?;
        let mut all = Vec::new();
        for (table, expected) in &self.tables {
            if table_checksum(&mut subscriber, table)? == *expected {
                continue;
            }
            let mut publisher = environment.publisher.connect(DATABASE)?;
            let table = std::slice::from_ref(table);
            let differences = compare_tables(&mut publisher, &mut subscriber, table)?;
            ensure!(!differences.is_empty(), "the checksums of {} differ", table[0]);
            all.extend(differences.iter().map(ToString::to_string));
        }
        Ok(all)
    }
}

/// Creates the tables on both sides, then the slot, then the backlog.
pub(super) fn prepare(environment: &Environment, backlog: &Backlog) -> Result<Prepared> {
    let (mut publisher, base) = thread::scope(|scope| {
        let base = scope.spawn(|| {
            let mut base = tables(&environment.subscriber, BASE, backlog)?;
            base.batch_execute(&backlog.subscriber_schema)
                .context("cannot add the subscriber's own objects")?;
            anyhow::Ok(base)
        });
        let publisher = tables(&environment.publisher, DATABASE, backlog);
        let base = base.join().map_err(|_| anyhow!("filling the subscriber panicked"))?;
        anyhow::Ok((publisher?, base?))
    })?;
    // A template database must not have sessions.
    drop(base);
    let with = backlog.publication.map_or(String::new(), |with| format!("WITH ({with})"));
    publisher
        .batch_execute(&format!(
            "CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES {with}; SET synchronous_commit = off"
        ))
        .context("cannot create the publication")?;
    publisher.query_one("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&SLOT])?;
    let start = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    write(environment, &mut publisher, backlog).context("cannot write the backlog")?;
    publisher.batch_execute(&format!("INSERT INTO {MARKER} VALUES (1)"))?;
    let end = lsn(&mut publisher, "SELECT pg_current_wal_insert_lsn()::text")?;
    // One statement each, because VACUUM cannot run in the transaction that several statements
    // would share.
    publisher.batch_execute("VACUUM")?;
    publisher.batch_execute("CHECKPOINT")?;
    let tables = published_tables(&mut publisher, PUBLICATION)?
        .into_iter()
        .map(|table| Ok((table.clone(), table_checksum(&mut publisher, &table)?)))
        .collect::<Result<_>>()?;
    Ok(Prepared { start, end, tables })
}

fn write(environment: &Environment, publisher: &mut Client, backlog: &Backlog) -> Result<()> {
    match &backlog.write {
        Write::Procedure(body) => {
            publisher.batch_execute(&format!(
                "CREATE PROCEDURE write_backlog() LANGUAGE plpgsql AS $$ {body} $$"
            ))?;
            // The same random numbers in every run.
            publisher.query_one("SELECT setseed(0.42)", &[])?;
            publisher.batch_execute("CALL write_backlog()")?;
        }
        Write::TwoPhase { each } => thread::scope(|scope| {
            let clients: Vec<_> = (0..twophase::CONNECTIONS)
                .map(|number| {
                    scope.spawn(move || {
                        twophase::client(&environment.publisher, DATABASE, number, |n| n < *each)
                    })
                })
                .collect();
            clients
                .into_iter()
                .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
        })?,
    }
    Ok(())
}

fn tables(cluster: &Cluster, database: &str, backlog: &Backlog) -> Result<Client> {
    cluster.create_database(database)?;
    let mut client = cluster.connect(database)?;
    let context = || format!("cannot make the tables on {}", cluster.name());
    client
        .batch_execute(&format!("CREATE TABLE {MARKER} (id int PRIMARY KEY); {}", backlog.schema))
        .with_context(context)?;
    client.batch_execute(&backlog.load).with_context(context)?;
    client.batch_execute("VACUUM (FREEZE, ANALYZE)").with_context(context)?;
    Ok(client)
}
