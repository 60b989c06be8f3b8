//! Which tables of schema `pgapace` a role may read.

/// SQL that returns a row if a server has all of these tables in schema `pgapace`, and the role may read them. `privilege` is
/// the function of `pg_catalog` that decides: whole tables, or at least one column of each. A walsender takes it, too.
pub(crate) fn readable_sql(tables: &[&str], privilege: &str) -> String {
    let names: Vec<_> = tables.iter().map(|name| wire::quote_literal(name)).collect();
    format!(
        "SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = 'pgapace' AND c.relname IN ({}) \
           AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') \
           AND pg_catalog.{privilege}(c.oid, 'SELECT') \
         HAVING pg_catalog.count(*) = {}",
        names.join(", "),
        tables.len()
    )
}
