//! Managed services, and their words for actions of a superuser on a server of one's own.
//!
//! No service gives its users a superuser, so `ALTER SYSTEM` and, on some, `ALTER ROLE …
//! REPLICATION` fail there. Each has parameters and roles of its own instead. They are documented
//! on one page per service (docs/services), with the sources.

use wire::{Session, quote_literal};

use crate::check::failed;
use crate::check::report::{Fix, Side};
use crate::error::Result;
use crate::subscriber::catalogue::field;

/// The managed service that runs a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Service {
    /// No known service: the administrator of the server may have a superuser.
    #[default]
    Own,
    Rds,
    Aurora,
    CloudSql,
    AlloyDb,
    Azure,
    Supabase,
    Neon,
}

/// The settings and the role by which a service is recognized.
struct Marks {
    service: Service,
    /// A setting that every role may read. `current_setting` also finds those that no module has
    /// defined.
    setting: &'static str,
    /// Prefix of the service's own settings.
    prefix: &'static str,
    role: &'static str,
}

/// Aurora also has the marks of RDS, and comes first. AlloyDB is not Cloud SQL.
const MARKS: [Marks; 7] = [
    Marks { service: Service::Aurora, setting: "", prefix: "aurora_", role: "" },
    Marks {
        service: Service::Rds,
        setting: "rds.extensions",
        prefix: "rds.",
        role: "rds_superuser",
    },
    Marks {
        service: Service::AlloyDb,
        setting: "alloydb.logical_decoding",
        prefix: "alloydb.",
        role: "alloydbsuperuser",
    },
    Marks {
        service: Service::CloudSql,
        setting: "cloudsql.logical_decoding",
        prefix: "cloudsql.",
        role: "cloudsqlsuperuser",
    },
    Marks {
        service: Service::Azure,
        setting: "azure.extensions",
        prefix: "azure.",
        role: "azure_pg_admin",
    },
    Marks { service: Service::Supabase, setting: "", prefix: "supautils.", role: "supabase_admin" },
    Marks { service: Service::Neon, setting: "", prefix: "neon.", role: "neon_superuser" },
];

