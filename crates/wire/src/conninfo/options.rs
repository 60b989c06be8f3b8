//! The connection parameters of libpq and how pgapace treats each.
//!
//! Source: `PQconninfoOptions` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS> and
//! <https://www.postgresql.org/docs/current/libpq-envars.html>.

use std::time::Duration;

use super::{ConnInfoError, Given};

/// One connection parameter.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// Environment variable that sets its default.
    pub(super) env: Option<&'static str>,
    pub(super) support: Support,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Support {
    /// Used.
    Yes,
    /// Used, and never shown.
    Secret,
    /// Accepted without effect, because it tunes a feature that pgapace does not have.
    Ignored,
    /// Rejected when it has a value, because ignoring it could weaken the security that the user
    /// requested.
    Refused,
}

const fn known(name: &'static str, env: &'static str, support: Support) -> Parameter {
    Parameter { name, env: Some(env), support }
}

const fn no_env(name: &'static str, support: Support) -> Parameter {
    Parameter { name, env: None, support }
}

use Support::{Ignored, Refused, Secret, Yes};

pub(super) const PARAMETERS: &[Parameter] = &[
    known("service", "PGSERVICE", Yes),
    known("user", "PGUSER", Yes),
    known("password", "PGPASSWORD", Secret),
    known("passfile", "PGPASSFILE", Yes),
    known("channel_binding", "PGCHANNELBINDING", Yes),
    known("connect_timeout", "PGCONNECT_TIMEOUT", Yes),
    known("dbname", "PGDATABASE", Yes),
    known("host", "PGHOST", Yes),
    known("hostaddr", "PGHOSTADDR", Yes),
    known("port", "PGPORT", Yes),
    known("client_encoding", "PGCLIENTENCODING", Yes),
    known("options", "PGOPTIONS", Yes),
    known("application_name", "PGAPPNAME", Yes),
    no_env("fallback_application_name", Yes),
    no_env("keepalives", Yes),
    no_env("keepalives_idle", Yes),
    no_env("keepalives_interval", Yes),
    no_env("keepalives_count", Yes),
    no_env("tcp_user_timeout", Yes),
    known("sslmode", "PGSSLMODE", Yes),
    known("sslnegotiation", "PGSSLNEGOTIATION", Yes),
    known("sslcompression", "PGSSLCOMPRESSION", Ignored),
    known("sslcert", "PGSSLCERT", Yes),
    known("sslkey", "PGSSLKEY", Yes),
    known("sslcertmode", "PGSSLCERTMODE", Yes),
    no_env("sslpassword", Refused),
    known("sslrootcert", "PGSSLROOTCERT", Yes),
    known("sslcrl", "PGSSLCRL", Refused),
    known("sslcrldir", "PGSSLCRLDIR", Refused),
    known("sslsni", "PGSSLSNI", Yes),
    known("requirepeer", "PGREQUIREPEER", Yes),
    known("require_auth", "PGREQUIREAUTH", Yes),
    known("min_protocol_version", "PGMINPROTOCOLVERSION", Yes),
    known("max_protocol_version", "PGMAXPROTOCOLVERSION", Ignored),
    known("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION", Yes),
    known("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION", Yes),
    known("gssencmode", "PGGSSENCMODE", Yes),
    known("krbsrvname", "PGKRBSRVNAME", Ignored),
    known("gsslib", "PGGSSLIB", Ignored),
    known("gssdelegation", "PGGSSDELEGATION", Ignored),
    no_env("replication", Refused),
    known("target_session_attrs", "PGTARGETSESSIONATTRS", Yes),
    known("load_balance_hosts", "PGLOADBALANCEHOSTS", Yes),
    no_env("scram_client_key", Refused),
    no_env("scram_server_key", Refused),
    no_env("oauth_issuer", Refused),
    no_env("oauth_client_id", Refused),
    no_env("oauth_client_secret", Refused),
    no_env("oauth_scope", Refused),
    known("sslkeylogfile", "PGSSLKEYLOGFILE", Refused),
];

/// Finds a parameter by its keyword.
pub(super) fn find(name: &str) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|parameter| parameter.name == name)
}

/// Whether [`Given::set`] accepts this keyword.
pub(super) fn is_known(name: &str) -> bool {
    find(name).is_some() || name == "requiressl"
}

/// `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// `sslcertmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SslCertMode {
    Disable,
    Allow,
    Require,
}

/// `channel_binding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelBinding {
    Disable,
    Prefer,
    Require,
}

/// `target_session_attrs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionAttrs {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

/// The typed and checked values of all parameters that pgapace uses.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) keepalives: bool,
    pub(crate) keepalives_idle: Option<Duration>,
    pub(crate) keepalives_interval: Option<Duration>,
    pub(crate) keepalives_count: Option<u32>,
    pub(crate) tcp_user_timeout: Option<Duration>,
    pub(crate) sslmode: SslMode,
    pub(crate) ssl_direct: bool,
    pub(crate) sslcertmode: SslCertMode,
    pub(crate) sslsni: bool,
    pub(crate) ssl_min: TlsVersion,
    pub(crate) ssl_max: TlsVersion,
    pub(crate) channel_binding: ChannelBinding,
    pub(crate) session_attrs: SessionAttrs,
    pub(crate) load_balance_random: bool,
    pub(crate) require_auth: AuthMethods,
}

