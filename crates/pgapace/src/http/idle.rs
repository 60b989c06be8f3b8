//! Connections that have sent no request yet. They make room for others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The idle connections of a server.
#[derive(Clone, Default)]
pub(super) struct IdleConnections(Arc<Mutex<Connections>>);

#[derive(Default)]
struct Connections {
    /// The number of the next connection.
    next: u64,
    /// By number, so the oldest is the first.
    idle: BTreeMap<u64, oneshot::Sender<()>>,
}

impl IdleConnections {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. Returns its number, and what tells that it must be closed.
    pub(super) fn add(&self) -> (u64, oneshot::Receiver<()>) {
        let (close, closed) = oneshot::channel();
        let mut connections = self.connections();
        let number = connections.next;
        connections.next += 1;
        connections.idle.insert(number, close);
        (number, closed)
    }

    /// The connection has sent its request, or has ended.
    pub(super) fn remove(&self, number: u64) {
        self.connections().idle.remove(&number);
    }

    /// Closes the connection that has been idle longest, if there is one.
    pub(super) fn close_oldest(&self) {
        let oldest = self.connections().idle.pop_first();
        if let Some((_, close)) = oldest {
            // A connection that has just ended is closed already.
            let _ = close.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::IdleConnections;

    #[test]
    fn the_oldest_idle_connection_is_closed_first() {
        let idle = IdleConnections::default();
        let [(first, mut one), (_, mut two), (_, mut three)] = [0; 3].map(|_| idle.add());
        idle.remove(first);
        idle.close_oldest();
        // One that has sent its request is not told to close.
        assert_eq!(one.try_recv(), Err(TryRecvError::Closed));
        assert_eq!(two.try_recv(), Ok(()));
        assert_eq!(three.try_recv(), Err(TryRecvError::Empty));
        idle.close_oldest();
        assert_eq!(three.try_recv(), Ok(()));
        idle.close_oldest();
    }
}
