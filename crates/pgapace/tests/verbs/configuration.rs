//! Settings from flags, the environment and a configuration file.

use testbed::Program;

use super::command_line::{file, finish};
use crate::support::{Case, executable, must};

/// The subscription of which nothing is reached, so that what stops it is its configuration, or the
/// connection.
fn unreachable() -> Program {
    let nobody = "host=127.0.0.1 port=1 user=u dbname=d";
    executable().args(["run", "--publisher", nobody, "--publication", "p", "--name", "n"]).args([
        "--subscriber",
        nobody,
        "--connect-timeout",
        "0",
    ])
}

#[test]
fn flags_override_the_environment_and_that_the_file() {
    let wrong = file("workers = 70");
    let config = wrong.path().display().to_string();
    let in_file = || unreachable().args(["--config", &config]);
    let said = "--workers must be between 1 and 64";
    for (program, configured) in [
        (in_file(), false),
        (in_file().env("PGAPACE_WORKERS", "2"), true),
        (in_file().env("PGAPACE_WORKERS", "80"), false),
        (in_file().env("PGAPACE_WORKERS", ""), false),
        (in_file().env("PGAPACE_WORKERS", "80").args(["--workers", "2"]), true),
        (unreachable().args(["--workers", "0"]), false),
        (unreachable(), true),
    ] {
        let (code, _, errors) = finish(&program);
        assert_eq!(code, Some(if configured { 5 } else { 3 }), "{program:?}: {errors}");
        assert_eq!(errors.contains(said), !configured, "{program:?}: {errors}");
    }
    assert_eq!(finish(&unreachable().args(["--workers", "many"])).0, Some(2));
}

#[test]
fn a_variable_that_is_not_utf8_is_an_error_and_names_itself() {
    use std::os::unix::ffi::OsStringExt;
    let bad = std::ffi::OsString::from_vec(b"2\xe9".to_vec());
    for variable in ["PGAPACE_WORKERS", "PGAPACE_LOCK_PROBE", "PGPASSWORD"] {
        let (code, _, errors) = finish(&unreachable().env(variable, &bad));
        assert_eq!(code, Some(3), "{variable}: {errors}");
        let said = format!("environment variable {variable} is not valid UTF-8");
        assert!(errors.contains(&said), "{errors}");
    }
}

#[test]
fn a_level_of_the_log_that_does_not_exist_is_an_error() {
    for (level, code) in [("verbose", 3), ("warning", 5), ("", 5)] {
        for program in
            [unreachable().args(["--log-level", level]), unreachable().env("PGAPACE_LOG", level)]
        {
            let (found, _, errors) = finish(&program);
            assert_eq!(found, Some(code), "{level}: {errors}");
            assert!(code == 5 || errors.contains("is not a level"), "{errors}");
        }
    }
}

/// Each setting that has been renamed, by its old variable and its old flag.
#[test]
fn old_names_keep_working() {
    for (variable, said) in [
        ("PGAPACE_LOCK_PROBE", "--deadlock-timeout: \"x\" is not a number"),
        ("PGAPACE_SCHEMA", "--copy-schema: \"x\" is neither true nor false"),
        ("PGAPACE_KEEP", "--keep: \"x\" is neither true nor false"),
    ] {
        let (code, _, errors) = finish(&unreachable().env(variable, "x"));
        assert!(code == Some(3) && errors.contains(said), "{variable}: {errors}");
    }
    let flags = ["--lock-probe=70", "--schema", "--schema=false", "--keep", "--keep=false"];
    for flag in flags {
        let (code, _, errors) = finish(&unreachable().arg(flag));
        assert_eq!(code, Some(5), "{flag}: {errors}");
    }
    let nobody = "host=127.0.0.1 port=1 user=u dbname=d";
    for program in [
        executable().arg("status").env("PGAPACE_TARGET", nobody),
        executable().args(["status", "--target", nobody]),
    ] {
        let (code, _, errors) = finish(&program);
        assert_eq!(code, Some(5), "{errors}");
    }
}

#[test]
fn one_process_runs_two_subscriptions_of_a_file() {
    let case = Case::new(15, 18);
    case.both("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)");
    case.publisher.sql(
        "CREATE PUBLICATION pa FOR TABLE a; CREATE PUBLICATION pb FOR TABLE b; \
         INSERT INTO a VALUES (1); INSERT INTO b VALUES (1), (2)",
    );
    let name = &case.tool.name;
    let config = file(&format!(
        "publisher = \"{}\"\ntarget = \"{}\"\n\
         [[subscription]]\nname = \"{name}a\"\npublication = [\"pa\"]\n\
         [[subscription]]\nname = \"{name}b\"\npublication = [\"pb\"]\n",
        case.publisher.conninfo(),
        case.subscriber.conninfo()
    ));
    let config = config.path().display().to_string();
    let with = |verb| executable().args([verb, "--config", &config]);
    let (code, found, errors) = finish(&with("check"));
    assert_eq!(code, Some(0), "{found}{errors}");
    assert!(found.contains(&format!("subscription {name}a")), "{found}");
    assert!(found.contains(&format!("subscription {name}b")), "{found}");
    let (code, _, errors) = finish(&with("run").args(["--until", "current"]));
    assert_eq!(code, Some(0), "{errors}");
    case.expect_equal(&["a", "b"]);
    let (code, both, _) = finish(&with("status").arg("--json"));
    assert_eq!(code, Some(0));
    let both: serde_json::Value = must(serde_json::from_str(&both));
    assert_eq!(both.as_array().map(Vec::len), Some(2), "{both:#}");
    let (code, _, errors) = finish(&with("drop"));
    assert_eq!(code, Some(3));
    assert!(errors.contains("--name"), "{errors}");
    for end in ["a", "b"] {
        let (code, _, errors) = finish(&with("drop").args(["--name", &format!("{name}{end}")]));
        assert_eq!(code, Some(0), "{errors}");
    }
}

#[test]
fn the_environment_is_enough() {
    let case = Case::new(18, 15);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.publish("FOR TABLE t");
    let with = |verb| {
        executable()
            .arg(verb)
            .env("PGAPACE_PUBLISHER", case.publisher.conninfo())
            .env("PGAPACE_SUBSCRIBER", case.subscriber.conninfo())
            .env("PGAPACE_PUBLICATION", "pub")
            .env("PGAPACE_NAME", &case.tool.name)
            .env("PGAPACE_LOG_FORMAT", "json")
    };
    let (code, _, log) = finish(&with("run").args(["--until", "current"]));
    assert_eq!(code, Some(0), "{log}");
    assert!(log.lines().all(|line| line.starts_with('{')), "{log}");
    case.expect_equal(&["t"]);
    let (_, shown, _) = finish(&with("status"));
    assert!(shown.starts_with(&case.tool.name), "{shown}");
    // A flag wins over the environment.
    let (code, ..) = finish(&with("drop").args(["--name", "no_such"]));
    assert_eq!(code, Some(3));
    assert_eq!(finish(&with("drop")).0, Some(0));
}