/// The authentication methods that `require_auth` permits, by their names there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AuthMethods {
    allowed: [bool; AUTH_METHODS.len()],
}

const AUTH_METHODS: [&str; 7] =
    ["password", "md5", "gss", "sspi", "scram-sha-256", "oauth", "none"];

impl AuthMethods {
    /// Whether the server may use this method; `none` means no authentication.
    pub(crate) fn allows(self, method: &str) -> bool {
        (AUTH_METHODS.iter().zip(self.allowed)).any(|(known, allowed)| *known == method && allowed)
    }

    fn parse(list: Option<&str>) -> Result<AuthMethods, ConnInfoError> {
        let Some(list) = list else {
            return Ok(AuthMethods { allowed: [true; AUTH_METHODS.len()] });
        };
        let negative = list.starts_with('!');
        let mut listed = [false; AUTH_METHODS.len()];
        for (number, item) in (1..).zip(list.split(',')) {
            let name = item.strip_prefix('!').unwrap_or(item);
            if item.starts_with('!') != negative {
                let (sign, other) =
                    if negative { ("", "negative") } else { ("negative ", "non-negative") };
                return Err(ConnInfoError::new(format!(
                    "{sign}require_auth method (entry {number}) cannot be mixed with {other} \
                     methods"
                )));
            }
            let at = AUTH_METHODS
                .iter()
                .position(|known| *known == name)
                .ok_or_else(|| ConnInfoError::invalid_value("require_auth", AUTH_METHODS))?;
            if std::mem::replace(&mut listed[at], true) {
                return Err(ConnInfoError::new(format!(
                    "require_auth method \"{}\" is specified more than once",
                    AUTH_METHODS[at]
                )));
            }
        }
        Ok(AuthMethods { allowed: listed.map(|listed| listed != negative) })
    }
}

/// A TLS protocol version. rustls supports no older ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TlsVersion {
    V1_2,
    V1_3,
}

/// Checks all parameters and returns their typed values.
pub(super) fn settings(given: &Given) -> Result<Settings, ConnInfoError> {
    refuse_unsupported(given)?;
    let (sslmode, ssl_direct) = ssl_mode(given)?;
    // An older minimum is harmless, because a newer version is chosen anyway. An older maximum is
    // an error.
    let ssl_min = tls_version(given, "ssl_min_protocol_version", TlsVersion::V1_2, true)?;
    let ssl_max = tls_version(given, "ssl_max_protocol_version", TlsVersion::V1_3, false)?;
    if ssl_min > ssl_max {
        return Err(ConnInfoError::new("invalid SSL protocol version range"));
    }

    Ok(Settings {
        connect_timeout: seconds(given, "connect_timeout")?,
        keepalives: integer(given, "keepalives")? != Some(0),
        keepalives_idle: seconds(given, "keepalives_idle")?,
        keepalives_interval: seconds(given, "keepalives_interval")?,
        keepalives_count: positive(given, "keepalives_count")?,
        tcp_user_timeout: positive(given, "tcp_user_timeout")?
            .map(|milliseconds| Duration::from_millis(milliseconds.into())),
        sslmode,
        ssl_direct,
        sslcertmode: one_of(
            given,
            "sslcertmode",
            &[
                ("disable", SslCertMode::Disable),
                ("allow", SslCertMode::Allow),
                ("require", SslCertMode::Require),
            ],
            SslCertMode::Allow,
        )?,
        sslsni: one_of(given, "sslsni", &[("0", false), ("1", true)], true)?,
        ssl_min,
        ssl_max,
        channel_binding: one_of(
            given,
            "channel_binding",
            &[
                ("disable", ChannelBinding::Disable),
                ("prefer", ChannelBinding::Prefer),
                ("require", ChannelBinding::Require),
            ],
            ChannelBinding::Prefer,
        )?,
        session_attrs: one_of(
            given,
            "target_session_attrs",
            &[
                ("any", SessionAttrs::Any),
                ("read-write", SessionAttrs::ReadWrite),
                ("read-only", SessionAttrs::ReadOnly),
                ("primary", SessionAttrs::Primary),
                ("standby", SessionAttrs::Standby),
                ("prefer-standby", SessionAttrs::PreferStandby),
            ],
            SessionAttrs::Any,
        )?,
        load_balance_random: one_of(
            given,
            "load_balance_hosts",
            &[("disable", false), ("random", true)],
            false,
        )?,
        require_auth: AuthMethods::parse(given.get("require_auth"))?,
    })
}

