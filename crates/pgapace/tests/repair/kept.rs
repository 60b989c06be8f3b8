//! `rebase` and settings that keep rows which only the subscriber has.

use std::fs;

use crate::support::{Case, must, on_versions};

fn ids(case: &Case) -> String {
    case.subscriber.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM t")
}

fn lose_slot(case: &Case, id: u32) {
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    case.publisher.sql(&format!("INSERT INTO t VALUES ({id}, 'theirs')"));
}

#[test]
fn a_rebase_deletes_no_rows_that_the_settings_keep() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t VALUES (1, 'theirs')");
        case.subscriber.sql("INSERT INTO t VALUES (1000, 'local')");
        case.publish("FOR TABLE t");
        let file = case.log_file("keep.toml");
        must(fs::write(&file, "if-not-empty = \"keep\"\n"));
        case.tool.args = vec!["--config".to_owned(), file.display().to_string()];
        case.run_until_current();
        lose_slot(&case, 2);
        let said = ["if-not-empty = keep", "--if-not-empty rebase", "--copy-data=false"];
        case.run().expect(7, &said);
        assert!(case.tool.finish("check", &[]).stdout.contains("--if-not-empty rebase"));
        let epoch = "SELECT epoch FROM pgapace.subscription";
        let before = case.subscriber.value(epoch);
        case.tool.finish("rebase", &[]).expect(3, &said);
        assert_eq!((ids(&case).as_str(), case.subscriber.value(epoch)), ("1 1000", before));
        // The way that the hint names for those who want to keep them.
        case.tool.finish("drop", &[]).expect(0, &[]);
        let anew = ["--copy-data=false", "--until", "current"];
        case.tool.finish("run", &anew).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(18, &["--delete-extra"]);
        case.publisher.sql("UPDATE t SET v = 'later' WHERE id = 2");
        case.run_until_current();
        let later = "SELECT string_agg(id || v, ' ' ORDER BY id) FROM t";
        assert_eq!(case.subscriber.value(later), "1theirs 2later 1000local");
        // And the flag for those who do not.
        lose_slot(&case, 3);
        let rebase = ["--if-not-empty", "rebase"];
        case.tool.finish("rebase", &rebase).expect(0, &["table_rebased"]);
        assert_eq!(ids(&case), "1 2 3");
        case.expect_equal(&["t"]);
    });
}
