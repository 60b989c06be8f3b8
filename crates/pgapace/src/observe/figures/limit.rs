//! The limit of the speed: the publisher, pgapace itself, or the subscriber.

use crate::observe::figures::ThreadShares;

/// A share from which on a thread is said to be at its limit, in percent.
const MOST: f64 = 60.0;

/// Judges by the shares of the last 10 s. `none`: nothing is at its limit.
pub(super) fn limited_by(threads: &[ThreadShares], is_blocked: bool) -> &'static str {
    if is_blocked {
        return "subscriber_lock";
    }
    let share = |thread: &ThreadShares, reason: &str| {
        thread.shares_10s.iter().find(|(name, _)| name == reason).map_or(0.0, |(_, share)| *share)
    };
    let Some(leader) = threads.iter().find(|thread| thread.thread == "leader") else {
        return "none";
    };
    if share(leader, "publisher") >= MOST {
        return "publisher";
    }
    let workers: Vec<_> = threads.iter().filter(|t| t.thread.starts_with("apply")).collect();
    // A worker that has its turn to commit sets the pace, so the busiest one decides.
    let most =
        |reason: &str| workers.iter().map(|worker| share(worker, reason)).fold(0.0, f64::max);
    if most("subscriber") >= MOST {
        "subscriber"
    } else if share(leader, "busy") >= MOST || most("busy") >= MOST {
        "pgapace"
    } else if share(leader, "worker") + share(leader, "subscriber") >= MOST {
        "subscriber"
    } else {
        "none"
    }
}

#[cfg(test)]
mod tests {
    use super::limited_by;
    use crate::observe::figures::ThreadShares;

    fn thread(name: &str, shares: &[(&str, f64)]) -> ThreadShares {
        let shares: Vec<_> =
            shares.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect();
        ThreadShares { thread: name.to_owned(), shares_10s: shares.clone(), shares_1min: shares }
    }

    #[test]
    fn the_busiest_thread_is_the_limit() {
        let idle = [thread("leader", &[("publisher", 99.0), ("busy", 1.0)])];
        assert_eq!(limited_by(&idle, false), "publisher");
        assert_eq!(limited_by(&idle, true), "subscriber_lock");
        let slow = [
            thread("leader", &[("worker", 80.0), ("busy", 20.0)]),
            thread("apply 0", &[("subscriber", 95.0), ("busy", 5.0)]),
            thread("apply 1", &[("idle", 100.0)]),
        ];
        assert_eq!(limited_by(&slow, false), "subscriber");
        let own = [
            thread("leader", &[("busy", 90.0), ("subscriber", 10.0)]),
            thread("apply 0", &[("subscriber", 50.0), ("idle", 50.0)]),
        ];
        assert_eq!(limited_by(&own, false), "pgapace");
        assert_eq!(limited_by(&[], false), "none");
    }
}
