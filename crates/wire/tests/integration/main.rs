//! Tests against real servers of an old and a new major version.

mod auth;
mod certificate_kinds;
mod certificates;
mod copy;
mod hosts;
mod loss;
mod pipeline;
mod pipelined_copy;
mod replication;
mod sql;
mod tls;

use std::sync::OnceLock;
use std::time::Duration;

use testbed::{Cluster, servers};
use wire::{ConnInfo, Error, Session, Startup};

use certificates::Certificates;

const MAJORS: [u16; 2] = [15, 18];

/// A server that several tests share, with one user for each authentication method.
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) certificates: Certificates,
}

/// The pg_hba.conf entry of each user.
const HBA: [&str; 8] = [
    "host all u_scram 127.0.0.1/32 scram-sha-256",
    "host all u_md5 127.0.0.1/32 md5",
    "host all u_clear 127.0.0.1/32 password",
    "hostssl all u_cert 127.0.0.1/32 cert",
    "hostssl all u_tls 127.0.0.1/32 trust",
    "host all u_tls 127.0.0.1/32 reject",
    "hostnossl all u_plain 127.0.0.1/32 trust",
    "host all u_plain 127.0.0.1/32 reject",
];

/// The shared server of a major version. A guardian process stops it after the tests.
pub(crate) fn server(major: u16) -> &'static Server {
    static SERVERS: [OnceLock<Server>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
    let at = MAJORS.iter().position(|&known| known == major).unwrap();
    SERVERS[at].get_or_init(|| start(major))
}

/// Starts a server like the shared ones, for a test that changes it.
pub(crate) fn start(major: u16) -> Server {
    let certificates = Certificates::new();
    let binaries = servers::find_or_fetch(major).unwrap();
    let mut builder = Cluster::builder(&binaries)
        .hba(HBA)
        .setting("ssl", "on")
        .setting("ssl_ca_file", "root.crt")
        .setting("ssl_cert_file", "server.crt")
        .setting("ssl_key_file", "server.key");
    for (name, contents) in certificates.server_files() {
        builder = builder.file(name, contents);
    }
    let cluster = builder.start().unwrap();
    cluster
        .sql(
            "postgres",
            "CREATE ROLE u_scram LOGIN PASSWORD 'sécret ''x'; CREATE ROLE u_cert LOGIN;
             CREATE ROLE u_tls LOGIN; CREATE ROLE u_plain LOGIN;
             CREATE ROLE u_clear LOGIN PASSWORD 'clear';
             SET password_encryption = 'md5'; CREATE ROLE u_md5 LOGIN PASSWORD 'md5pw'",
        )
        .unwrap();
    Server { cluster, certificates }
}

impl Server {
    /// A superuser connection over the Unix socket.
    pub(crate) fn local(&self) -> ConnInfo {
        info(&self.cluster.conninfo("postgres"))
    }

    /// A TCP connection as `user`; `extra` contains more parameters.
    pub(crate) fn tcp(&self, user: &str, extra: &str) -> ConnInfo {
        let port = self.cluster.port();
        info(&format!("host=127.0.0.1 port={port} dbname=postgres user={user} {extra}"))
    }

    pub(crate) fn session(&self) -> Session {
        connect(&self.local()).unwrap()
    }
}

/// A connection string that ignores the environment and home directory of the test run.
pub(crate) fn info(text: &str) -> ConnInfo {
    ConnInfo::parse_with_env(text, &|_| None, None).unwrap()
}

pub(crate) fn connect(info: &ConnInfo) -> Result<Session, Error> {
    Session::connect(info, &Startup::default())
}

/// The error message of a connection that must fail.
pub(crate) fn refused(info: &ConnInfo) -> String {
    match connect(info) {
        Ok(session) => panic!("{info} connected: {session:?}"),
        Err(error) => error.to_string(),
    }
}

/// Waits until the session with this process ID executes pg_sleep.
pub(crate) fn wait_until_it_sleeps(observer: &ConnInfo, pid: i32) {
    let mut observer = connect(observer).unwrap();
    let sql = format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE pid = {pid} AND state = 'active' AND query LIKE '%pg_sleep%'"
    );
    testbed::wait_until(Duration::from_secs(60), "the session to sleep", || {
        Ok(value(&mut observer, &sql) == "1")
    })
    .unwrap();
}

/// The first value of a query's result.
pub(crate) fn value(session: &mut Session, sql: &str) -> String {
    session.query(sql, &[]).unwrap().one().unwrap().str(0).unwrap().to_owned()
}

/// Whether the server reports the session as encrypted.
pub(crate) fn is_encrypted(session: &mut Session) -> bool {
    value(session, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == "t"
}
