//! Logs the notices of servers. Warnings are limited: a trigger can raise one for each row.
//!
//! Of the warnings that come from one place of a server's code, at most one in [`INTERVAL`] is logged at warn
//! level, with the number of those since the one before. The others are logged at debug level.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::ServerError;

/// Time after which a warning from the same place is logged at warn level again.
const INTERVAL: Duration = Duration::from_secs(60);

/// Most places that are told apart in [`INTERVAL`]. The others count as one place.
const MOST_PLACES: usize = 50;

static LIMITER: LazyLock<Mutex<Limiter>> = LazyLock::new(Mutex::default);

/// Logs a notice: severity WARNING at warn level, within the limit, and all others at debug level.
///
/// The text of a warning may quote rows. Field `detail` is one that pgapace does not store.
pub(crate) fn log_notice(notice: &ServerError) {
    let (severity, message, code) = (&notice.severity, &notice.message, &notice.code);
    let repeats = match severity.as_str() {
        "WARNING" => {
            let mut limiter = LIMITER.lock().unwrap_or_else(PoisonError::into_inner);
            limiter.admit(Place::of(notice), Instant::now())
        }
        _ => None,
    };
    let Some(repeats) = repeats else {
        let detail = notice.detail();
        tracing::debug!(sqlstate = %code, detail, "server: {severity}: {message}");
        return;
    };
    let part = |name: &str, text: Option<&str>| {
        text.map_or(String::new(), |text| format!("\n{name}:  {text}"))
    };
    let text = [message.clone(), part("DETAIL", notice.detail()), part("HINT", notice.hint())];
    let text = text.concat();
    tracing::warn!(
        event = "server_warning",
        sqlstate = %code,
        routine = notice.routine.as_deref(),
        repeats,
        detail = text.as_str(),
        "a server sent a warning"
    );
}

/// The place in a server's code that a warning comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Place {
    code: String,
    file: Option<String>,
    line: Option<u32>,
    routine: Option<String>,
    /// The first line of CONTEXT: for RAISE, the function and the line in it.
    context: Option<String>,
}

impl Place {
    fn of(notice: &ServerError) -> Place {
        let context = notice.where_.as_deref().and_then(|context| context.lines().next());
        Place {
            code: notice.code.clone(),
            file: notice.file.clone(),
            line: notice.line,
            routine: notice.routine.clone(),
            context: context.map(str::to_owned),
        }
    }
}

/// Decides which warnings of a process are logged at warn level.
#[derive(Default)]
struct Limiter {
    /// When a warning from each place was logged last, and how many there were since then.
    logged: HashMap<Place, (Instant, u64)>,
}

impl Limiter {
    /// Returns the number of warnings since the one that was logged last, or `None` if this one only counts.
    fn admit(&mut self, place: Place, now: Instant) -> Option<u64> {
        let is_new = !self.logged.contains_key(&place);
        if is_new && self.logged.len() >= MOST_PLACES {
            self.logged.retain(|_, (at, _)| now.saturating_duration_since(*at) < INTERVAL);
        }
        let is_one_too_many = is_new && self.logged.len() >= MOST_PLACES;
        let place = if is_one_too_many { Place::default() } else { place };
        let Some((at, repeats)) = self.logged.get_mut(&place) else {
            self.logged.insert(place, (now, 0));
            return Some(0);
        };
        if now.saturating_duration_since(*at) < INTERVAL {
            *repeats += 1;
            return None;
        }
        *at = now;
        Some(std::mem::take(repeats))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(context: &str) -> Place {
        Place { context: Some(context.to_owned()), ..Place::default() }
    }

    #[test]
    fn one_warning_of_a_place_is_logged_in_an_interval() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        assert_eq!(limiter.admit(place("f"), start), Some(0));
        for _ in 0..1000 {
            assert_eq!(limiter.admit(place("f"), start), None);
        }
        assert_eq!(limiter.admit(place("g"), start), Some(0), "another place");
        assert_eq!(limiter.admit(place("f"), start + INTERVAL), Some(1000));
        assert_eq!(limiter.admit(place("f"), start + INTERVAL), None);
        assert_eq!(limiter.admit(place("f"), start + INTERVAL * 2), Some(1));
    }

    #[test]
    fn places_are_limited_too() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        let logged = |limiter: &mut Limiter, at| {
            let places = (0..1000).map(|number| place(&format!("row {number}")));
            places.filter(|place| limiter.admit(place.clone(), at).is_some()).count()
        };
        assert_eq!(logged(&mut limiter, start), MOST_PLACES + 1);
        assert_eq!(limiter.logged.len(), MOST_PLACES + 1);
        assert_eq!(logged(&mut limiter, start + INTERVAL), MOST_PLACES + 1);
    }

    #[test]
    fn a_place_is_that_of_the_code() {
        let notice = |message: &str, context: &str| {
            let body = format!(
                "SWARNING\0VWARNING\0C01000\0M{message}\0W{context}\0Fpl_exec.c\0L3922\0Rexec_stmt_raise\0\0"
            );
            Place::of(&ServerError::parse(body.as_bytes()))
        };
        let one = notice("row 1", "PL/pgSQL function f() line 1 at RAISE\nSQL statement 1");
        assert_eq!(one, notice("row 2", "PL/pgSQL function f() line 1 at RAISE\nSQL statement 2"));
        assert_ne!(one, notice("row 1", "PL/pgSQL function f() line 2 at RAISE"));
    }
}
