//! An event trigger on `login`, which changes settings of each new session (17 or later).

use crate::support::on_versions;

/// It fires after the settings that were requested at the start of the session.
#[test]
fn settings_that_it_makes_do_not_matter() {
    on_versions(&[(18, 18)], |mut case| {
        // Values in binary format do not depend on settings.
        case.tool.args = vec!["--binary=off".to_owned()];
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, d date, iv interval, b bytea, f float8, ts timestamptz)",
        );
        case.publish("FOR TABLE t");
        // The subscriber reads dates in another order than the publisher would write them.
        case.publisher.sql(
            "CREATE FUNCTION logs_in() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN \
               PERFORM set_config('datestyle', 'SQL, DMY', false), set_config('intervalstyle', 'sql_standard', false), \
                 set_config('extra_float_digits', '-10', false), set_config('timezone', 'Asia/Kolkata', false), \
                 set_config('bytea_output', 'escape', false), set_config('search_path', 'nowhere', false); END$$; \
             CREATE EVENT TRIGGER logs_in ON login EXECUTE FUNCTION logs_in(); \
             ALTER EVENT TRIGGER logs_in ENABLE ALWAYS",
        );
        let row = |id| {
            format!(
                "INSERT INTO public.t VALUES ({id}, '2024-02-01', '-1 day +2 h', '\\x00ff', 0.1::float8 + 0.2, \
                 '2024-02-01 03:04:05.678+09')"
            )
        };
        case.publisher.sql(&row(1));
        case.run_until_current();
        case.publisher.sql(&row(2));
        case.run_until_current();
        let equal = "SELECT count(*) FROM public.t WHERE d = '2024-02-01' AND iv = '-1 day +2 h' \
                     AND b = '\\x00ff' AND f = 0.1::float8 + 0.2 AND ts = '2024-02-01 03:04:05.678+09'";
        assert_eq!(case.subscriber.value(equal), "2");
    });
}

/// Otherwise every text would be stored as another one.
#[test]
fn the_encoding_that_it_makes_does_not_matter() {
    on_versions(&[(17, 17), (18, 18)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publish("FOR TABLE t");
        case.both(
            "CREATE FUNCTION logs_in() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN \
               PERFORM set_config('client_encoding', 'LATIN1', false); END$$; \
             CREATE EVENT TRIGGER logs_in ON login EXECUTE FUNCTION logs_in(); \
             ALTER EVENT TRIGGER logs_in ENABLE ALWAYS",
        );
        for (id, binary) in [(1, "off"), (2, "auto")] {
            case.tool.args = vec![format!("--binary={binary}")];
            case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, U&'caf\\00e9')"));
            case.run_until_current();
        }
        let right = "SELECT count(*) FROM t WHERE v = U&'caf\\00e9'";
        assert_eq!(case.subscriber.value(right), "2");
    });
}
