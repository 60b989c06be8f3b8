//! Regimes: the conditions that limit a round in addition to CPU time.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A server setting: name and value.
pub(crate) type Setting = (&'static str, String);
/// The settings of a server.
pub(crate) type ServerSettings = Vec<Setting>;

/// A regime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Regime {
    /// Data directories in memory, if the machine has a memory file system; fsync off.
    Cpu,
    /// Data directories on disk, fsync on.
    Disk,
    /// Like `Cpu`, but each WAL flush of the subscriber waits for this time before it begins.
    SlowCommit(Duration),
    /// The subscriber has tiny buffers and, since PostgreSQL 16, bypasses the page cache.
    Cold,
    /// A network with this round-trip time between the two sides.
    Rtt(Duration),
    /// The publisher seems to run on another machine: its stream was recorded before and is
    /// replayed, while the publisher itself is idle.
    Elsewhere,
}

impl Regime {
    /// The settings of both servers.
    pub(crate) fn both(self) -> ServerSettings {
        vec![
            ("shared_buffers", "512MB".into()),
            ("max_wal_size", "8GB".into()),
            ("checkpoint_timeout", "1h".into()),
            // Before PostgreSQL 16 a native worker starts only after this interval.
            ("wal_retrieve_retry_interval", "100ms".into()),
            ("max_connections", "200".into()),
            ("max_prepared_transactions", "200".into()),
        ]
    }

    /// Additional settings of the publisher.
    pub(crate) fn publisher(self) -> ServerSettings {
        // The publisher must only decode. On the subscriber, autovacuum is part of applying.
        vec![("autovacuum", "off".into())]
    }

    /// Additional settings of the subscriber.
    pub(crate) fn subscriber(self, major: u16) -> ServerSettings {
        match self {
            Self::SlowCommit(delay) => vec![
                ("commit_delay", delay.as_micros().to_string()),
                ("commit_siblings", "0".into()),
            ],
            Self::Cold => {
                let mut settings = vec![("shared_buffers", "32MB".into())];
                if major >= 16 {
                    settings.push(("debug_io_direct", "data".into()));
                }
                settings
            }
            Self::Cpu | Self::Disk | Self::Rtt(_) | Self::Elsewhere => Vec::new(),
        }
    }

    /// Whether the publisher's data is on disk.
    pub(crate) fn publisher_on_disk(self) -> bool {
        self == Self::Disk
    }

    /// Whether the subscriber's data is on disk; direct I/O does not work on a memory file system.
    pub(crate) fn subscriber_on_disk(self) -> bool {
        matches!(self, Self::Disk | Self::Cold)
    }

    /// Whether the publisher flushes WAL.
    pub(crate) fn publisher_durable(self) -> bool {
        self == Self::Disk
    }

    /// Whether the subscriber flushes WAL; otherwise `commit_delay` has no effect.
    pub(crate) fn subscriber_durable(self) -> bool {
        matches!(self, Self::Disk | Self::SlowCommit(_))
    }

    /// The delay of the network in each direction.
    pub(crate) fn one_way(self) -> Option<Duration> {
        match self {
            Self::Rtt(round_trip) => Some(round_trip / 2),
            _ => None,
        }
    }
}

impl fmt::Display for Regime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Disk => f.write_str("disk"),
            Self::Cold => f.write_str("cold"),
            Self::Elsewhere => f.write_str("elsewhere"),
            Self::SlowCommit(delay) => write!(f, "slow-commit:{}ms", delay.as_millis()),
            Self::Rtt(round_trip) => write!(f, "rtt:{}ms", round_trip.as_millis()),
        }
    }
}

/// A delay with its unit.
pub(crate) fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix("ms").and_then(|number| number.parse().ok());
    number
        .filter(|number| (1..=1000).contains(number))
        .map(Duration::from_millis)
        .ok_or_else(|| format!("{text} is not a time from 1ms to 1000ms"))
}

impl FromStr for Regime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "disk" => Ok(Self::Disk),
            None if text == "cold" => Ok(Self::Cold),
            None if text == "elsewhere" => Ok(Self::Elsewhere),
            // commit_delay has its own limit.
            Some(("slow-commit", delay)) => match milliseconds(delay)? {
                delay if delay <= Duration::from_millis(100) => Ok(Self::SlowCommit(delay)),
                _ => Err("slow-commit goes up to 100ms".into()),
            },
            Some(("rtt", time)) => Ok(Self::Rtt(milliseconds(time)?)),
            _ => Err("a regime is cpu, disk, cold, slow-commit:5ms, rtt:5ms or elsewhere".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["cpu", "disk", "cold", "slow-commit:5ms", "rtt:20ms", "elsewhere"] {
            assert_eq!(name.parse::<Regime>().unwrap().to_string(), name);
        }
        for name in ["", "rtt", "rtt:5", "slow-commit:500ms", "cpu:1ms", "rtt:0ms"] {
            assert!(name.parse::<Regime>().is_err(), "{name}");
        }
    }

    #[test]
    fn a_round_trip_has_two_directions() {
        let regime: Regime = "rtt:5ms".parse().unwrap();
        assert_eq!(regime.one_way(), Some(Duration::from_micros(2500)));
    }
}
