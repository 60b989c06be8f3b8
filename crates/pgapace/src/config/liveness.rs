//! When a peer that has vanished is noticed, by this process and by the servers.
//!
//! A machine that loses its power or its network closes no connection. Without these settings, each side
//! may keep its end of a connection for hours.
//!
//! A peer that reads nothing for a while is not dead. A backend reads nothing while it executes a statement or
//! waits for a lock; the receiver reads nothing while its memory is spent, a copy while the other server is
//! slow. TCP_USER_TIMEOUT does not tell the difference. For sockets of this process, `wire` does. A server is
//! given that timeout only for sessions whose replies are always read.

use std::time::Duration;

use wire::{ConnInfo, ConnInfoError};

use crate::config::Subscription;
use crate::error::{Class, Failure, Result};

/// For this process: within a minute. `tcp_user_timeout` is in milliseconds, as in libpq. `connect_timeout` is
/// in seconds, for each address: a server may accept a connection and then stay silent, which keepalives do
/// not notice.
const USUAL: [(&str, &str); 5] = [
    ("keepalives_idle", "30"),
    ("keepalives_interval", "10"),
    ("keepalives_count", "3"),
    ("tcp_user_timeout", "60000"),
    ("connect_timeout", "30"),
];

/// With a standby: within seconds, so that a process which cannot reach one of the servers gives up its
/// subscriptions to one that can. `tcp_user_timeout` is the default of `--takeover-timeout`: when another process has
/// taken a subscription over, this one waits no longer for its old connections. Else, once the network is back, it would
/// wait for their next packet to be sent again, which TCP does after twice the time each time, and would notice the death
/// of others that much later.
const QUICK: [(&str, &str); 5] = [
    ("keepalives_idle", "3"),
    ("keepalives_interval", "2"),
    ("keepalives_count", "2"),
    ("tcp_user_timeout", "5000"),
    ("connect_timeout", "5"),
];

/// The same for the servers, which any role may set for its own sessions. The sessions of a dead machine
/// end by themselves then, also those that a standby may not terminate.
const OF_SERVER: [(&str, &str); 3] =
    [("tcp_keepalives_idle", "3"), ("tcp_keepalives_interval", "2"), ("tcp_keepalives_count", "2")];
/// For the subscriber: keepalives do not notice the death of a client that has not acknowledged a reply. A session
/// that compares tables has none ([`Purpose::Verify`](crate::subscriber::session::Purpose)).
const OF_SUBSCRIBER: (&str, &str) = ("tcp_user_timeout", "7s");
/// For the publisher. The receiver answers at half of it, whatever the subscriber does. It sends its status
/// while it reads nothing, and a walsender that cannot send still reads.
const OF_PUBLISHER: (&str, &str) = ("wal_sender_timeout", "10s");

/// Completes a connection string that says nothing of this.
pub(super) fn usual(mut info: ConnInfo) -> std::result::Result<ConnInfo, ConnInfoError> {
    for (key, value) in USUAL {
        if info.get(key).is_none() {
            info = info.with(key, value)?;
        }
    }
    Ok(info)
}

/// For a process that has no more time than this: an attempt to connect takes no longer, for each address.
pub(crate) fn connecting_within(info: &ConnInfo, limit: Duration) -> ConnInfo {
    let limit = limit.as_millis().div_ceil(1000).max(1);
    let given = info.get("connect_timeout").and_then(|given| given.trim().parse().ok());
    if given.is_some_and(|given: u128| given > 0 && given <= limit) {
        return info.clone();
    }
    let limited = info.clone().with("connect_timeout", &limit.to_string());
    limited.unwrap_or_else(|_| info.clone())
}

/// Changes the settings of both servers for a process with a standby. Values that a connection string
/// gives otherwise stay.
pub(crate) fn for_standby(subscription: &mut Subscription) -> Result<()> {
    let wrong = |error: ConnInfoError| Failure::new(Class::Config, error.to_string());
    subscription.subscriber =
        quick(subscription.subscriber.clone(), OF_SUBSCRIBER).map_err(wrong)?;
    subscription.publisher = quick(subscription.publisher.clone(), OF_PUBLISHER).map_err(wrong)?;
    Ok(())
}

fn quick(
    mut info: ConnInfo,
    of_this_server: (&str, &str),
) -> std::result::Result<ConnInfo, ConnInfoError> {
    for ((key, usual), (_, quick)) in USUAL.into_iter().zip(QUICK) {
        if info.get(key) == Some(usual) {
            info = info.with(key, quick)?;
        }
    }
    let given = info.get("options").unwrap_or_default().to_owned();
    let mut options = given.clone();
    let of_server = OF_SERVER.into_iter().chain([of_this_server]);
    for (name, value) in of_server.filter(|(name, _)| !given.contains(name)) {
        if !options.is_empty() {
            options.push(' ');
        }
        options.push_str(&format!("-c {name}={value}"));
    }
    info.with("options", &options)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{OF_PUBLISHER, OF_SUBSCRIBER, connecting_within, quick};

    #[test]
    fn attempts_to_connect_are_limited() {
        let limit = |text: &str| {
            let info = super::super::conninfo(text).unwrap();
            info.get("connect_timeout").map(str::to_owned)
        };
        assert_eq!(limit("host=a").as_deref(), Some("30"));
        // As in libpq: no limit.
        assert_eq!(limit("host=a connect_timeout=0").as_deref(), Some("0"));
    }

    #[test]
    fn an_attempt_to_connect_takes_no_longer_than_there_is_time() {
        let limit = |text: &str, millis: u64| {
            let info = super::super::conninfo(text).unwrap();
            let info = connecting_within(&info, Duration::from_millis(millis));
            info.get("connect_timeout").map(str::to_owned)
        };
        assert_eq!(limit("host=a", 4200).as_deref(), Some("5"));
        assert_eq!(limit("host=a connect_timeout=3", 4200).as_deref(), Some("3"));
        assert_eq!(limit("host=a connect_timeout=0", 4200).as_deref(), Some("5"));
        assert_eq!(limit("host=a", 0).as_deref(), Some("1"));
    }

    #[test]
    fn settings_of_a_connection_string_stay() {
        let text = "host=a keepalives_idle=99 options='-c tcp_user_timeout=1min'";
        let info = quick(super::super::conninfo(text).unwrap(), OF_SUBSCRIBER).unwrap();
        assert_eq!(info.get("keepalives_idle"), Some("99"));
        assert_eq!(info.get("keepalives_interval"), Some("2"));
        assert_eq!(info.get("connect_timeout"), Some("5"));
        let options = info.get("options").unwrap();
        assert!(options.starts_with("-c tcp_user_timeout=1min -c tcp_keepalives_idle=3"));
        assert!(!options.contains("7s"), "{options}");
    }

    /// The receiver and copies may read nothing for longer.
    #[test]
    fn the_publisher_judges_nobody_by_what_it_cannot_send() {
        let info = quick(super::super::conninfo("host=a").unwrap(), OF_PUBLISHER).unwrap();
        let options = info.get("options").unwrap();
        assert!(options.ends_with(" -c wal_sender_timeout=10s"), "{options}");
        assert!(!options.contains("user_timeout"), "{options}");
    }
}
