//! Roles that may use the published tables on the publisher, and may not on the subscriber.

use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::field;
use crate::subscriber::named::named;

/// SQL that lists role, table, privilege for tables by name.
fn privileges_sql(tables: &[PublishedTable]) -> String {
    let names: Vec<_> = tables
        .iter()
        .map(|table| {
            format!("({}, {})", quote_literal(&table.name.schema), quote_literal(&table.name.name))
        })
        .collect();
    format!(
        "SELECT DISTINCT coalesce(r.rolname, 'public'), w.schema_name, w.table_name, a.privilege_type \
         FROM (VALUES {}) AS w (schema_name, table_name) JOIN pg_catalog.pg_class c ON {} \
           CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a \
           LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee \
         WHERE a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE') \
         ORDER BY 1, 2, 3, 4",
        names.join(", "),
        named!("c", "w.schema_name", "w.table_name")
    )
}

type Privilege = (String, String, String, String);

fn read(session: &mut Session, sql: &str, side: Side) -> Result<Vec<Privilege>> {
    let results = session.simple(sql).map_err(|e| side.failed(&e))?;
    let Some(rows) = results.last() else { return Ok(Vec::new()) };
    rows.iter()
        .map(|row| Ok((field(&row, 0)?, field(&row, 1)?, field(&row, 2)?, field(&row, 3)?)))
        .collect()
}

#[derive(Clone, Copy)]
enum Side {
    Publisher,
    Subscriber,
}

impl Side {
    fn failed(self, error: &wire::Error) -> Failure {
        let doing = "reading privileges of tables";
        match self {
            Self::Publisher => Failure::publisher(error, doing),
            Self::Subscriber => Failure::subscriber(error, doing),
        }
    }
}

/// Roles and privileges of applications that are missing on the subscriber and exist on the publisher.
/// Each with the SQL that creates or grants it.
pub(super) fn missing(
    source: &mut Session,
    control: &mut Session,
    tables: &[PublishedTable],
) -> Result<Vec<String>> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let sql = privileges_sql(tables);
    let there = read(source, &sql, Side::Publisher)?;
    let roles_sql = "SELECT rolname, '', '', '' FROM pg_catalog.pg_roles WHERE NOT pg_catalog.starts_with(rolname, 'pg_')";
    let roles = read(control, roles_sql, Side::Subscriber)?;
    let here = read(control, &sql, Side::Subscriber)?;
    let mut missing = Vec::new();
    let mut absent: Vec<&str> = Vec::new();
    for privilege in &there {
        let (role, schema, table, what) = privilege;
        let known = role == "public" || roles.iter().any(|(name, ..)| name == role);
        if !known {
            if !absent.contains(&role.as_str()) {
                absent.push(role);
                missing.push(format!(
                    "the subscriber has no role {}, which uses published tables: CREATE ROLE {} …",
                    role,
                    quote_ident(role)
                ));
            }
        } else if !here.contains(privilege) {
            let grantee = if role == "public" { "PUBLIC".to_owned() } else { quote_ident(role) };
            missing.push(format!(
                "a privilege is missing on the subscriber: GRANT {what} ON {}.{} TO {grantee};",
                quote_ident(schema),
                quote_ident(table)
            ));
        }
    }
    Ok(missing)
}
