//! The HTTP server of `pgapace run --http`: metrics, probes, status, and one page.
//!
//! It runs on a thread of its own. It only copies the boards ([`crate::observe::board`]), so a scrape or
//! a slow reader holds up nothing but itself: a connection has one request and ten seconds, and there are
//! at most [`MOST_CONNECTIONS`]. If there are more, those that have sent no request are closed, the oldest
//! first: a probe does not wait for them.

pub(crate) mod access;
mod idle;
mod metrics;
mod page;
mod routes;

use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, oneshot};

use crate::error::{Class, Failure, Result};
use crate::http::access::Access;
use crate::http::idle::IdleConnections;
use crate::http::routes::Routes;
use crate::observe::board::Boards;

/// Connections at the same time.
const MOST_CONNECTIONS: usize = 32;
/// How long a connection may take, from its first byte to the last one of the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running server; it ends when it is dropped.
#[derive(Debug)]
pub(crate) struct HttpServer {
    _ends: oneshot::Sender<()>,
}

impl HttpServer {
    /// Listens on `address`. Other addresses than loopback need a token.
    pub(crate) fn start(address: SocketAddr, access: Access, boards: Boards) -> Result<Self> {
        if !address.ip().is_loopback() && !access.has_token() {
            return Err(Failure::new(
                Class::Config,
                format!("--http {address} is no loopback address, so it needs --http-token-file"),
            )
            .hint("Write a random token into a file that only you can read, or use 127.0.0.1."));
        }
        let failed = |error: std::io::Error| {
            match error.kind() {
            ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable | ErrorKind::PermissionDenied => {
                Failure::new(Class::Config, format!("cannot listen on --http {address}: {error}"))
                    .hint(
                        "Choose an address of this machine and a free port that this user may take, or leave \
                         --http out.",
                    )
            }
            _ => Failure::refused_by_system(&format!("listen on --http {address}"), &error),
        }
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let (ends, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(failed)?;
        let routes = Arc::new(Routes::new(access, boards));
        std::thread::Builder::new()
            .name("http".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    tokio::select! {
                        () = serve(listener, routes) => {}
                        _ = ended => {}
                    }
                });
            })
            .map_err(failed)?;
        tracing::info!(event = "http_listening", address = %bound, "HTTP server is listening");
        Ok(Self { _ends: ends })
    }
}

async fn serve(listener: TcpListener, routes: Arc<Routes>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(event = "http_failed", %error, "HTTP server cannot listen");
            return;
        }
    };
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let idle = IdleConnections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many open files, or a client that is gone already.
                tracing::debug!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if room.available_permits() == 0 {
            idle.close_oldest();
        }
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let (number, closed) = idle.add();
        let (routes, idle) = (Arc::clone(&routes), idle.clone());
        tokio::spawn(async move {
            let service = service_fn(|request| {
                idle.remove(number);
                let response = routes.answer(&request);
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = http1::Builder::new()
                .keep_alive(false)
                .max_buf_size(16 << 10)
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                // A mistake of the client concerns the client alone.
                _ = tokio::time::timeout(PATIENCE, connection) => {}
                Ok(()) = closed => {}
            }
            idle.remove(number);
            drop(place);
        });
    }
}
