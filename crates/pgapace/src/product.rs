//! Detection of other products, by `version()`. Many servers speak PostgreSQL's protocol and SQL
//! without being PostgreSQL.
//!
//! Exactly-once apply, the commit order and the effect of locks depend on how PostgreSQL works
//! internally. So pgapace refuses servers that are known to work differently, and names products
//! that it was not tested with.

use crate::error::{Class, Failure};
use crate::pooler::Side;

/// Part of the `version()` of a product, and its name. These products do not have PostgreSQL's
/// transactions, locks or WAL.
const OTHER: [(&str, &str); 12] = [
    ("-YB-", "YugabyteDB"),
    ("Greenplum", "Greenplum"),
    ("Cloudberry", "Apache Cloudberry"),
    ("CockroachDB", "CockroachDB"),
    ("Redshift", "Amazon Redshift"),
    ("Materialize", "Materialize"),
    ("RisingWave", "RisingWave"),
    ("openGauss", "openGauss"),
    ("GaussDB", "GaussDB"),
    ("HAWQ", "Apache HAWQ"),
    ("Postgres-XL", "Postgres-XL"),
    ("CrateDB", "CrateDB"),
];

/// The same for products that are derived from PostgreSQL's sources.
const CHANGED: [(&str, &str); 5] = [
    ("EnterpriseDB", "EDB Postgres"),
    ("Babelfish", "Babelfish"),
    ("PolarDB", "PolarDB"),
    ("Postgres Pro", "Postgres Pro"),
    ("OrioleDB", "OrioleDB"),
];

/// The product of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    PostgreSql,
    /// Derived from PostgreSQL; pgapace is not tested with it.
    Changed(&'static str),
    /// Not PostgreSQL.
    Other(&'static str),
}

impl Product {
    /// Recognizes a product by its `version()`.
    pub(crate) fn of(version: &str) -> Self {
        let find = |names: &[(&str, &'static str)]| {
            names.iter().find(|(mark, _)| version.contains(mark)).map(|(_, name)| *name)
        };
        match (find(&OTHER), find(&CHANGED)) {
            (Some(name), _) => Self::Other(name),
            (None, Some(name)) => Self::Changed(name),
            (None, None) => Self::PostgreSql,
        }
    }
}

/// Refuses a server that is not PostgreSQL.
pub(crate) fn check(side: Side, version: &str) -> Result<(), Failure> {
    let Product::Other(name) = Product::of(version) else { return Ok(()) };
    let class = match side {
        Side::Publisher => Class::Publisher,
        Side::Subscriber => Class::Subscriber,
    };
    let server = side.name();
    Err(Failure::new(class, format!("the {server} is {name}, not PostgreSQL"))
        .detail(format!("version() says: {version}"))
        .hint(format!(
            "pgapace relies on PostgreSQL's transactions, locks and WAL. Connect to a PostgreSQL \
             server as {server}."
        )))
}

#[cfg(test)]
mod tests {
    use super::Product;

    #[test]
    fn products_by_their_versions() {
        for genuine in [
            "PostgreSQL 15.18 (Debian 15.18-0+deb12u1) on x86_64-pc-linux-gnu, compiled by gcc \
             (Debian 12.2.0-14) 12.2.0, 64-bit",
            "PostgreSQL 18.6 on x86_64-pc-linux-gnu, compiled by gcc (Ubuntu 13.3.0) 13.3.0, 64-bit",
            "PostgreSQL 16.4 (Homebrew) on aarch64-apple-darwin23.4.0, compiled by Apple clang",
        ] {
            assert_eq!(Product::of(genuine), Product::PostgreSql, "{genuine}");
        }
        for (version, name) in [
            ("PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64-pc-linux-gnu", "YugabyteDB"),
            ("PostgreSQL 12.12 (Greenplum Database 7.1.0 build commit:abc) on x86_64", "Greenplum"),
            ("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu, built 2024/05/15)", "CockroachDB"),
            ("PostgreSQL 8.0.2 on i686-pc-linux-gnu, Redshift 1.0.69065", "Amazon Redshift"),
        ] {
            assert_eq!(Product::of(version), Product::Other(name), "{version}");
        }
        let edb = "PostgreSQL 16.3 (EnterpriseDB Advanced Server 16.3.0) on x86_64-pc-linux-gnu";
        assert_eq!(Product::of(edb), Product::Changed("EDB Postgres"));
    }
}
