//! Settings under which texts are read: columns of other types.

use crate::support::Case;

#[test]
fn settings_of_the_publisher_do_not_matter() {
    let case = Case::new(18, 18);
    case.publisher.sql(&format!(
        "ALTER DATABASE {0} SET array_nulls = off; ALTER DATABASE {0} SET xmloption = document",
        case.publisher.name
    ));
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, a text, x text, v int)");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, a text[], x xml, v int)");
    case.publisher
        .sql("INSERT INTO t SELECT i, '{NULL,a}', 'a<b/>', 1 FROM generate_series(1, 9) i");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.tool.finish("verify", &[]).expect(0, &[]);
    case.subscriber.sql("UPDATE t SET v = 2 WHERE id = 3; DELETE FROM t WHERE id = 5");
    case.tool.finish("verify", &[]).expect(18, &["2 rows differ"]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    let right =
        "SELECT count(*) FROM t WHERE a[1] IS NULL AND a[2] = 'a' AND x::text = 'a<b/>' AND v = 1";
    assert_eq!(case.subscriber.value(right), "9");
    case.tool.finish("verify", &[]).expect(0, &[]);
}
