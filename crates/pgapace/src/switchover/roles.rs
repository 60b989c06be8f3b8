//! Roles that may use the published tables on the publisher, and may not on the subscriber.

use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::named::named;
use crate::subscriber::state::name_array;

/// A privilege that was granted on the publisher.
struct Privilege {
    role: String,
    schema: String,
    table: String,
    name: String,
}

/// SQL that lists role, table, privilege for tables by name. The roles of pgapace's own sessions need there what they do not
/// need on the subscriber.
fn granted_sql(tables: &[PublishedTable], reader: Option<&str>) -> String {
    let names: Vec<_> = tables
        .iter()
        .map(|table| {
            format!("({}, {})", quote_literal(&table.name.schema), quote_literal(&table.name.name))
        })
        .collect();
    let readers: Vec<_> = ["session_user".to_owned(), "current_user".to_owned()]
        .into_iter()
        .chain(reader.map(quote_literal))
        .collect();
    format!(
        "SELECT DISTINCT coalesce(r.rolname, 'public'), w.schema_name, w.table_name, a.privilege_type \
         FROM (VALUES {}) AS w (schema_name, table_name) JOIN pg_catalog.pg_class c ON {} \
           CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a \
           LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee \
         WHERE a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE') \
           AND coalesce(r.rolname, 'public') NOT IN ({}) \
         ORDER BY 1, 2, 3, 4",
        names.join(", "),
        named!("c", "w.schema_name", "w.table_name"),
        readers.join(", ")
    )
}

/// SQL that lists those of the publisher's privileges that a role does not have on the subscriber, by whichever way, and
/// whether the role exists. PUBLIC has the oid 0.
const MISSING: &str = concat!(
    "\
SELECT w.role_name, w.schema_name, w.table_name, w.privilege, r.oid IS NOT NULL OR w.role_name = 'public'
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
    pg_catalog.unnest($3::pg_catalog.text[]), pg_catalog.unnest($4::pg_catalog.text[])) WITH ORDINALITY
  AS w (role_name, schema_name, table_name, privilege, place)
LEFT JOIN pg_catalog.pg_roles r ON r.rolname = w.role_name
LEFT JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
WHERE r.oid IS NULL AND w.role_name <> 'public'
  OR pg_catalog.has_table_privilege(coalesce(r.oid, 0), c.oid, w.privilege) IS NOT TRUE
ORDER BY w.place"
);

fn privilege(row: &wire::Row<'_>) -> Result<Privilege> {
    let (role, schema) = (field(row, 0)?, field(row, 1)?);
    Ok(Privilege { role, schema, table: field(row, 2)?, name: field(row, 3)? })
}

/// Roles and privileges of applications that are missing on the subscriber and exist on the publisher.
/// Each role with the SQL that creates it or grants them. `reader`: the role of the process that applies, if it is not that
/// of this session.
pub(super) fn missing(
    source: &mut Session,
    control: &mut Session,
    tables: &[PublishedTable],
    reader: Option<&str>,
) -> Result<Vec<String>> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let doing = "reading privileges of tables";
    let granted =
        source.simple(&granted_sql(tables, reader)).map_err(|e| Failure::publisher(&e, doing))?;
    let Some(granted) = granted.last() else { return Ok(Vec::new()) };
    let granted = granted.iter().map(|row| privilege(&row)).collect::<Result<Vec<_>>>()?;
    let array = |value: fn(&Privilege) -> &String| {
        name_array(&granted.iter().map(value).collect::<Vec<_>>())
    };
    let arrays = [
        array(|granted| &granted.role),
        array(|granted| &granted.schema),
        array(|granted| &granted.table),
        array(|granted| &granted.name),
    ];
    let rows = control
        .query(MISSING, &arrays.each_ref().map(|array| Some(array.as_str())))
        .map_err(|e| Failure::subscriber(&e, doing))?;
    let missing = rows
        .iter()
        .map(|row| Ok((privilege(&row)?, boolean(&row, 4)?)))
        .collect::<Result<Vec<_>>>()?;
    let by_role = missing.chunk_by(|(one, _), (next, _)| one.role == next.role);
    let said = by_role.filter_map(|of_role| {
        let (Privilege { role, .. }, exists) = of_role.first()?;
        Some(if *exists {
            let of_role: Vec<_> = of_role.iter().map(|(privilege, _)| privilege).collect();
            format!("privileges are missing on the subscriber: {}", grants(role, &of_role))
        } else {
            format!(
                "the subscriber has no role {role}, which uses published tables: CREATE ROLE {} …",
                quote_ident(role)
            )
        })
    });
    Ok(said.collect())
}

/// SQL that grants these to a role, with one statement for all tables for which it is the same.
fn grants(role: &str, missing: &[&Privilege]) -> String {
    let grantee = if role == "public" { "PUBLIC".to_owned() } else { quote_ident(role) };
    let mut statements: Vec<(Vec<&str>, Vec<String>)> = Vec::new();
    let is_same = |one: &&Privilege, next: &&Privilege| {
        (&one.schema, &one.table) == (&next.schema, &next.table)
    };
    for of_table in missing.chunk_by(is_same) {
        let names: Vec<_> = of_table.iter().map(|privilege| privilege.name.as_str()).collect();
        let tables = of_table.first().map(|privilege| {
            format!("{}.{}", quote_ident(&privilege.schema), quote_ident(&privilege.table))
        });
        match statements.iter_mut().find(|(same, _)| *same == names) {
            Some((_, listed)) => listed.extend(tables),
            None => statements.push((names, tables.into_iter().collect())),
        }
    }
    let statements = statements.iter().map(|(names, tables)| {
        format!("GRANT {} ON {} TO {grantee};", names.join(", "), tables.join(", "))
    });
    statements.collect::<Vec<_>>().join(" ")
}
