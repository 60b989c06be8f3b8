//! The cost of the catalogue queries, on a server.

use testbed::{Cluster, servers};
use wire::ConnInfo;

use super::queries::{COLUMNS_SQL, DECLARED_SQL};
use crate::subscriber::session::{Purpose, Subscriber};

const COLUMNS: usize = 600;

/// Rows that a plan reads in vain: those that a filter or a condition of a join removes.
fn removed(plan: &str) -> usize {
    let lines = plan.lines().filter(|line| line.contains("Rows Removed by"));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
}

/// A query that compares each column with each other one removes 180 000 rows.
#[test]
fn columns_are_read_without_comparing_each_with_all_others() {
    let cluster = Cluster::builder(&servers::find_or_fetch(18).unwrap()).start().unwrap();
    let info = ConnInfo::parse_with_env(&cluster.conninfo("postgres"), &|_| None, None).unwrap();
    let mut session = Subscriber::new(info, "catalogue").connect(Purpose::Apply).unwrap();
    let columns: Vec<_> = (1..=COLUMNS)
        .map(|number| format!("c{number} varchar({number}) DEFAULT {number}"))
        .collect();
    session.simple(&format!("CREATE TABLE public.broad ({})", columns.join(", "))).unwrap();
    let oids = "ARRAY['public.broad'::pg_catalog.regclass::pg_catalog.oid]";
    for sql in [COLUMNS_SQL, DECLARED_SQL] {
        let sql = format!("EXPLAIN (ANALYZE, TIMING off, COSTS off) {}", sql.replace("$1", oids));
        let rows = session.query(&sql, &[]).unwrap();
        let plan: Vec<_> = rows.iter().map(|row| row.get(0).unwrap().to_owned()).collect();
        let plan = plan.join("\n");
        assert!(removed(&plan) < 20 * COLUMNS, "{plan}");
        assert!(plan.contains(&format!("rows={COLUMNS}")), "{plan}");
    }
}
