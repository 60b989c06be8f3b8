//! Threads of a scope, where the operating system may refuse one.
//!
//! [`std::thread::Scope::spawn`] panics then. In a destructor, a panic may abort the process, with all of its
//! subscriptions.

use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use crate::error::{Failure, Result};
use crate::observe::events::Concern;

/// Starts a thread, for the subscription of the calling one.
pub(crate) fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new()
        .name(name.to_owned())
        .spawn_scoped(scope, Concern::keep(work))
        .map_err(|e| Failure::refused_by_system(&format!("start thread \"{name}\""), &e))
}

/// Drops a value that waits for others to end, in a thread of its own; in the calling thread if the system refuses
/// one.
pub(crate) fn drop_beside<'scope, T: Send + 'scope>(scope: &'scope Scope<'scope, '_>, value: T) {
    drop_in(Builder::new(), scope, value);
}

fn drop_in<'scope, T: Send + 'scope>(thread: Builder, scope: &'scope Scope<'scope, '_>, value: T) {
    // A closure that no thread executes is dropped here, with the value.
    if let Err(error) = thread.spawn_scoped(scope, Concern::keep(move || drop(value))) {
        tracing::debug!(%error, "no thread to end another one; this one does it");
    }
}

/// Does both at the same time; one after the other if the system refuses a thread. `None` if `one` panicked in its
/// thread.
pub(crate) fn both<A: Send, B>(
    one: impl FnOnce() -> A + Send,
    other: impl FnOnce() -> B,
) -> (Option<A>, B) {
    both_in(Builder::new(), one, other)
}

fn both_in<A: Send, B>(
    thread: Builder,
    one: impl FnOnce() -> A + Send,
    other: impl FnOnce() -> B,
) -> (Option<A>, B) {
    let one = Mutex::new(Some(one));
    let do_one = || {
        let one = one.lock().unwrap_or_else(PoisonError::into_inner).take();
        one.map(|one| one())
    };
    std::thread::scope(|scope| match thread.spawn_scoped(scope, Concern::keep(do_one)) {
        Ok(thread) => {
            let other = other();
            (thread.join().ok().flatten(), other)
        }
        Err(error) => {
            tracing::debug!(%error, "no thread for one of two requests; they are made one after the other");
            (do_one(), other())
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::{Builder, current, scope};

    use super::{both, both_in, drop_in, spawn};

    /// A thread with a stack that no system has room for.
    fn refused() -> Builder {
        Builder::new().stack_size(1 << 62)
    }

    #[test]
    fn a_value_is_dropped_before_the_scope_ends_with_and_without_a_thread() {
        struct Told(std::sync::mpsc::Sender<std::thread::ThreadId>);
        impl Drop for Told {
            fn drop(&mut self) {
                self.0.send(current().id()).unwrap();
            }
        }
        let (sender, dropped) = channel();
        scope(|scope| drop_in(refused(), scope, Told(sender.clone())));
        assert_eq!(dropped.try_recv(), Ok(current().id()));
        scope(|scope| drop_in(Builder::new(), scope, Told(sender)));
        assert_ne!(dropped.try_recv().unwrap(), current().id());
        assert!(dropped.try_recv().is_err());
    }

    #[test]
    fn both_are_done_with_and_without_a_thread() {
        let own = current().id();
        let (one, other) = both_in(refused(), || (current().id(), "one"), || "other");
        assert_eq!((one, other), (Some((own, "one")), "other"));
        let (one, other) = both(|| current().id(), || "other");
        assert!(one.is_some_and(|id| id != own) && other == "other");
    }

    #[test]
    fn a_thread_has_its_name() {
        let name = scope(|scope| {
            let thread = spawn(scope, "named", || current().name().map(str::to_owned)).unwrap();
            thread.join().unwrap()
        });
        assert_eq!(name.as_deref(), Some("named"));
    }
}
