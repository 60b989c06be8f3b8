//! Updates of rows between which unique values move (see [`crate::subscriber::unique`]), or keys.

use wire::quote_ident;

use super::sql::{Arrays, Builder};
use crate::subscriber::mapping::Search;
use crate::subscriber::oid::{INT4_ARRAY, INT8};
use crate::subscriber::statement::row::Source;

/// Rows that are deleted and inserted again.
struct Reinserted {
    /// Parts of the WITH clause: of the changes, `v`, and without a key of the rows, `hit`.
    with: String,
    /// Where the condition reads from.
    from: &'static str,
    /// Finds them.
    condition: String,
    /// The published columns that are written, and their new values.
    values: Vec<(usize, String)>,
    /// The parameter with their number.
    count: usize,
}

impl Builder<'_> {
    /// One statement that deletes the rows whose unique values or keys change, updates the others, and inserts the
    /// deleted ones again with their new values. The last parameter is the number of rows; with another
    /// number it fails.
    ///
    /// `total` reads `moved` and `kept` to their ends before it returns. So nothing is inserted before all
    /// rows are deleted. Both see the rows as they were before the statement, and each row is in one of
    /// them. A row that keeps its unique values cannot meet one that is deleted later: both were there
    /// before. Values are compared as they are stored (`record_image_eq`): that may call an equal value
    /// changed, which costs a move, and never calls a changed value equal. The statement fails if the table
    /// has other columns than were read.
    pub(super) fn update_moving(&mut self) -> String {
        let Reinserted { with, from, condition, values, count } = self.reinserted();
        let (map, table) = (self.map, self.map.table.sql_only());
        let (mut before, mut after) = (Vec::new(), Vec::new());
        // A column that UPDATE cannot set moves the row too, if it has changed, and so does the key, which contains what
        // chooses the partition. Without a key, any column may.
        let finds = |remote| match map.search {
            Search::WholeRow(_) => map.table.partitioned,
            _ => map.search_columns().iter().any(|column| column.remote == remote),
        };
        let moves =
            |remote| map.unique.contains(remote) || map.is_identity_always(remote) || finds(remote);
        for (remote, value) in values.iter().filter(|(remote, _)| moves(*remote)) {
            let base = &map.local(*remote).base_type_sql;
            before.push(format!("subscriber.{}::{base}", self.column(*remote)));
            after.push(format!("({value})::{base}"));
        }
        let same = if before.is_empty() {
            "true".to_owned()
        } else {
            let (before, after) = (before.join(", "), after.join(", "));
            // As an operator between two ROW(…), the parser would compare column by column.
            format!("pg_catalog.record_image_eq(ROW({before}), ROW({after}))")
        };
        let set: Vec<_> = values
            .iter()
            .filter(|(remote, _)| !map.is_identity_always(*remote))
            .map(|(remote, value)| format!("{} = {value}", self.column(*remote)))
            .collect();
        let (returned, written) = self.written(&values, count);
        let kept = if set.is_empty() {
            format!(
                "SELECT 1 FROM {table} AS subscriber, {from} WHERE {condition} AND {same} \
                 FOR NO KEY UPDATE OF subscriber"
            )
        } else {
            let set = set.join(", ");
            format!(
                "UPDATE {table} AS subscriber SET {set} FROM {from} WHERE {condition} AND {same} RETURNING 1"
            )
        };
        format!(
            "WITH {no_others}{with}, \
             moved AS (DELETE FROM {table} AS subscriber USING {from} \
               WHERE {condition} AND NOT ({same}) RETURNING {returned}), \
             kept AS ({kept}), \
             total AS MATERIALIZED (SELECT (SELECT pg_catalog.count(*) FROM moved) \
               OPERATOR(pg_catalog.+) (SELECT pg_catalog.count(*) FROM kept) AS rows), \
             {written}",
            no_others = self.no_others(),
        )
    }

    /// One statement that deletes the rows, and inserts them again with their new keys and values. `total` is as in
    /// [`Self::update_moving`].
    pub(super) fn update_keys(&mut self) -> String {
        let Reinserted { with, from, condition, values, count } = self.reinserted();
        let (returned, written) = self.written(&values, count);
        format!(
            "WITH {no_others}{with}, \
             moved AS (DELETE FROM {table} AS subscriber USING {from} WHERE {condition} RETURNING {returned}), \
             total AS MATERIALIZED (SELECT pg_catalog.count(*) AS rows FROM moved), \
             {written}",
            no_others = self.no_others(),
            table = self.map.table.sql_only(),
        )
    }

    /// The rows, condition and values of either statement.
    fn reinserted(&mut self) -> Reinserted {
        if let Search::WholeRow(_) = self.map.search {
            return self.hits_reinserted();
        }
        let mut arrays = Arrays::default();
        let condition = self.keys(&mut arrays);
        let values = self
            .set_columns()
            .into_iter()
            .map(|remote| (remote, self.new_or_kept_value(&mut arrays, remote)))
            .collect();
        self.types.push(INT8);
        let with = format!("v AS MATERIALIZED (SELECT * FROM {})", arrays.unnested(None));
        Reinserted { with, from: "v", condition, values, count: self.types.len() }
    }

    /// The same without a key: each change has a row of its own among those that are identical to its class.
    fn hits_reinserted(&mut self) -> Reinserted {
        let (hits, _) = self.hits(None);
        let mut arrays = Arrays::default();
        let set = self.set_columns().into_iter();
        let values = set.map(|remote| (remote, self.new_value(&mut arrays, remote))).collect();
        self.nth_of_class(&mut arrays);
        self.types.push(INT8);
        let with = format!("{hits}, v AS MATERIALIZED (SELECT * FROM {})", arrays.unnested(None));
        let (from, condition) = ("hit, v", Self::is_nth_hit());
        Reinserted { with, from, condition, values, count: self.types.len() }
    }

    /// The RETURNING list of the DELETE `moved`, and the end of the statement. The end inserts the deleted rows again if
    /// `total` is the number of rows, and fails otherwise.
    fn written(&self, values: &[(usize, String)], count: usize) -> (String, String) {
        let map = self.map;
        let (mut columns, mut returned, mut names) = (Vec::new(), Vec::new(), Vec::new());
        for (local, column) in map.table.columns.iter().enumerate() {
            if column.generated {
                continue;
            }
            let name = quote_ident(&column.name);
            let value = values.iter().find(|(remote, _)| map.columns[*remote] == local);
            let value =
                value.map_or_else(|| format!("subscriber.{name}"), |(_, value)| value.clone());
            names.push(format!("moved.c{local}"));
            returned.push(format!("{value} AS c{local}"));
            columns.push(name);
        }
        let written = format!(
            "written AS (INSERT INTO {whole} ({columns}) OVERRIDING SYSTEM VALUE \
               SELECT {names} FROM moved, total WHERE total.rows OPERATOR(pg_catalog.=) ${count}) \
             SELECT CASE WHEN total.rows OPERATOR(pg_catalog.=) ${count} THEN 1 \
               ELSE pg_catalog.concat('pgapace found ', total.rows, ' of ', ${count}, ' rows')\
               ::pg_catalog.int4 END FROM total",
            whole = map.table.sql_name(),
            columns = columns.join(", "),
            names = names.join(", "),
        );
        (returned.join(", "), written)
    }

    /// A part of a WITH clause that fails if the table has other columns than were read. Nothing refers to it, so that it
    /// is analysed and not executed. Citus would execute it.
    fn no_others(&self) -> String {
        let table = &self.map.table;
        if !table.placement.is_plain() {
            return String::new();
        }
        format!("no_others AS ({}), ", table.no_other_columns(&table.sql_only()))
    }

    /// The new value of a column. If it was not sent for some rows, these keep the subscriber's.
    pub(super) fn new_or_kept_value(&mut self, arrays: &mut Arrays, remote: usize) -> String {
        let value = self.new_value(arrays, remote);
        if !self.shape.nulls.contains(remote) {
            return value;
        }
        self.sources.push(Source::Sent(remote));
        self.array(arrays, format!("s{remote}"), INT4_ARRAY);
        format!(
            "CASE WHEN v.s{remote} OPERATOR(pg_catalog.=) 1 THEN {value} ELSE subscriber.{} END",
            self.column(remote)
        )
    }
}