/// What to do about a parameter, or a value of it, that is not supported.
pub(super) fn in_place_of(name: &str) -> &'static str {
    match name {
        "sslpassword" => {
            "write the key without a passphrase (openssl pkey -in KEY -out NEW_KEY), and name that with sslkey"
        }
        "sslcrl" | "sslcrldir" => {
            "revoked certificates would be accepted; without it, distrust an issuer with another sslrootcert"
        }
        "gssencmode" => "encrypt with TLS (gssencmode=disable sslmode=verify-full)",
        "min_protocol_version" => "leave it out, connections use version 3.0",
        "scram_client_key" | "scram_server_key" => "give the password, or a password file",
        "oauth_issuer" | "oauth_client_id" | "oauth_client_secret" | "oauth_scope" => {
            "give a password or a client certificate"
        }
        _ => "leave it out",
    }
}

/// Rejects parameters, and values of parameters, that pgapace does not support.
fn refuse_unsupported(given: &Given) -> Result<(), ConnInfoError> {
    for parameter in PARAMETERS.iter().filter(|parameter| parameter.support == Refused) {
        if given.get(parameter.name).is_some() {
            return Err(ConnInfoError::unsupported(parameter.name, None));
        }
    }
    if given.get("gssencmode").is_some() {
        let refused = one_of(
            given,
            "gssencmode",
            &[("disable", false), ("prefer", false), ("require", true)],
            false,
        )?;
        if refused {
            return Err(ConnInfoError::unsupported("gssencmode", Some("require")));
        }
    }
    for version in ["3.2", "latest"] {
        if given.get("min_protocol_version") == Some(version) {
            return Err(ConnInfoError::unsupported("min_protocol_version", Some(version)));
        }
    }
    Ok(())
}

/// `sslmode`, and whether TLS begins without negotiation. Both must be strong enough for each other.
fn ssl_mode(given: &Given) -> Result<(SslMode, bool), ConnInfoError> {
    let system_roots = given.get("sslrootcert") == Some("system");
    // The system's roots sign certificates for every public host, so any weaker check would accept
    // all of them.
    let default_mode = if system_roots { SslMode::VerifyFull } else { SslMode::Prefer };
    let sslmode = one_of(
        given,
        "sslmode",
        &[
            ("disable", SslMode::Disable),
            ("allow", SslMode::Allow),
            ("prefer", SslMode::Prefer),
            ("require", SslMode::Require),
            ("verify-ca", SslMode::VerifyCa),
            ("verify-full", SslMode::VerifyFull),
        ],
        default_mode,
    )?;
    if system_roots && sslmode != SslMode::VerifyFull {
        return Err(ConnInfoError::new(format!(
            "weak sslmode \"{}\" may not be used with sslrootcert=system (use \"verify-full\")",
            given.get("sslmode").unwrap_or_default()
        )));
    }
    let ssl_direct =
        one_of(given, "sslnegotiation", &[("postgres", false), ("direct", true)], false)?;
    if ssl_direct && sslmode < SslMode::Require {
        return Err(ConnInfoError::new(format!(
            "weak sslmode \"{}\" may not be used with sslnegotiation=direct (use \"require\", \
             \"verify-ca\", or \"verify-full\")",
            given.get("sslmode").unwrap_or("prefer")
        )));
    }
    Ok((sslmode, ssl_direct))
}

fn one_of<T: Copy>(
    given: &Given,
    name: &str,
    choices: &[(&str, T)],
    default: T,
) -> Result<T, ConnInfoError> {
    match given.get(name) {
        None => Ok(default),
        Some(value) => choices
            .iter()
            .find(|(choice, _)| *choice == value)
            .map(|&(_, choice)| choice)
            .ok_or_else(|| {
                ConnInfoError::invalid_value(name, choices.iter().map(|&(choice, _)| choice))
            }),
    }
}

fn tls_version(
    given: &Given,
    name: &str,
    default: TlsVersion,
    older_is_fine: bool,
) -> Result<TlsVersion, ConnInfoError> {
    let Some(value) = given.get(name) else { return Ok(default) };
    match value.to_ascii_lowercase().as_str() {
        "tlsv1" | "tlsv1.1" if older_is_fine => Ok(TlsVersion::V1_2),
        "tlsv1" => Err(ConnInfoError::unsupported(name, Some("TLSv1"))),
        "tlsv1.1" => Err(ConnInfoError::unsupported(name, Some("TLSv1.1"))),
        "tlsv1.2" => Ok(TlsVersion::V1_2),
        "tlsv1.3" => Ok(TlsVersion::V1_3),
        _ => Err(ConnInfoError::invalid_value(name, ["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"])),
    }
}

/// Parses an integer parameter with optional surrounding blanks, as `pqParseIntParam` does.
fn integer(given: &Given, name: &str) -> Result<Option<i32>, ConnInfoError> {
    let Some(value) = given.get(name) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|_| {
        ConnInfoError::new(format!("invalid integer value for connection option \"{name}\""))
    })
}

/// Parses an integer parameter for which zero and negative values mean the system's default.
fn positive(given: &Given, name: &str) -> Result<Option<u32>, ConnInfoError> {
    Ok(integer(given, name)?.and_then(|value| u32::try_from(value).ok()).filter(|&value| value > 0))
}

fn seconds(given: &Given, name: &str) -> Result<Option<Duration>, ConnInfoError> {
    Ok(positive(given, name)?.map(|seconds| Duration::from_secs(seconds.into())))
}
