//! The shell command that creates tables of the publisher on the subscriber, for hints.

use std::collections::BTreeSet;

use engine::table_name::TableName;
use wire::quote_ident;

use crate::table_name::sql_name;

/// The command names so many tables, or their schemas, at most. A terminal takes a line of 4096 bytes, and a report has the
/// command for each of the tables.
const NAMED: usize = 50;

/// A shell command that creates these tables on the subscriber, and perhaps others.
pub(crate) fn dump_command(tables: &[&TableName], publisher: &str, subscriber: &str) -> String {
    let schemas: BTreeSet<_> = tables.iter().map(|name| name.schema.as_str()).collect();
    let patterns: Vec<_> = if tables.len() <= NAMED {
        let pattern = |name: &&TableName| format!("--table={} ", shell_quoted(&sql_name(name)));
        tables.iter().map(pattern).collect()
    } else if schemas.len() <= NAMED {
        let pattern = |schema| format!("--schema={} ", shell_quoted(&quote_ident(schema)));
        schemas.into_iter().map(pattern).collect()
    } else {
        Vec::new()
    };
    format!(
        "pg_dump --schema-only --no-owner --no-privileges --no-publications --no-subscriptions {}{publisher} | psql \
         {subscriber}",
        patterns.concat()
    )
}

/// One word of a shell command.
pub(crate) fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_tables_are_named_by_their_schemas() {
        let of = |count: usize, schemas: usize| {
            let table =
                |i| TableName { schema: format!("s{}", i % schemas), name: format!("t{i}") };
            let tables: Vec<_> = (0..count).map(table).collect();
            dump_command(&tables.iter().collect::<Vec<_>>(), "P", "S")
        };
        assert!(of(2, 1).ends_with("--table='\"s0\".\"t0\"' --table='\"s0\".\"t1\"' P | psql S"));
        assert!(
            of(51, 2).ends_with("-subscriptions --schema='\"s0\"' --schema='\"s1\"' P | psql S")
        );
        assert!(of(51, 51).ends_with("-subscriptions P | psql S"));
    }
}