impl Service {
    /// Recognizes the service by its settings and roles. `aurora_version()` exists on Aurora only.
    pub(super) fn read(session: &mut Session, side: Side) -> Result<Self> {
        let seen: Vec<_> = MARKS
            .iter()
            .map(|marks| {
                let Marks { setting, prefix, role, .. } = marks;
                let setting = if setting.is_empty() {
                    "false".to_owned()
                } else {
                    let name = quote_literal(setting);
                    format!("pg_catalog.current_setting({name}, true) IS NOT NULL")
                };
                format!(
                    "{setting} OR EXISTS (SELECT FROM pg_catalog.pg_settings \
                       WHERE pg_catalog.starts_with(name, {})) \
                     OR EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = {})",
                    quote_literal(prefix),
                    quote_literal(role)
                )
            })
            .collect();
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE proname = 'aurora_version'), {}",
            seen.join(", ")
        );
        let rows =
            session.query(&sql, &[]).map_err(|e| failed(side, &e, "looking for a service"))?;
        let Some(row) = rows.first() else { return Ok(Self::Own) };
        if field::<String>(&row, 0)? == "t" {
            return Ok(Self::Aurora);
        }
        for (index, marks) in MARKS.iter().enumerate() {
            if field::<String>(&row, index + 1)? == "t" {
                return Ok(marks.service);
            }
        }
        Ok(Self::Own)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Own => "PostgreSQL",
            Self::Rds => "Amazon RDS",
            Self::Aurora => "Amazon Aurora",
            Self::CloudSql => "Google Cloud SQL",
            Self::AlloyDb => "Google AlloyDB",
            Self::Azure => "Azure Database for PostgreSQL",
            Self::Supabase => "Supabase",
            Self::Neon => "Neon",
        }
    }

    /// The page about the service, below `docs/services`.
    pub(crate) fn page(self) -> &'static str {
        match self {
            Self::Own => "",
            Self::Rds | Self::Aurora => "rds.md",
            Self::CloudSql | Self::AlloyDb => "google.md",
            Self::Azure => "azure.md",
            Self::Supabase => "supabase.md",
            Self::Neon => "neon.md",
        }
    }

    /// The role whose members administer the server.
    fn administrator(self) -> &'static str {
        match self {
            Self::Own | Self::Supabase => "postgres",
            Self::Rds | Self::Aurora => "rds_superuser",
            Self::CloudSql => "cloudsqlsuperuser",
            Self::AlloyDb => "alloydbsuperuser",
            Self::Azure => "azure_pg_admin",
            Self::Neon => "neon_superuser",
        }
    }

    fn says(self, text: String) -> Fix {
        Fix::Service { service: self.name(), text }
    }

    /// How a setting of the server is changed that needs a restart.
    pub(super) fn set(self, side: Side, name: &str, value: impl std::fmt::Display) -> Fix {
        match self {
            Self::Own => {
                Fix::Sql(format!("ALTER SYSTEM SET {name} = {value}; -- then restart the {side}"))
            }
            Self::Rds => self.says(format!(
                "set {name} to {value} in the DB parameter group of the instance, then reboot it"
            )),
            Self::Aurora => self.says(format!(
                "set {name} to {value} in the DB cluster parameter group, then reboot the writer"
            )),
            Self::CloudSql => self.says(format!(
                "set the database flag {name} to {value} (gcloud sql instances patch INSTANCE \
                 --database-flags=… replaces all flags, so list the others too); the instance \
                 restarts"
            )),
            Self::AlloyDb => self.says(format!(
                "set the database flag {name} to {value} on the primary instance; it restarts"
            )),
            Self::Azure => self.says(format!(
                "set the server parameter {name} to {value} (az postgres flexible-server parameter \
                 set --resource-group GROUP --server-name SERVER --name {name} --value {value}), \
                 then restart the server"
            )),
            Self::Supabase => self.says(format!(
                "supabase --experimental --project-ref PROJECT postgres-config update --config \
                 {name}={value}; the database restarts"
            )),
            Self::Neon => {
                self.says(format!("{name} is fixed; ask the support to set it to {value}"))
            }
        }
    }

    /// How logical decoding is turned on.
    pub(super) fn logical_decoding(self, side: Side) -> Fix {
        match self {
            Self::Own => self.set(side, "wal_level", "'logical'"),
            Self::Rds | Self::Aurora => self.set(side, "rds.logical_replication", 1),
            Self::CloudSql => self.set(side, "cloudsql.logical_decoding", "on"),
            Self::AlloyDb => self.set(side, "alloydb.logical_decoding", "on"),
            Self::Azure => self.set(side, "wal_level", "logical"),
            Self::Supabase => self.says(
                "wal_level is logical in every project; ask the support why it is not here"
                    .to_owned(),
            ),
            Self::Neon => self.says(
                "enable Logical Replication in the settings of the project; this restarts its \
                 computes, and cannot be undone"
                    .to_owned(),
            ),
        }
    }

    /// How a role may replicate.
    pub(super) fn replication(self, role: &str) -> Fix {
        match self {
            Self::Own => Fix::Sql(format!("ALTER ROLE {role} REPLICATION;")),
            Self::Rds | Self::Aurora => Fix::Sql(format!("GRANT rds_replication TO {role};")),
            Self::CloudSql | Self::AlloyDb | Self::Azure | Self::Supabase => {
                let administrator = self.administrator();
                Fix::Sql(format!("ALTER ROLE {role} REPLICATION; -- as {administrator}"))
            }
            Self::Neon => self.says(
                "connect as a role that was created in the console, with the CLI or the API: it is \
                 a member of neon_superuser and may replicate; SQL cannot grant this"
                    .to_owned(),
            ),
        }
    }

    /// How a role may set `session_replication_role`.
    pub(super) fn replica_role(self, role: &str, major: u32) -> Fix {
        match self {
            Self::Own if major >= 15 => {
                Fix::Sql(format!("GRANT SET ON PARAMETER session_replication_role TO {role};"))
            }
            Self::Own => Fix::Sql(format!(
                "ALTER ROLE {role} SUPERUSER; -- PostgreSQL {major} has no lesser privilege for it"
            )),
            Self::Supabase => self.says(
                "connect as role postgres, which may set session_replication_role".to_owned(),
            ),
            Self::Neon => self.says(
                "no role of the users may set session_replication_role at the time of writing; ask \
                 the support"
                    .to_owned(),
            ),
            Self::Rds | Self::Aurora => Fix::Sql(format!("GRANT rds_superuser TO {role};")),
            Self::CloudSql | Self::AlloyDb | Self::Azure => self.says(format!(
                "no public document says which role may set session_replication_role; connect as a \
                 member of {} with REPLICATION, which check tries, or ask the support",
                self.administrator()
            )),
        }
    }

    /// How a role sees rows that row-level security hides.
    pub(super) fn bypass_row_security(self, role: &str) -> Fix {
        match self {
            Self::Own => Fix::Sql(format!("ALTER ROLE {role} BYPASSRLS;")),
            _ => self.says(format!(
                "connect as the owner of the table, or as a role with BYPASSRLS; only a role that \
                 has BYPASSRLS can give it to {role}"
            )),
        }
    }
}

