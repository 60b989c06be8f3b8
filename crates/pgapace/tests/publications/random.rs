//! Tables that join, leave and come back at random while they are copied and streamed.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use testbed::program::Process;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must};

/// A table of the publisher.
#[derive(Debug, Default)]
struct Table {
    published: bool,
    /// It was not published for a while, or made anew.
    has_gap: bool,
    made_anew: bool,
    rows: u32,
}

/// The publisher's session, and what it has done.
struct Publisher<'c> {
    case: &'c Case,
    random: Rng,
    tables: BTreeMap<String, Table>,
    done: Vec<String>,
}

impl Publisher<'_> {
    fn sql(&mut self, sql: String) {
        self.case.publisher.sql(&sql);
        self.done.push(sql);
    }

    fn create(&mut self) {
        let name = format!("r{}", self.tables.len());
        self.case.subscriber.sql(&format!("CREATE TABLE {name} (id int PRIMARY KEY, v int)"));
        self.sql(format!("CREATE TABLE {name} (id int PRIMARY KEY, v int)"));
        self.tables.insert(name.clone(), Table::default());
        self.change(&name);
        if self.random.bool() {
            self.sql(format!("INSERT INTO {name} SELECT -i, 0 FROM generate_series(1, 20000) i"));
        }
        self.publish(&name, true);
    }

    fn table(&mut self, name: &str) -> &mut Table {
        self.tables.get_mut(name).expect("a table")
    }

    fn publish(&mut self, name: &str, published: bool) {
        let verb = if published { "ADD" } else { "DROP" };
        self.sql(format!("ALTER PUBLICATION pub {verb} TABLE {name}"));
        let table = self.table(name);
        table.published = published;
        table.has_gap |= !published;
    }

    fn change(&mut self, name: &str) {
        let table = self.table(name);
        table.rows += 1;
        let row = table.rows;
        let sql = match self.random.u8(0..4) {
            0 => format!("UPDATE {name} SET v = v + {row}"),
            1 => format!("DELETE FROM {name} WHERE id IN (SELECT max(id) FROM {name})"),
            _ => format!("INSERT INTO {name} VALUES ({row}, 0)"),
        };
        self.sql(sql);
    }

    fn step(&mut self) {
        if self.tables.len() < 3 || self.random.u8(0..8) == 0 && self.tables.len() < 12 {
            return self.create();
        }
        let number = self.random.usize(0..self.tables.len());
        let name = self.tables.keys().nth(number).expect("a table").clone();
        let published = self.tables[&name].published;
        match self.random.u8(0..12) {
            0..3 => self.publish(&name, !published),
            3 => {
                self.sql(format!("DROP TABLE {name}"));
                self.sql(format!("CREATE TABLE {name} (id int PRIMARY KEY, v int)"));
                self.table(&name).has_gap = true;
                self.table(&name).made_anew = true;
                self.publish(&name, true);
            }
            _ => self.change(&name),
        }
    }
}

/// No table lacks rows in silence, and none is stale or blocked that was published all the time. With `resync`, tables
/// that have come back are ready. (A table of a dropped one's name is blocked if a start has forgotten that one, because
/// it is not empty.)
fn join_and_leave(versions: (u16, u16), decision: &str, seed: u64) {
    let mut case = Case::new(versions.0, versions.1);
    case.publish("");
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE t");
    case.run_until_current();
    case.tool.args =
        vec![format!("--on-missed-changes={decision}"), "--refresh-interval=1".to_owned()];
    let mut process = case.start();
    let random = Rng::with_seed(seed);
    let mut publisher =
        Publisher { case: &case, random, tables: BTreeMap::new(), done: Vec::new() };
    for _ in 0..80 {
        publisher.step();
        if publisher.random.u8(0..30) == 0 {
            must(process.kill9());
            process = case.start();
        }
        // The pace of the load, so that tables are in all states.
        std::thread::sleep(Duration::from_millis(publisher.random.u64(0..60)));
    }
    let left: Vec<_> = publisher
        .tables
        .iter()
        .filter(|(_, t)| !t.published)
        .map(|(name, _)| name.clone())
        .collect();
    left.iter().for_each(|name| publisher.publish(name, true));
    let Publisher { tables, done, .. } = publisher;
    let seen = |process: &Process| {
        let done = done.iter().map(|sql| format!("{sql};\n")).collect::<String>();
        format!("seed {seed}\n{done}{}", process.log())
    };
    case.publisher.sql("INSERT INTO t VALUES (1)");
    let end = case.publisher.value("SELECT pg_current_wal_insert_lsn()");
    // The publications have been read behind everything, and all that followed from it is done.
    let settled = format!(
        "SELECT (SELECT published_lsn >= '{end}' FROM pgapace.subscription) AND count(*) = {} \
         AND bool_and(state IN ('ready', 'blocked')) AND bool_and(requested IS NULL) FROM pgapace.relation",
        tables.len() + 1
    );
    let mut calm = 0;
    let waited = wait_until(PATIENCE, "all tables to be settled", || {
        calm = if case.subscriber.value(&settled) == "t" { calm + 1 } else { 0 };
        Ok(calm > 30)
    });
    let states = "SELECT table_name, state, stale_lsn, reason FROM pgapace.relation ORDER BY 1";
    assert!(waited.is_ok(), "{:#?}\n{}", case.subscriber.rows(states), seen(&process));
    case.wait_until_applied(&mut process);
    let rows = |database: &crate::support::Database<'_>, name: &str| {
        database.rows(&format!("SELECT id, v FROM {name} ORDER BY id"))
    };
    for (name, table) in &tables {
        let ready = case.subscriber.value(&format!(
            "SELECT state = 'ready' AND stale_lsn IS NULL FROM pgapace.relation WHERE table_name = '{name}'"
        ));
        if ready == "t" {
            let equal = rows(&case.publisher, name) == rows(&case.subscriber, name);
            assert!(equal, "{name} lacks rows in silence\n{}", seen(&process));
        } else {
            assert!(table.has_gap, "{name} lacks nothing\n{}", seen(&process));
            let is_decided = decision == "resync" && !table.made_anew;
            assert!(!is_decided, "{name} is not copied again\n{}", seen(&process));
        }
    }
    case.stop(process);
}

#[test]
fn tables_that_join_and_leave_at_random() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    join_and_leave((18, 18), "stop", seed);
    join_and_leave((15, 15), "resync", seed);
}
