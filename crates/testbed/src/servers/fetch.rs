//! Download of a server build: the archives that zonky publishes in the Maven repository.
//!
//! Few libraries, and none that is asynchronous: they are compiled with `cargo run --release -- demo`.
//!
//! Source: <https://github.com/zonkyio/embedded-postgres-binaries>.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ring::digest;
use rustls::crypto::ring::default_provider;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

use crate::error::{Context, Error, Result};

/// The newest published major version.
pub(super) const NEWEST_MAJOR: u16 = 18;

const REPOSITORY: &str = "https://repo1.maven.org/maven2/io/zonky/test/postgres";
const TIMEOUT: Duration = Duration::from_secs(300);
/// Larger than any archive, in bytes.
const LARGEST: u64 = 256 << 20;

/// Downloads the newest minor version of `major` and unpacks it as `directory`.
pub(super) fn fetch(major: u16, directory: &Path) -> Result<()> {
    eprintln!("fetching PostgreSQL {major} server binaries…");
    let agent = agent();
    let artifact = format!("embedded-postgres-binaries-{}", platform()?);
    let list = get(&agent, &format!("{REPOSITORY}/{artifact}/maven-metadata.xml"))?;
    let version = newest(&String::from_utf8_lossy(&list), major)
        .ok_or_else(|| Error::other(format!("there is no build of PostgreSQL {major}")))?;
    let url = format!("{REPOSITORY}/{artifact}/{version}/{artifact}-{version}.jar");
    let archive = get(&agent, &url)?;
    check(&archive, &String::from_utf8_lossy(&get(&agent, &format!("{url}.sha256"))?), &url)?;
    unpack(archive, directory).context(|| format!("unpack {url}"))?;
    tracing::debug!(version, directory = %directory.display(), "fetched PostgreSQL");
    Ok(())
}

/// Trusts the roots of the system.
fn agent() -> Agent {
    let roots = rustls_native_certs::load_native_certs().certs;
    let roots = roots.iter().map(|root| Certificate::from_der(root).to_owned()).collect();
    let tls = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .build();
    Agent::config_builder().timeout_global(Some(TIMEOUT)).tls_config(tls).build().into()
}

fn get(agent: &Agent, url: &str) -> Result<Vec<u8>> {
    let read = || agent.get(url).call()?.body_mut().with_config().limit(LARGEST).read_to_vec();
    read().map_err(|error| Error::other(format!("download {url}: {error}")))
}

/// How zonky calls this platform.
fn platform() -> Result<String> {
    let system = match std::env::consts::OS {
        "linux" => "linux",
        "macos" => "darwin",
        other => return Err(Error::other(format!("there is no build of PostgreSQL for {other}"))),
    };
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64v8",
        other => return Err(Error::other(format!("there is no build of PostgreSQL for {other}"))),
    };
    let library = if cfg!(target_env = "musl") { "-alpine" } else { "" };
    Ok(format!("{system}-{architecture}{library}"))
}

/// The newest version of `major` in a list of the Maven repository: `<version>18.4.0</version>`.
fn newest(list: &str, major: u16) -> Option<String> {
    let versions = list.split("<version>").skip(1);
    let versions = versions.filter_map(|rest| rest.split_once("</version>").map(|(text, _)| text));
    let numbers = |text: &str| -> Option<Vec<u16>> {
        text.trim().split('.').map(|number| number.parse().ok()).collect()
    };
    let of_major = versions.filter_map(|text| Some((numbers(text)?, text.trim())));
    let of_major = of_major.filter(|(numbers, _)| numbers.first() == Some(&major));
    of_major.max().map(|(_, text)| text.to_owned())
}

fn check(archive: &[u8], sum: &str, url: &str) -> Result<()> {
    let found = digest::digest(&digest::SHA256, archive);
    let found: String = found.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    if sum.split_whitespace().next() == Some(&found) {
        return Ok(());
    }
    Err(Error::other(format!("{url} does not have its published SHA-256 sum")))
}

/// The jar is a zip file with one compressed tar file.
fn unpack(jar: Vec<u8>, directory: &Path) -> std::io::Result<()> {
    let mut jar = zip::ZipArchive::new(Cursor::new(jar))?;
    let inner = jar.file_names().flatten().find(|name| name.ends_with(".txz"));
    let inner = inner.ok_or_else(|| std::io::Error::other("it has no .txz file"))?.into_owned();
    let tar = lzma_rust2::XzReader::new(jar.by_name(&inner)?, true);
    tar::Archive::new(tar).unpack(directory)
}

#[cfg(test)]
mod tests {
    use super::{check, newest};

    #[test]
    fn the_newest_version_is_not_the_last_in_the_alphabet() {
        let list = "<latest>18.0.0</latest><versions><version>17.9.0</version>\n\
                    <version>17.10.0</version><version>18.0.0</version><version>17.0-rc1</version>";
        assert_eq!(newest(list, 17).as_deref(), Some("17.10.0"));
        assert_eq!(newest(list, 18).as_deref(), Some("18.0.0"));
        assert_eq!(newest(list, 16), None);
    }

    #[test]
    fn an_archive_with_another_sum_is_refused() {
        let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  file.jar\n";
        assert!(check(b"abc", sum, "url").is_ok());
        assert!(check(b"abd", sum, "url").is_err() && check(b"abc", "", "url").is_err());
    }
}