/// The endpoint to use instead of a host name that is known to be a service's pooler.
pub(super) fn direct_endpoint(host: &str) -> Option<Fix> {
    let (service, text) = if host.contains("-pooler.") && host.ends_with(".neon.tech") {
        (Service::Neon, format!("use the direct endpoint, {}", host.replace("-pooler.", ".")))
    } else if host.ends_with(".pooler.supabase.com") {
        (
            Service::Supabase,
            "use the direct connection, db.PROJECT.supabase.co port 5432 (IPv6, or IPv4 with the \
             add-on)"
                .to_owned(),
        )
    } else if host.contains(".proxy-") && host.ends_with(".rds.amazonaws.com") {
        let text = "use the endpoint of the instance or the cluster, not that of RDS Proxy";
        (Service::Rds, text.to_owned())
    } else {
        return None;
    };
    Some(service.says(text))
}

#[cfg(test)]
mod tests {
    use super::{MARKS, direct_endpoint};
    use crate::check::report::{Fix, Side};

    #[test]
    fn no_service_is_told_to_alter_the_system() {
        for service in MARKS.iter().map(|marks| marks.service) {
            let side = Side::Publisher;
            let all = [
                service.set(side, "max_wal_senders", 20),
                service.logical_decoding(side),
                service.replication("r"),
                service.replica_role("r", 18),
                service.replica_role("r", 14),
                service.bypass_row_security("r"),
            ];
            for fix in all {
                let (Fix::Sql(text) | Fix::Command(text) | Fix::Service { text, .. }) = fix;
                for forbidden in ["ALTER SYSTEM", "SUPERUSER;", "GRANT SET"] {
                    assert!(!text.contains(forbidden), "{service:?}: {text}");
                }
            }
            assert!(service.page().ends_with(".md"));
        }
    }

    #[test]
    fn pooled_endpoints_have_a_direct_one() {
        let text = |host| match direct_endpoint(host) {
            Some(Fix::Service { text, .. }) => text,
            other => format!("{other:?}"),
        };
        assert!(
            text("ep-cool-1-pooler.eu-2.aws.neon.tech").contains("ep-cool-1.eu-2.aws.neon.tech")
        );
        assert!(text("aws-0-eu.pooler.supabase.com").contains("db.PROJECT.supabase.co"));
        assert!(text("p.proxy-abc.eu-1.rds.amazonaws.com").contains("RDS Proxy"));
        assert_eq!(direct_endpoint("db.example.com"), None);
    }
}
