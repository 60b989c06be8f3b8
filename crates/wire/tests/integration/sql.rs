//! Whole statements.

use std::time::{Duration, Instant};

use wire::{Error, PreparedStatement, Session, Startup, TransactionStatus};

use super::{MAJORS, server, value, wait_until_it_sleeps};

#[test]
fn values_and_errors() {
    for major in MAJORS {
        let mut session = server(major).session();
        assert_eq!(session.server_version().major(), u32::from(major));
        assert!(session.backend_pid() > 0);
        let rows = session
            .query("SELECT $1::int + 1 AS a, $2::text AS b, 'grün' AS c", &[Some("41"), None])
            .unwrap();
        let row = rows.one().unwrap();
        assert_eq!(row.parse::<i64>(0).unwrap(), 42);
        assert_eq!(row.get_by_name("b"), None);
        assert_eq!(row.get_by_name("c"), Some("grün"));

        let error = session.query("SELECT 1/$1::int", &[Some("0")]).unwrap_err();
        assert_eq!(error.sqlstate(), Some("22012"));
        let error = session.query("SELECT nix", &[]).unwrap_err();
        assert_eq!(error.server_error().unwrap().position, Some(8));
        assert!(!session.is_broken());

        let results = session
            .simple(
                "CREATE TEMP TABLE t (a int); INSERT INTO t VALUES (1), (2); SELECT * FROM t; ;",
            )
            .unwrap();
        assert_eq!(results.len(), 3);
        assert_eq!(results[1].affected(), 2);
        assert_eq!(results[2].iter().map(|row| row.parse::<i32>(0).unwrap()).sum::<i32>(), 3);
        assert_eq!(session.execute("DELETE FROM t WHERE a = $1", &[Some("1")]).unwrap(), 1);
        assert_eq!(session.simple("").unwrap().len(), 0);

        // A statement that cannot be sent leaves the session unchanged.
        session.simple("SELECT '\0'").unwrap_err();
        session.query("SELECT '\0'", &[]).unwrap_err();
        session.copy_in("COPY \0").err().unwrap();
        assert_eq!(value(&mut session, "SELECT 1"), "1");

        session.simple("BEGIN").unwrap();
        assert_eq!(session.transaction_status(), TransactionStatus::InTransaction);
        session.simple("SELECT 1/0").unwrap_err();
        assert_eq!(session.transaction_status(), TransactionStatus::Failed);
        session.simple("ROLLBACK").unwrap();
        assert_eq!(session.transaction_status(), TransactionStatus::Idle);
    }
}

#[test]
fn startup_settings() {
    let server = server(18);
    let startup = Startup {
        application_name: Some("pgapace x".to_owned()),
        replication: false,
        settings: vec![
            ("datestyle".to_owned(), "German".to_owned()),
            ("work_mem".to_owned(), "7MB".to_owned()),
        ],
    };
    let mut session = Session::connect(&server.local(), &startup).unwrap();
    assert_eq!(value(&mut session, "SHOW application_name"), "pgapace x");
    assert_eq!(value(&mut session, "SHOW work_mem"), "7MB");
    assert_eq!(session.parameter("DateStyle"), Some("German, DMY"));
    session.simple("SET datestyle = ISO").unwrap();
    assert_eq!(session.parameter("DateStyle"), Some("ISO, DMY"));
    assert_eq!(session.parameter_at_start("DateStyle"), Some("German, DMY"));
    assert_eq!(session.parameter("client_encoding"), Some("UTF8"));

    let info = server
        .local()
        .with("application_name", "mine")
        .and_then(|info| info.with("options", "-c work_mem=9MB -c lock_timeout=5s"))
        .unwrap();
    let mut session = Session::connect(&info, &startup).unwrap();
    assert_eq!(value(&mut session, "SHOW application_name"), "mine");
    assert_eq!(value(&mut session, "SHOW lock_timeout"), "5s");
    session.simple("SET application_name = 'later'").unwrap();
    assert_eq!(session.parameter("application_name"), Some("later"));
}

#[test]
fn cancel_from_another_thread() {
    for major in MAJORS {
        let server = server(major);
        let mut session = server.session();
        let (handle, pid) = (session.cancel_handle(), session.backend_pid());
        let canceller = std::thread::spawn(move || {
            wait_until_it_sleeps(&server.local(), pid);
            handle.cancel().unwrap();
        });
        let start = Instant::now();
        let error = session.simple("SELECT pg_sleep(60)").unwrap_err();
        assert_eq!(error.sqlstate(), Some("57014"));
        assert!(!error.is_connection_loss());
        assert!(start.elapsed() < Duration::from_secs(30));
        canceller.join().unwrap();
        assert_eq!(value(&mut session, "SELECT 1"), "1");
    }
}

#[test]
fn read_timeout_gives_a_statement_up() {
    let mut session = server(15).session();
    session.set_read_timeout(Some(Duration::from_millis(200)));
    assert!(matches!(session.simple("SELECT pg_sleep(3)"), Err(Error::Timeout)));
    assert!(session.is_broken());
}

#[test]
fn large_values_both_ways() {
    let mut session = server(18).session();
    let large = "x".repeat(60 << 20);
    let rows = session.query("SELECT $1::text || 'y'", &[Some(&large)]).unwrap();
    let back = rows.one().unwrap().str(0).unwrap();
    assert_eq!(back.len(), large.len() + 1);
    assert!(back.ends_with("xy"));
    assert_eq!(value(&mut session, "SELECT 1"), "1");
}

#[test]
fn prepared_statements_are_kept_until_an_error_or_another_text() {
    let divide = PreparedStatement { name: "divide", sql: "SELECT 12 / $1::int" };
    let known = PreparedStatement {
        name: "known",
        sql: "SELECT string_agg(name, ' ' ORDER BY name) || max(prepare_time) FROM pg_prepared_statements",
    };
    for major in MAJORS {
        let mut session = server(major).session();
        let mut both = |by: &str| {
            let [quotient, known] =
                session.query_prepared_each([(divide, &[Some(by)]), (known, &[])])?;
            let text = |rows: &wire::Rows| rows.one().map(|row| row.str(0).map(str::to_owned));
            Ok::<_, Error>((text(&quotient)??, text(&known)??))
        };
        let (first, again) = (both("3").unwrap(), both("4").unwrap());
        assert_eq!((first.0.as_str(), again.0.as_str()), ("4", "3"));
        assert!(first.1.starts_with("divide known"), "{}", first.1);
        assert_eq!(first.1, again.1, "neither was prepared a second time");
        assert_eq!(both("0").unwrap_err().sqlstate(), Some("22012"));
        assert_ne!(both("3").unwrap().1, again.1);
        let another = PreparedStatement { name: "divide", sql: "SELECT 24 / $1::int" };
        let [quotient] = session.query_prepared_each([(another, &[Some("3")])]).unwrap();
        assert_eq!(quotient.one().unwrap().str(0).unwrap(), "8");
    }
}
