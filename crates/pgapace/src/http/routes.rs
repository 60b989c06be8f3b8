//! Requests to answers.

use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;

use crate::http::access::Access;
use crate::http::metrics;
use crate::http::page::Page;
use crate::observe::board::{Boards, CopyShown, LastError, RunPhase, wall};
use crate::observe::events;
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::subscriber::state::statistics::Counters;

/// A leader that shows nothing for so long is stuck.
const STUCK: Duration = Duration::from_secs(300);

type Answer = Response<Full<Bytes>>;

/// The state from which requests are answered.
pub(crate) struct Routes {
    access: Access,
    boards: Boards,
    page: Page,
    started: f64,
}

/// `/api/v1/status`; docs/operation.md documents it.
#[derive(Serialize)]
struct ProcessStatus<'a> {
    version: &'static str,
    /// Seconds since 1970.
    at: f64,
    started_at: f64,
    subscriptions: Vec<SubscriptionStatus<'a>>,
}

#[derive(Serialize)]
struct SubscriptionStatus<'a> {
    name: &'a str,
    phase: RunPhase,
    phase_since: f64,
    last_error: Option<&'a LastError>,
    /// Since the start of the process.
    counters: &'a Counters,
    retries: &'a std::collections::BTreeMap<String, u64>,
    received_bytes: u64,
    tables: std::collections::BTreeMap<&'a str, u64>,
    /// Those that may lack changes, whatever their state; null if that is not known.
    stale_tables: Option<u64>,
    /// Null unless tables are copied.
    copy: Option<&'a CopyShown>,
    /// Null unless it streams.
    figures: Option<&'a Figures>,
}

#[derive(Serialize)]
struct SubscriptionHistory<'a> {
    name: &'a str,
    points: &'a std::collections::VecDeque<Point>,
}

impl Routes {
    pub(crate) fn new(access: Access, boards: Boards) -> Self {
        Self { access, boards, page: Page::new(), started: wall() }
    }

    pub(crate) fn answer(&self, request: &Request<Incoming>) -> Answer {
        let path = request.uri().path();
        let mut answer = if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
            answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            answer
        } else if path == "/livez" {
            self.live()
        } else if path == "/readyz" {
            self.ready()
        } else {
            match self.access.judge(request.headers()) {
                Ok(()) => self.page_or_data(path),
                Err(status) => refused(status),
            }
        };
        let headers = answer.headers_mut();
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if !headers.contains_key(CONTENT_SECURITY_POLICY) {
            let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
            headers.insert(CONTENT_SECURITY_POLICY, nothing);
        }
        answer
    }

    fn page_or_data(&self, path: &str) -> Answer {
        match path {
            "/" => {
                let mut answer =
                    typed(StatusCode::OK, "text/html; charset=utf-8", self.page.html.to_owned());
                if let Ok(policy) = HeaderValue::from_str(&self.page.policy) {
                    answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
                }
                answer
            }
            "/metrics" => typed(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                metrics::text(&self.boards.all(), self.started),
            ),
            "/api/v1/status" => self.status(),
            "/api/v1/events" => json(&events::last()),
            "/api/v1/history" => {
                let all = self.boards.all();
                let all: Vec<_> = all
                    .iter()
                    .map(|(name, shown)| SubscriptionHistory { name, points: &shown.history })
                    .collect();
                json(&all)
            }
            _ => text(
                StatusCode::NOT_FOUND,
                "/ /metrics /livez /readyz /api/v1/status /api/v1/history /api/v1/events\n",
            ),
        }
    }

    /// Whether the process works. A server that is away is no reason to restart it.
    fn live(&self) -> Answer {
        let all = self.boards.all();
        let stuck = all.iter().filter(|(_, shown)| shown.is_stuck(STUCK));
        let stuck: Vec<_> = stuck.map(|(name, _)| name.as_str()).collect();
        if stuck.is_empty() {
            text(StatusCode::OK, "ok\n")
        } else {
            text(StatusCode::SERVICE_UNAVAILABLE, format!("stuck: {}\n", stuck.join(", ")))
        }
    }

    /// Whether all subscriptions stream, here or in another process that this one can replace.
    fn ready(&self) -> Answer {
        let all = self.boards.all();
        let waiting: Vec<_> = all
            .iter()
            .filter(|(_, shown)| !matches!(shown.phase, RunPhase::Streaming | RunPhase::Standby))
            .map(|(name, shown)| format!("{name}: {}", shown.phase.name()))
            .collect();
        if waiting.is_empty() && !all.is_empty() {
            text(StatusCode::OK, "ok\n")
        } else {
            text(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", waiting.join("\n")))
        }
    }

    fn status(&self) -> Answer {
        let all = self.boards.all();
        let subscriptions = all.iter().map(|(name, shown)| SubscriptionStatus {
            name,
            phase: shown.phase,
            phase_since: shown.since,
            last_error: shown.error.as_ref(),
            counters: &shown.counters,
            retries: &shown.retries,
            received_bytes: shown.received_bytes,
            tables: shown
                .tables
                .iter()
                .flat_map(|tables| &tables.by_state)
                .map(|(state, count)| (state.as_str(), *count))
                .collect(),
            stale_tables: shown.tables.as_ref().map(|tables| tables.stale),
            copy: shown.copy.as_deref(),
            figures: (shown.phase == RunPhase::Streaming && shown.figures.at > 0.0)
                .then_some(&*shown.figures),
        });
        json(&ProcessStatus {
            version: env!("CARGO_PKG_VERSION"),
            at: wall(),
            started_at: self.started,
            subscriptions: subscriptions.collect(),
        })
    }
}

fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_string(value) {
        Ok(text) => typed(StatusCode::OK, "application/json", text),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn refused(status: StatusCode) -> Answer {
    let mut answer = text(
        status,
        if status == StatusCode::UNAUTHORIZED {
            "the token of --http-token-file is wanted: Authorization: Bearer <token>\n"
        } else {
            "use localhost or 127.0.0.1 in the address\n"
        },
    );
    if status == StatusCode::UNAUTHORIZED {
        let basic = HeaderValue::from_static("Basic realm=\"pgapace\", charset=\"UTF-8\"");
        answer.headers_mut().insert(WWW_AUTHENTICATE, basic);
    }
    answer
}

fn text(status: StatusCode, text: impl Into<String>) -> Answer {
    typed(status, "text/plain; charset=utf-8", text.into())
}

fn typed(status: StatusCode, content_type: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}
