//! Two subscriptions in opposite directions, each in `synchronous_standby_names` of the server that it reads from.

use testbed::compare::TableName;
use testbed::program::Process;
use testbed::{Cluster, Result, servers, wait_until};

use crate::support::{
    DB, NAME, PATIENCE, Site, Tool, expect_exit, wait_for_event, wait_while_running,
};

const BACK: &str = "sub_back";
/// A commit that waits in a circle would wait for ever.
const LIMIT: &str = "SET statement_timeout = '60s'";

struct TwoWay {
    site: Site,
    over: Process,
    back: Process,
}

impl TwoWay {
    fn start() -> Result<Self> {
        let site = Site::start(&[], &[])?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        site.subscriber.sql(DB, "CREATE PUBLICATION pub FOR ALL TABLES")?;
        let origin = || vec!["--origin".to_owned(), "none".to_owned()];
        let over = Tool { args: origin(), ..site.tool() };
        let (from, to) = (site.subscriber.conninfo(DB), site.publisher.conninfo(DB));
        let mut back = Tool { args: origin(), ..Tool::new(from, to, BACK) };
        back.args.push("--copy-data=false".to_owned());
        let over = site.spawn_streaming(&over.program("run"))?;
        let back = site.spawn_streaming(&back.program("run"))?;
        Ok(Self { site, over, back })
    }

    /// Commits this row on both sides, and waits until the other side has it.
    fn write(&mut self, number: i32) -> Result<()> {
        let insert = |value: i32| format!("{LIMIT}; INSERT INTO t VALUES ({value}, 'x')");
        self.site.publisher.sql(DB, &insert(number))?;
        self.site.subscriber.sql(DB, &insert(-number))?;
        let there = |value: i32| format!("SELECT count(*) FROM t WHERE id = {value}");
        wait_while_running(&mut self.over, "a row of the publisher", PATIENCE, || {
            Ok(self.site.subscriber.query_one_text(DB, &there(number))? == "1")
        })?;
        wait_while_running(&mut self.back, "a row of the subscriber", PATIENCE, || {
            Ok(self.site.publisher.query_one_text(DB, &there(-number))? == "1")
        })
    }

    fn stop(mut self) -> Result<()> {
        for process in [&mut self.over, &mut self.back] {
            process.terminate()?;
            expect_exit(process, 0, &[])?;
        }
        self.site.expect_equal(&[TableName::from("t")])
    }
}

#[test]
fn two_subscriptions_in_opposite_directions_do_not_wait_for_each_other() -> Result<()> {
    let mut both = TwoWay::start()?;
    both.write(1)?;
    both.site.publisher.set("synchronous_standby_names", NAME)?;
    both.site.subscriber.set("synchronous_standby_names", BACK)?;
    for number in 2..6 {
        both.write(number)?;
    }
    let passed = [&both.over, &both.back].map(|process| process.events("opposite_standby_passed"));
    assert!(passed.iter().any(|count| *count > 0), "{passed:?}");
    assert_eq!(both.over.events("synchronous_standby_wait"), 0, "{}", both.over.log());
    both.stop()
}

/// Another standby is to have everything before it is acknowledged.
#[test]
fn a_flush_waits_for_another_standby_beside_the_opposite_subscription() -> Result<()> {
    let mut both = TwoWay::start()?;
    both.site.subscriber.set("synchronous_standby_names", "FIRST 2 (sub_back, absent)")?;
    both.site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
    let end = both.site.publisher_lsn()?;
    wait_for_event(&mut both.over, "opposite_standby_awaited", PATIENCE)?;
    assert_eq!(both.over.events("opposite_standby_passed"), 0, "{}", both.over.log());
    let flushed = format!(
        "SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{NAME}'"
    );
    assert_eq!(both.site.publisher.query_one_text(DB, &flushed)?, "f");
    wait_until(PATIENCE, "status to say so", || {
        let status = both.site.tool().finish("status", &["--check"]);
        Ok(status.code == Some(14) && status.log.contains("acknowledges nothing"))
    })?;
    both.site.publisher.set("synchronous_standby_names", NAME)?;
    let checked = both.site.tool().finish("check", &[]).stdout;
    assert!(checked.contains("may wait for each other for ever"), "{checked}");
    // The other standby is taken out.
    both.site.subscriber.set("synchronous_standby_names", BACK)?;
    let checked = both.site.tool().finish("check", &[]).stdout;
    assert!(!checked.contains("may wait for each other"), "{checked}");
    both.write(2)?;
    both.stop()
}

/// A cascade with one name for each hop: the slot of the next hop has the name of a subscription of the publisher.
#[test]
fn a_flush_waits_for_a_standby_that_has_the_name_of_a_subscription_of_the_publisher() -> Result<()>
{
    let mut site = Site::start(&[], &[])?;
    let ddl = "CREATE TABLE t (id int PRIMARY KEY, v text)";
    site.publish_tables(ddl)?;
    let first = Cluster::builder(&servers::find_or_fetch(18)?).name("first").start()?;
    first.sql(DB, &format!("{ddl}; CREATE PUBLICATION pub FOR ALL TABLES"))?;
    Tool::new(first.conninfo(DB), site.publisher.conninfo(DB), NAME).run_until_current();
    let mut run = site.spawn_streaming(&site.program())?;
    // The next hop is away.
    let slot = format!("SELECT pg_create_logical_replication_slot('{NAME}', 'pgoutput')");
    site.subscriber.sql(DB, &slot)?;
    site.subscriber.set("synchronous_standby_names", NAME)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1, 'x')")?;
    let end = site.publisher_lsn()?;
    wait_for_event(&mut run, "synchronous_standby_wait", PATIENCE)?;
    assert_eq!(run.events("opposite_standby_passed"), 0, "{}", run.log());
    let flushed = format!(
        "SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots WHERE slot_name = '{NAME}'"
    );
    assert_eq!(site.publisher.query_one_text(DB, &flushed)?, "f");
    let checked = site.tool().finish("check", &[]).stdout;
    assert!(!checked.contains("opposite direction"), "{checked}");
    site.subscriber.set("synchronous_standby_names", "")?;
    site.wait_until_applied(&mut run)?;
    run.terminate()?;
    expect_exit(&mut run, 0, &[])?;
    site.expect_equal(&[TableName::from("t")])
}
