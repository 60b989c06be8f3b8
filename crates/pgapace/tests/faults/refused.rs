//! A server that refuses the sessions of a subscription that streams: maintenance, or a login that is taken away.

use testbed::program::Process;
use testbed::{Cluster, Result};

use crate::support::{DB, PATIENCE, Site, expect_exit, one_or_all, wait_while_running};

/// The user of pgapace.
const USER: &str = "gated";

/// Closes a server to pgapace, and opens it again.
struct Gate {
    close: &'static str,
    open: &'static str,
    /// SQLSTATE and hint in the log.
    said: [&'static str; 2],
}

const GATES: [Gate; 3] = [
    Gate {
        close: "ALTER DATABASE postgres ALLOW_CONNECTIONS false",
        open: "ALTER DATABASE postgres ALLOW_CONNECTIONS true",
        said: ["55000", "ALTER DATABASE \"postgres\" ALLOW_CONNECTIONS true;"],
    },
    Gate {
        close: "ALTER ROLE gated NOLOGIN",
        open: "ALTER ROLE gated LOGIN",
        said: ["is not permitted to log in (SQLSTATE 28000)", "ALTER ROLE \"gated\" LOGIN"],
    },
    Gate { close: "", open: "", said: ["SQLSTATE 28000", "in pg_hba.conf"] },
];

/// A walsender needs it.
const REPLICATION: Gate = Gate {
    close: "ALTER ROLE gated NOREPLICATION",
    open: "ALTER ROLE gated REPLICATION",
    said: ["42501", "ALTER ROLE \"gated\" REPLICATION;"],
};

impl Gate {
    /// From another database, which stays open.
    fn sql(server: &Cluster, sql: &str) -> Result<()> {
        server.sql("template1", sql)
    }

    fn close(&self, server: &Cluster) -> Result<()> {
        match self.close {
            "" => hba(server, &|rules| format!("local all {USER} reject\n{rules}")),
            close => Self::sql(server, close),
        }
    }

    /// Ends the sessions of pgapace until the log says that others are refused: a server reads its rules some time.
    fn turn_away(&self, server: &Cluster, run: &mut Process) -> Result<()> {
        let log = run.log_file().to_path_buf();
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = ";
        wait_while_running(run, "a refusal in the log", PATIENCE, || {
            Self::sql(server, &format!("{end}'{USER}'"))?;
            let log = std::fs::read_to_string(&log)?;
            Ok(self.said.iter().all(|said| log.contains(said)))
        })
    }

    fn open(&self, server: &Cluster) -> Result<()> {
        match self.open {
            "" => {
                hba(server, &|rules| rules.split_once('\n').map_or("", |(_, rest)| rest).to_owned())
            }
            open => Self::sql(server, open),
        }
    }
}

/// Changes the rules for connections.
fn hba(server: &Cluster, change: &dyn Fn(&str) -> String) -> Result<()> {
    let file = server.data_dir().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&file)?;
    std::fs::write(&file, change(&rules))?;
    Gate::sql(server, "SELECT pg_reload_conf()")
}

#[test]
fn a_server_that_refuses_the_sessions_of_a_stream_is_tried_until_it_accepts_them() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id serial PRIMARY KEY)")?;
        let role = "CREATE ROLE gated LOGIN REPLICATION IN ROLE pg_read_all_data";
        site.publisher.sql(DB, role)?;
        site.subscriber.sql(DB, "CREATE ROLE gated LOGIN SUPERUSER")?;
        let [publisher, subscriber] = [&site.publisher, &site.subscriber]
            .map(|server| server.conninfo(DB).replace("user=postgres", &format!("user={USER}")));
        let program = site.program_between(&publisher, &subscriber);
        for (server, code) in [(&site.publisher, 4), (&site.subscriber, 5)] {
            let mut run = site.spawn_streaming(&program)?;
            let replication = (code == 4).then_some(&REPLICATION);
            for gate in GATES.iter().chain(replication) {
                gate.close(server)?;
                gate.turn_away(server, &mut run)?;
                gate.open(server)?;
                site.publisher.sql(DB, "INSERT INTO t DEFAULT VALUES")?;
                site.wait_until_applied(&mut run)?;
            }
            run.terminate()?;
            expect_exit(&mut run, 0, &[])?;
            // A process that has not streamed yet may have wrong settings.
            let gate = &GATES[0];
            gate.close(server)?;
            expect_exit(&mut site.spawn(&program)?, code, &gate.said)?;
            gate.open(server)?;
        }
    }
    Ok(())
}

/// What only a user can mend does not keep a script waiting.
#[test]
fn a_run_with_a_goal_ends_when_a_server_refuses_its_sessions() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let program = site.program().args(["--until", "FF/0"]);
    let mut run = site.spawn_streaming(&program)?;
    let close = "ALTER DATABASE postgres ALLOW_CONNECTIONS false";
    Gate::sql(&site.publisher, close)?;
    let end = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active";
    Gate::sql(&site.publisher, end)?;
    expect_exit(&mut run, 4, &["55000", "ALLOW_CONNECTIONS true"])
}
