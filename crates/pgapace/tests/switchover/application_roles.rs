//! Roles of applications, which need the same privileges on the new side.

use super::{switchover, two_way_case};
use crate::support::{Case, Finished, one_or_all};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// A case with a second table, whose process does not run.
fn case_with_tables(publisher: u16, subscriber: u16) -> Case {
    let case = two_way_case(publisher, subscriber);
    case.both("CREATE TABLE other (id int PRIMARY KEY)");
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE other");
    case.subscriber.sql("ALTER PUBLICATION pgapace_back ADD TABLE other");
    case.run_until_current();
    case
}

fn plan(case: &Case) -> Finished {
    let planned = switchover(&case.tool, &["--plan"]);
    planned.expect(3, &["no process applies"]);
    planned
}

fn drop_roles(case: &Case, roles: &[&str]) {
    for database in [&case.publisher, &case.subscriber] {
        for role in roles {
            database.sql(&format!(
                "DO $$ BEGIN IF to_regrole('{role}') IS NOT NULL THEN \
                   EXECUTE 'DROP OWNED BY {role} CASCADE; DROP ROLE {role}'; END IF; END $$"
            ));
        }
    }
}

/// As a member of the owner or of a group, as a superuser, or because everybody has it.
#[test]
fn a_privilege_counts_whichever_way_a_role_has_it() {
    for &(publisher, subscriber) in one_or_all(&BOTH) {
        let case = case_with_tables(publisher, subscriber);
        let named = |role: &str| format!("{role}_{}", case.tool.name);
        let [clerk, reader, owner] = ["clerk", "reader", "owner"].map(named);
        case.publisher.sql(&format!(
            "CREATE ROLE {clerk}; GRANT SELECT, INSERT, UPDATE, DELETE ON orders, other TO {clerk}; \
             CREATE ROLE {reader}; GRANT SELECT ON other TO {reader}; GRANT SELECT ON orders TO PUBLIC"
        ));
        case.subscriber.sql(&format!(
            "CREATE ROLE {owner}; ALTER TABLE orders OWNER TO {owner}; \
             GRANT ALL ON other TO {owner}; CREATE ROLE {clerk}; GRANT {owner} TO {clerk}; \
             CREATE ROLE {reader}; GRANT SELECT ON orders, other TO PUBLIC"
        ));
        let planned = plan(&case);
        assert!(!planned.log.contains("GRANT"), "{}", planned.log);
        case.subscriber
            .sql(&format!("REVOKE {owner} FROM {clerk}; REVOKE ALL ON orders FROM PUBLIC"));
        let planned = plan(&case);
        for grant in [
            &format!(
                "subscriber: GRANT DELETE, INSERT, SELECT, UPDATE ON \"public\".\"orders\" TO \"{clerk}\"; \
              GRANT DELETE, INSERT, UPDATE ON \"public\".\"other\" TO \"{clerk}\";"
            ),
            "subscriber: GRANT SELECT ON \"public\".\"orders\" TO PUBLIC;",
        ] {
            assert!(planned.log.contains(grant), "{grant}: {}", planned.log);
        }
        case.subscriber
            .sql(&format!("REVOKE ALL ON other FROM PUBLIC; ALTER ROLE {reader} SUPERUSER"));
        let planned = plan(&case);
        let grant = format!(
            "GRANT DELETE, INSERT, SELECT, UPDATE ON \"public\".\"orders\", \"public\".\"other\" TO \"{clerk}\";"
        );
        assert_eq!(planned.log.matches(&grant).count(), 1, "{}", planned.log);
        assert!(!planned.log.contains(&reader), "{}", planned.log);
        drop_roles(&case, &[&clerk, &reader, &owner]);
    }
}

/// They read the publisher's tables, and nothing on the subscriber.
#[test]
fn the_publisher_roles_of_pgapace_are_not_needed_on_the_subscriber() {
    for &(publisher, subscriber) in one_or_all(&BOTH) {
        let mut case = case_with_tables(publisher, subscriber);
        let named = |role: &str| format!("{role}_{}", case.tool.name);
        let [reader, clerk] = ["reads", "writes"].map(named);
        case.publisher.sql(&format!(
            "CREATE ROLE {reader} LOGIN REPLICATION; CREATE ROLE {clerk}; \
             GRANT SELECT ON orders, other, orders_id_seq TO {reader}, {clerk}"
        ));
        let administrator = case.tool.clone();
        case.tool.publisher = format!("{} user={reader}", administrator.publisher);
        let process = case.start();
        // The verb has the role of the process, or another one.
        for tool in [&case.tool, &administrator] {
            let planned = switchover(tool, &["--plan"]);
            planned.expect(3, &[&format!("the subscriber has no role {clerk}")]);
            assert!(!planned.log.contains(&format!("no role {reader}")), "{}", planned.log);
        }
        case.stop(process);
        drop_roles(&case, &[&reader, &clerk]);
    }
}
