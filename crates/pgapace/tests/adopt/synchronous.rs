//! Commits of the publisher wait for the native subscription that is adopted.

use testbed::Result;

use super::subscribe;
use crate::support::{DB, NAME, PATIENCE, Site, Tool, one_or_all};

const NATIVE: &str = "native";

/// Without the native worker, nobody would ever answer commits that wait for its name.
#[test]
fn a_name_for_which_no_commit_waits_is_refused() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        subscribe(&site, NATIVE)?;
        site.publisher.set("synchronous_standby_names", NATIVE)?;
        let between = site.tool();
        let adopt = |name: &str, args: &[&str]| {
            let mut tool = between.clone();
            tool.name = name.to_owned();
            let all: Vec<_> = ["--subscription", NATIVE].iter().chain(args).copied().collect();
            tool.finish("adopt", &all)
        };
        for args in [&["--dry-run"][..], &[]] {
            adopt(NAME, args).expect(3, &["commits would wait", "--name native"]);
        }
        let enabled = "SELECT subenabled FROM pg_subscription";
        assert_eq!(site.subscriber.query_one_text(DB, enabled)?, "t");
        let planned = adopt(NATIVE, &["--dry-run"]);
        assert!(planned.stdout.contains("commits wait until"), "{}", planned.stdout);
        adopt(NATIVE, &[]).expect(0, &[]);
        let mut tool = site.tool();
        tool.name = NATIVE.to_owned();
        let mut client = site.publisher.connect(DB)?;
        let waiting = std::thread::spawn(move || {
            client.batch_execute("INSERT INTO t VALUES (1)").map_err(|e| e.to_string())
        });
        let mut run = site.spawn_streaming(&tool.program("run"))?;
        assert_eq!(waiting.join().expect("the client panicked"), Ok(()), "{}", run.log());
        run.terminate()?;
        run.wait(PATIENCE)?;
        released(&site, &tool)?;
        site.publisher.set("synchronous_standby_names", "")?;
    }
    Ok(())
}

/// The native worker answers under the name of its subscription, or that of its connection string.
fn released(site: &Site, tool: &Tool) -> Result<()> {
    let release = |args: &[&str]| tool.finish("release", &[args, &["--dry-run"]].concat());
    release(&[]).expect(0, &[]);
    // Its owner has given it another name meanwhile.
    site.subscriber.sql(DB, &format!("ALTER SUBSCRIPTION {NATIVE} RENAME TO other"))?;
    release(&[]).expect(3, &["not \"other\",", "ALTER SUBSCRIPTION \"other\" CONN"]);
    let conninfo = site.publisher.conninfo(DB);
    let named = format!("{conninfo} application_name={NATIVE}");
    let change = |sql: &str| site.subscriber.sql(DB, sql);
    let quoted = named.replace('\'', "''");
    change(&format!("ALTER SUBSCRIPTION other CONNECTION '{quoted}'"))?;
    release(&[]).expect(0, &[]);
    // One that is created.
    change("DROP SUBSCRIPTION other")?;
    let create = ["--subscription", "third", "--connection"];
    release(&[&create[..], &[&conninfo]].concat())
        .expect(3, &["not \"third\",", "application_name=native to --conn"]);
    release(&[&create[..], &[&named]].concat()).expect(0, &[]);
    Ok(())
}
