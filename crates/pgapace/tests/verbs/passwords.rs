//! No password is ever shown.

use testbed::Program;

use super::command_line::{VERBS, finish};
use crate::support::{Case, executable};

#[test]
fn a_connection_string_in_a_wrong_place_shows_no_password() {
    let secret = "hunter2-Zaphod";
    let uri = format!("postgres://u:{secret}@h/d");
    let parameter = format!("postgresql://h/d?user=u&password={secret}");
    let keywords = format!("host=h PASSWORD = '{secret}' user=u");
    for wrong in [&uri, &parameter, &keywords] {
        let misspelled = format!("--subscribr={wrong}");
        for args in [
            ["verify", wrong, ""],
            ["verify", &misspelled, ""],
            ["status", "--json", &format!("--watch={wrong}")],
            ["status", "--name", wrong],
            ["status", "--config", wrong],
            ["status", "--log-level", wrong],
            ["run", "--publisher-file", wrong],
            ["man", wrong, ""],
            ["completions", wrong, ""],
            ["whatif", "--subscriber=host=h", wrong],
        ] {
            let args = args.into_iter().filter(|arg| !arg.is_empty());
            let (code, output, errors) = finish(&executable().args(args.clone()));
            let args: Vec<_> = args.collect();
            assert!(code.is_some_and(|code| code > 0), "{args:?}: {output}");
            assert!(!output.contains(secret) && !errors.contains(secret), "{args:?}: {errors}");
        }
    }
    let (_, _, errors) = finish(&executable().args(["status", &format!("u:{secret}@h/d")]));
    assert!(!errors.contains(secret), "{errors}");
    let (_, _, errors) = finish(&executable().args(["status", "--name", &uri]));
    assert!(errors.contains("--name \"postgres://u:****@h/d\" is not a valid name"), "{errors}");
    let (_, _, errors) =
        finish(&executable().args(["run", "--truncate", &format!("u:{secret}@h")]));
    assert!(!errors.contains(secret) && errors.contains("--truncate"), "{errors}");
    let (_, _, errors) = finish(&executable().args(["run", "--truncate", "public.t@x"]));
    assert!(errors.contains("'public.t@x'"), "{errors}");
}

#[test]
fn no_password_is_shown() {
    let case = Case::new(15, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    // Gives check a command to print.
    case.publisher.sql("CREATE TABLE absent (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let secret = "s3cr3t";
    let away = "host=127.0.0.1 port=1 user=u dbname=d";
    let here = [case.publisher.conninfo(), case.subscriber.conninfo()];
    for [publisher, subscriber] in [here, [away.to_owned(), away.to_owned()]] {
        let with = |program: Program| {
            program
                .env("PGAPACE_PUBLISHER", format!("{publisher} password={secret}"))
                .env("PGAPACE_SUBSCRIBER", format!("{subscriber} password={secret}"))
                .env("PGAPACE_PUBLICATION", "pub")
                .env("PGAPACE_NAME", &case.tool.name)
                .env("PGPASSWORD", secret)
                .env("PGAPACE_LOG", "debug")
        };
        let mut programs = vec![executable().arg("--help"), executable().arg("-h")];
        for verb in VERBS {
            programs
                .extend(["-h", "--help", "--no-such"].map(|flag| executable().args([verb, flag])));
        }
        for verb in ["check", "status", "drop"] {
            programs.push(executable().arg(verb));
        }
        for verb in ["check", "status"] {
            programs.push(executable().args([verb, "--json"]));
        }
        for program in programs {
            let (_, output, errors) = finish(&with(program.clone()));
            assert!(!output.contains(secret), "{program:?}: {output}");
            assert!(!errors.contains(secret), "{program:?}: {errors}");
        }
    }
    for bad in ["postgresql://u:s3cr3t@h:port/d", "host=h password=s3cr3t nonsense"] {
        let (code, output, errors) = finish(&executable().args(["status", "--subscriber", bad]));
        assert_eq!(code, Some(3), "{errors}");
        assert!(!output.contains(secret) && !errors.contains(secret), "{output}{errors}");
    }
}
