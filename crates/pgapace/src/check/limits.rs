//! Limits of a server: connections, slots, walsenders. Each check compares them with what its subscription needs, and
//! [`add_up`] with what the subscriptions of a file need together.

use crate::check::report::{Fix, Report, Severity, Side};
use crate::check::service::Service;
use crate::check::subscriber::count;

/// Room that a fix leaves beyond what is needed.
const SPARE: i64 = 8;

/// A limit of a server.
#[derive(Debug)]
pub(super) struct Limit {
    pub(super) topic: &'static str,
    /// Whose, for messages: ` of role x`; empty for the whole server.
    pub(super) of: String,
    pub(super) used: i64,
    pub(super) most: i64,
    pub(super) raise: Raise,
}

/// How a limit is raised.
#[derive(Debug)]
pub(super) enum Raise {
    /// A setting, of which so many are reserved for others.
    Setting { service: Service, side: Side, name: &'static str, reserved: i64 },
    /// ALTER ROLE or ALTER DATABASE, with the name.
    Alter(String),
}

impl Limit {
    /// The fix that makes room for so many.
    pub(super) fn raise(&self, to: i64) -> Fix {
        match &self.raise {
            Raise::Setting { service, side, name, reserved } => {
                service.set(*side, name, to + reserved)
            }
            Raise::Alter(what) => Fix::Sql(format!("{what} CONNECTION LIMIT {to};")),
        }
    }

    /// The same with some room to spare. A limit is never lowered.
    pub(super) fn raise_by(&self, needed: i64) -> Fix {
        self.raise(self.most.max(self.used + needed + SPARE))
    }
}

/// How much of a limit a subscription needs. Other subscriptions of the same file may need the same limit.
#[derive(Debug)]
pub(super) struct LimitNeed {
    pub(super) side: Side,
    /// As [`super::server`] calls it.
    pub(super) server: String,
    pub(super) limit: Limit,
    /// A run does not begin without.
    pub(super) needed: i64,
    /// A run can have them later.
    pub(super) later: i64,
    /// Sessions that apply, at the start and at most. The subscriptions of a process share them: as many as the one
    /// with most has, and one each.
    pub(super) workers: [usize; 2],
}

impl LimitNeed {
    fn is_same(&self, other: &Self) -> bool {
        let key = |need: &Self| (need.server.clone(), need.limit.topic, need.limit.of.clone());
        key(self) == key(other)
    }

    fn needs_any(&self) -> bool {
        self.needed + self.later > 0 || self.workers[1] > 0
    }
}

/// Adds up what the subscriptions of a file need. The finding is one of the first subscription that needs something.
pub(crate) fn add_up(reports: &mut [Report]) {
    let taken = reports.iter_mut().enumerate().flat_map(|(place, report)| {
        std::mem::take(&mut report.limits).into_iter().map(move |need| (place, need))
    });
    let needs: Vec<_> = taken.filter(|(_, need)| need.needs_any()).collect();
    for (first, (place, need)) in needs.iter().enumerate() {
        if needs[..first].iter().any(|(_, other)| other.is_same(need)) {
            continue;
        }
        let all: Vec<_> = needs[first..]
            .iter()
            .map(|(_, need)| need)
            .filter(|other| other.is_same(need))
            .collect();
        // The subscription has a finding of its own where it alone needs too much.
        if all.len() > 1
            && let Some((severity, message, fix)) = short(&all)
        {
            reports[*place].add(severity, need.side, need.limit.topic, message).fix(fix);
        }
    }
}

/// The finding if a limit is too low for all of these needs.
fn short(all: &[&LimitNeed]) -> Option<(Severity, String, Fix)> {
    let first = all.first()?;
    let with_workers = all.iter().filter(|need| need.workers[1] > 0).count();
    let workers = |at: usize| {
        let most = all.iter().map(|need| need.workers[at]).max().unwrap_or(0);
        count(most.max(with_workers))
    };
    let needed = all.iter().map(|need| need.needed).sum::<i64>() + workers(0);
    let later = all.iter().map(|need| need.later).sum::<i64>() + workers(1) - workers(0);
    // Sessions of the checks themselves may have been counted.
    let used = all.iter().map(|need| need.limit.used).min().unwrap_or(0);
    let Limit { topic, of, most, .. } = &first.limit;
    if most - used >= needed + later {
        return None;
    }
    let severity = if most - used < needed { Severity::Blocker } else { Severity::Warning };
    let mut message = format!(
        "{topic}{of}: {used} of {most} are in use; the subscriptions of this configuration need {needed} more together"
    );
    if later > 0 {
        message.push_str(&format!(
            ", and up to {later} more to copy tables, and if more sessions apply faster"
        ));
    }
    Some((severity, message, first.limit.raise_by(needed + later)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(used: i64, most: i64, needed: i64, workers: [usize; 2]) -> LimitNeed {
        let raise = Raise::Alter("ALTER ROLE r".to_owned());
        let limit = Limit { topic: "rolconnlimit", of: " of role r".to_owned(), used, most, raise };
        LimitNeed {
            side: Side::Subscriber,
            server: "s".to_owned(),
            limit,
            needed,
            later: 1,
            workers,
        }
    }

    fn added(needs: Vec<LimitNeed>) -> Vec<(Severity, String)> {
        let report = |need| {
            let mut report = Report::new("one");
            report.limits.push(need);
            report
        };
        let mut reports: Vec<_> = needs.into_iter().map(report).collect();
        add_up(&mut reports);
        let findings = reports.into_iter().flat_map(|report| report.findings);
        findings.map(|finding| (finding.severity, finding.message)).collect()
    }

    #[test]
    fn subscriptions_share_the_sessions_that_apply() {
        // Three of each, and five that apply; three more for copies, and three for more workers.
        let three = |most| {
            vec![need(1, most, 3, [1, 8]), need(2, most, 3, [5, 8]), need(1, most, 3, [1, 1])]
        };
        assert!(added(three(21)).is_empty());
        let said = "rolconnlimit of role r: 1 of 20 are in use; the subscriptions of this configuration need 14 more \
                    together, and up to 6 more to copy tables, and if more sessions apply faster";
        assert_eq!(added(three(20)), [(Severity::Warning, said.to_owned())]);
        assert_eq!(added(three(14))[0].0, Severity::Blocker);
    }

    #[test]
    fn one_subscription_and_other_servers_are_not_added_up() {
        assert!(added(vec![need(1, 2, 3, [1, 1])]).is_empty());
        let other = LimitNeed { server: "other".to_owned(), ..need(1, 2, 3, [1, 1]) };
        assert!(added(vec![need(1, 2, 3, [1, 1]), other]).is_empty());
    }
}
