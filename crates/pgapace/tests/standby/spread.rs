//! Processes with one configuration file share its subscriptions.

use std::time::Duration;

use testbed::Result;

use super::fleet::{Fleet, database};
use super::wait_for;
use crate::support::{PATIENCE, Tool, finish, holds_for, pgapace};

#[test]
fn subscriptions_are_spread_by_weight_and_move_only_if_that_helps() -> Result<()> {
    let mut fleet = Fleet::start(None, &[1, 1, 3, 1])?;
    fleet.join()?;
    fleet.wait_for_loads(&[6])?;
    // One move makes the loads equal: that of the heavy one.
    fleet.join()?;
    fleet.wait_for_loads(&[3, 3])?;
    assert_eq!(fleet.owners()?, [Some(0), Some(0), Some(1), Some(0)]);
    let moves = |fleet: &Fleet| -> Vec<usize> {
        fleet.processes.iter().map(|one| one.events("subscription_moves")).collect()
    };
    holds_for(Duration::from_secs(6), "one move", || Ok(moves(&fleet) == [1, 0]))?;

    let shown = finish(&pgapace("status").args(["--brief", "--config", &fleet.config])).stdout;
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 4, "{shown}");
    for (number, owner) in [0, 0, 1, 0].into_iter().enumerate() {
        let line = lines.iter().find(|line| line.starts_with(&database(number)));
        let process = format!("process {} on ", fleet.processes[owner].pid());
        let line = line.copied().unwrap_or_default();
        assert!(
            line.contains(&process) && line.contains("lag ") && line.contains("1 waiting"),
            "{shown}"
        );
    }

    // A user asks for one: then it moves back, since that is even.
    finish(&pgapace("hand-over").args(["--config", &fleet.config, "--name", &database(2)]))
        .expect(0, &[]);
    assert_eq!(fleet.owners()?.iter().filter(|owner| **owner == Some(1)).count(), 0);

    // The other process runs at once what a process leaves.
    fleet.processes[0].terminate()?;
    fleet.processes[0].wait(PATIENCE)?;
    let stayed = fleet.processes.remove(1);
    let left = std::mem::replace(&mut fleet.processes[0], stayed);
    assert_eq!(left.events("standby_takes_over"), 0, "{}", left.log());
    fleet.wait_for_loads(&[6])?;
    wait_for(&mut fleet.processes[0], "streaming")
}

#[test]
fn a_weight_is_a_number_from_1_to_1000() {
    for weight in ["0", "1001", "-1", "heavy", ""] {
        let tool = Tool::new("host=x".to_owned(), "host=x".to_owned(), "s");
        let finished = tool.finish("run", &[&format!("--weight={weight}")]);
        let said = &finished.log;
        assert!(finished.code != Some(0) && said.contains("weight"), "{weight}: {said}");
    }
}
