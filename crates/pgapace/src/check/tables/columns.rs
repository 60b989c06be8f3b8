//! Whether the columns of a subscriber table can take the published ones.

use wire::quote_ident;

use super::{Checker, SIDE};
use crate::check::failed;
use crate::cli::table_name::shell_word;
use crate::error::Result;
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::subscriber::catalogue::{Column, Identity, Table};

impl Checker<'_, '_> {
    /// Whether every published column has a column on the subscriber.
    pub(super) fn columns(&mut self, published: &PublishedTable, table: &Table) -> Result<bool> {
        let name = published.name.to_string();
        let mut fits = true;
        let mut compared = Vec::new();
        for column in &published.columns {
            let Some((_, local)) = table.column(&column.name) else {
                fits = false;
                let addition = self.lacking.addition(table, column);
                let mut message = format!("table {name} lacks published column {}", column.name);
                if let Some(left) = &addition.left {
                    message = format!("{message}. {left}");
                }
                // A copy that is still to come brings the values.
                if addition.differs && !self.known.to_copy(self.config, published) {
                    message = format!(
                        "{message}. Rows that exist may have other values on the publisher: afterwards, pgapace \
                         resync {}",
                        shell_word(&published.name)
                    );
                }
                self.reporter.block("columns", message).on(&name).sql(addition.sql);
                continue;
            };
            if local.generated {
                fits = false;
                let (fix, empties) = self.ungenerate(table, column)?;
                let mut message = format!(
                    "published column {} is a generated column of table {name}. Make it a plain column, or exclude it \
                     with a column list in the publication",
                    column.name
                );
                if empties && !self.known.to_copy(self.config, published) {
                    message = format!(
                        "{message}. The statement leaves NULL in rows that exist: afterwards, pgapace resync {}",
                        shell_word(&published.name)
                    );
                }
                self.reporter.block("columns", message).on(&name).sql(fix);
                continue;
            }
            compared.push((column, local));
        }
        self.types(&name, &compared);
        Ok(fits)
    }

    /// The SQL that makes a generated column a plain one, and whether that loses its values.
    fn ungenerate(&mut self, table: &Table, column: &PublishedColumn) -> Result<(String, bool)> {
        let rows = self
            .session
            .query(
                "SELECT attgenerated FROM pg_catalog.pg_attribute \
                 WHERE attrelid = $1::pg_catalog.oid AND attname = $2",
                &[Some(&table.oid.to_string()), Some(&column.name)],
            )
            .map_err(|e| failed(SIDE, &e, "reading the generated columns"))?;
        let quoted = quote_ident(&column.name);
        let name = table.sql_name();
        Ok(if rows.first().is_some_and(|row| row.get(0) == Some("v")) {
            let declared = &column.type_name;
            let sql =
                format!("ALTER TABLE {name} DROP COLUMN {quoted}, ADD COLUMN {quoted} {declared};");
            (sql, true)
        } else {
            (format!("ALTER TABLE {name} ALTER COLUMN {quoted} DROP EXPRESSION;"), false)
        })
    }

    /// Compares base types by name, because the oid of a type that is not built in differs between
    /// servers.
    fn types(&mut self, name: &str, compared: &[(&PublishedColumn, &Column)]) {
        for (column, local) in compared {
            let names = &self.asked.types;
            let local_name = names.get(&local.base_type).map(String::as_str).unwrap_or_default();
            if local_name != column.base_type_name {
                self.reporter
                    .warn(
                        "types",
                        format!(
                            "column {} of table {name} is {} on the publisher and {} on the \
                             subscriber: values are converted through text, which must be valid \
                             for the subscriber's type",
                            column.name, column.type_name, local.type_name
                        ),
                    )
                    .on(name);
            }
        }
    }

    /// Reports NOT NULL columns without a default that are not published.
    pub(super) fn required_columns(
        &mut self,
        published: &PublishedTable,
        table: &Table,
    ) -> Result<()> {
        let name = published.name.to_string();
        let unfilled: Vec<_> = table
            .columns
            .iter()
            .filter(|c| c.not_null && !c.generated && c.identity == Identity::None)
            .filter(|c| published.columns.iter().all(|column| column.name != c.name))
            .collect();
        for column in unfilled {
            let rows = self
                .session
                .query(
                    "SELECT atthasdef FROM pg_catalog.pg_attribute \
                     WHERE attrelid = $1::pg_catalog.oid AND attnum = $2::pg_catalog.int2",
                    &[Some(&table.oid.to_string()), Some(&column.attnum.to_string())],
                )
                .map_err(|e| failed(SIDE, &e, "reading the defaults"))?;
            if rows.first().is_some_and(|row| row.get(0) == Some("t")) {
                continue;
            }
            self.reporter
                .block(
                    "columns",
                    format!(
                        "column {} of table {name} is not published, is NOT NULL and has no \
                         default: no row can be inserted",
                        column.name
                    ),
                )
                .on(&name)
                .sql(format!(
                    "ALTER TABLE {} ALTER COLUMN {} DROP NOT NULL;",
                    table.sql_name(),
                    quote_ident(&column.name)
                ));
        }
        Ok(())
    }
}
