//! Checks of the machine where pgapace runs: the spool directory.

use std::path::Path;

use rustix::fs::statvfs;

use crate::check::report::Reporter;
use crate::cli::output;
use crate::config::{Streaming, Subscription as Config};
use crate::spool::{Spool, default_directory};

const TOPIC: &str = "spool";
/// In bytes. One large transaction can soon use up less space than this.
const LITTLE: u64 = 1 << 30;

pub(super) fn check(config: &Config, reporter: &mut Reporter<'_>) {
    let named = config.spool_directory.as_deref();
    let directory = named.map_or_else(default_directory, Path::to_path_buf);
    let shown = directory.display();
    if let Err(failure) = Spool::new(&directory, None).check() {
        if named.is_some() {
            reporter.block(TOPIC, failure.to_string());
        } else {
            reporter.warn(
                TOPIC,
                format!("{failure}. A run that needs the spool will stop; set --spool-directory"),
            );
        }
        return;
    }
    let free = statvfs(&directory).map(|volume| volume.f_bavail.saturating_mul(volume.f_frsize));
    let Ok(free) = free else {
        reporter.ok(TOPIC, format!("files can be created in {shown}"));
        return;
    };
    let wanted = config.spool_limit.unwrap_or(LITTLE);
    let size = |bytes: u64| output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    let space = size(free);
    if free < wanted && (config.streaming != Streaming::Off || config.two_phase == Some(true)) {
        reporter.warn(
            TOPIC,
            format!(
                "{space} are free in {shown}, where transactions are spooled until they end; it \
                 should have space for the largest ones, at least {}",
                size(wanted)
            ),
        );
    } else {
        reporter.ok(TOPIC, format!("files can be created in {shown}, where {space} are free"));
    }
}
