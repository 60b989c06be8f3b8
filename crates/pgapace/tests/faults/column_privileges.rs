//! Privileges that are granted for columns.

use crate::support::{Case, on_versions};

/// A role that may write some columns of a table.
fn writer(case: &mut Case, privileges: &str) -> String {
    let database = case.publisher.name.clone();
    let role = format!("columns_{database}");
    case.subscriber.change_setting_privileges(&format!(
        "CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {database} TO {role}; \
         GRANT SET ON PARAMETER session_replication_role TO {role}; \
         ALTER TABLE t ADD COLUMN extra int DEFAULT 7; GRANT {privileges} ON t TO {role}"
    ));
    case.tool.subscriber = format!("{} user={role}", case.tool.subscriber);
    role
}

#[test]
fn insert_and_update_of_the_published_columns_are_enough() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, a int, b text)");
        case.publish("FOR TABLE t");
        let columns = "(id, a, b)";
        let privileges = format!("SELECT, DELETE, INSERT {columns}, UPDATE {columns}");
        let role = writer(&mut case, &privileges);
        case.publisher.sql("INSERT INTO t SELECT g, g, 'copied' FROM generate_series(1, 50) g");
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        let warning = format!("role {role} lacks TRUNCATE on table public.t");
        assert!(checked.stdout.contains(&warning), "{}", checked.stdout);
        case.run_until_current();
        let change = "INSERT INTO t SELECT g, g, 'new' FROM generate_series(51, 90) g; \
                      UPDATE t SET a = a + 1, b = 'changed' WHERE id > 20; \
                      UPDATE t SET id = id + 100 WHERE id < 10; DELETE FROM t WHERE id % 7 = 0; \
                      UPDATE t SET b = 'one' WHERE id = 11";
        case.publisher.sql(change);
        case.run_until_current();
        let rows = "SELECT id, a, b FROM t ORDER BY id";
        assert_eq!(case.subscriber.rows(rows), case.publisher.rows(rows));

        let lacks = |what: &str| {
            let checked = case.tool.finish("check", &[]);
            checked.expect(6, &[]);
            let lacks = format!("role {role} lacks {what} on table public.t");
            assert!(checked.stdout.contains(&lacks), "{}", checked.stdout);
        };
        case.subscriber.sql(&format!("REVOKE INSERT (b) ON t FROM {role}"));
        lacks("INSERT");
        case.subscriber.sql(&format!("REVOKE UPDATE (id) ON t FROM {role}"));
        lacks("INSERT, UPDATE");
        case.subscriber.sql(&format!("GRANT INSERT, UPDATE ON t TO {role}"));
        case.publisher.sql("TRUNCATE t");
        let refused = case.run();
        refused.expect(9, &["GRANT TRUNCATE ON TABLE"]);
        case.subscriber.sql(&format!("GRANT TRUNCATE ON t TO {role}"));
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0");
    });
}

/// LOCK TABLE needs a privilege to write on the whole table.
#[test]
fn columns_alone_are_not_enough() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, a int)");
    case.publish("FOR TABLE t WITH (publish = 'insert, update')");
    let role = writer(&mut case, "SELECT, INSERT (id, a), UPDATE (id, a)");
    let checked = case.tool.finish("check", &[]);
    checked.expect(6, &[]);
    let lacks = format!("role {role} lacks INSERT, UPDATE, DELETE on table public.t");
    assert!(checked.stdout.contains(&lacks), "{}", checked.stdout);
}
