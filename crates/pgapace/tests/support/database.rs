//! A database of a test, on servers that it shares with other tests.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use testbed::Cluster;
use testbed::postgres::{Client, SimpleQueryMessage};

use super::{explain, must};

/// A database of a cluster, with a session for queries and changes.
pub(crate) struct Database<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) name: String,
    pub(super) client: RefCell<Client>,
}

impl<'a> Database<'a> {
    /// Creates a database. `options` follow the name, for example `ENCODING 'LATIN1'`.
    ///
    /// Its files are copied. The other way, in WAL, is the default since PostgreSQL 15. It costs more than twice the
    /// processor time, and the walsenders of all other tests would decode that WAL.
    pub(crate) fn create(cluster: &'a Cluster, name: &str, options: &str) -> Self {
        let strategy = if cluster.binaries().major() >= 15 { "STRATEGY file_copy" } else { "" };
        must(cluster.sql("postgres", &format!("CREATE DATABASE {name} {options} {strategy}")));
        let client = RefCell::new(must(cluster.connect(name)));
        Self { cluster, name: name.to_owned(), client }
    }

    /// Runs statements, as one transaction unless they contain transaction control.
    #[track_caller]
    pub(crate) fn sql(&self, sql: &str) {
        if let Err(error) = self.client.borrow_mut().batch_execute(sql) {
            panic!("{}: {}\n{sql}", self.cluster.name(), explain(&error));
        }
    }

    /// Runs statements that grant or revoke a privilege on a setting, also by DROP OWNED. Settings belong to the server, and
    /// two sessions that do this at once fail with "tuple concurrently updated".
    #[track_caller]
    pub(crate) fn change_setting_privileges(&self, sql: &str) {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        self.sql(sql);
    }

    /// The rows of a query as text, with columns separated by `|` and NULL as `∅`.
    #[track_caller]
    pub(crate) fn rows(&self, sql: &str) -> Vec<String> {
        let messages =
            self.client.borrow_mut().simple_query(sql).unwrap_or_else(|error| {
                panic!("{}: {}\n{sql}", self.cluster.name(), explain(&error))
            });
        let row_text = |message: &SimpleQueryMessage| match message {
            SimpleQueryMessage::Row(row) => {
                let fields: Vec<_> = (0..row.len()).map(|i| row.get(i).unwrap_or("∅")).collect();
                Some(fields.join("|"))
            }
            _ => None,
        };
        messages.iter().filter_map(row_text).collect()
    }

    /// The only row of a query.
    #[track_caller]
    pub(crate) fn value(&self, sql: &str) -> String {
        let mut rows = self.rows(sql);
        assert_eq!(rows.len(), 1, "{sql}");
        rows.remove(0)
    }

    /// Has later sessions of the database find operators of another user before those of PostgreSQL. Each raises an error.
    #[track_caller]
    pub(crate) fn shadow_operators(&self) {
        self.sql(
            "CREATE SCHEMA shadow; DO $do$ DECLARE o record; BEGIN \
             FOR o IN SELECT oprname AS name, l.oid::regtype AS l, r.oid::regtype AS r, oprresult::regtype AS result \
               FROM pg_operator JOIN pg_type l ON l.oid = oprleft JOIN pg_type r ON r.oid = oprright \
               WHERE l.typtype = 'b' AND r.typtype = 'b' \
                 AND oprname IN ('=', '<>', '<', '<=', '>', '>=', '+', '-', '||') \
               UNION ALL SELECT '<=', 'float8', 'numeric', 'bool' \
             LOOP \
               EXECUTE format('CREATE FUNCTION shadow.%I (%s, %s) RETURNS %s LANGUAGE plpgsql AS $f$ \
                 BEGIN RAISE ''operator %s of another user''; END $f$', o.name, o.l, o.r, o.result, o.name); \
               EXECUTE format('CREATE OPERATOR shadow.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = shadow.%I)', \
                 o.name, o.l, o.r, o.name); \
             END LOOP; END $do$",
        );
        self.sql(&format!("ALTER DATABASE {} SET search_path = shadow, pg_catalog", self.name));
    }

    /// Whether this extension is available on the server.
    pub(crate) fn offers(&self, extension: &str) -> bool {
        let sql = "SELECT count(*) FROM pg_available_extensions WHERE name = ";
        self.value(&format!("{sql}'{extension}'")) == "1"
    }

    /// The server's major version.
    pub(crate) fn major(&self) -> u16 {
        self.cluster.binaries().major()
    }

    /// Removes what keeps the database from being dropped, and what a test that failed has left: prepared
    /// transactions, and slots with the walsenders that use them. `postgres` is a session of another database.
    pub(super) fn free(&self, postgres: &mut Client) {
        let prepared =
            format!("SELECT gid FROM pg_prepared_xacts WHERE database = '{}'", self.name);
        for gid in texts(postgres, &prepared) {
            let _ = self.cluster.sql(&self.name, &format!("ROLLBACK PREPARED '{gid}'"));
        }
        // It waits until the walsender has ended.
        let (end, drop) =
            ("pg_terminate_backend(active_pid, 60000)", "pg_drop_replication_slot(slot_name)");
        for (action, which) in [(end, "active"), (drop, "NOT active")] {
            let _ = postgres.batch_execute(&format!(
                "SELECT {action} FROM pg_replication_slots WHERE database = '{}' AND {which}",
                self.name
            ));
        }
    }

    pub(crate) fn conninfo(&self) -> String {
        self.cluster.conninfo(&self.name)
    }

    /// Opens another session.
    pub(crate) fn connect(&self) -> Client {
        must(self.cluster.connect(&self.name))
    }
}

/// The first column of a query's rows; nothing if it fails.
pub(super) fn texts(session: &mut Client, sql: &str) -> Vec<String> {
    let text = |message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    session.simple_query(sql).unwrap_or_default().into_iter().filter_map(text).collect()
}
