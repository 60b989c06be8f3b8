//! The DDL of a random schema for publisher and subscriber.

use fastrand::Rng;

use super::schema::{Column, Key, Options, Role, Table, Unique};
use super::value::quoted;
use crate::compare::{TableName, quote};

/// Creates the schema on the publisher.
pub(super) fn publisher(options: &Options, tables: &[Table]) -> String {
    let mut sql = preamble(options);
    for table in tables {
        let columns: Vec<String> =
            table.columns.iter().map(|column| column_ddl(options, column, true, false)).collect();
        create(&mut sql, table, &columns, table.partitions);
    }
    sql
}

/// Creates the schema on the subscriber, where the order of columns may differ.
pub(super) fn subscriber(options: &Options, tables: &[Table], rng: &mut Rng) -> String {
    let mut sql = preamble(options);
    for table in tables {
        let mut columns: Vec<String> = table
            .columns
            .iter()
            .map(|column| {
                column_ddl(options, column, !options.subscriber_differs, options.narrow_subscriber)
            })
            .collect();
        let mut partitions = table.partitions;
        if options.subscriber_differs {
            let more = table.key != Key::Full || options.full_identity_extra_columns;
            if rng.bool() && more {
                columns.push("only_here text DEFAULT 'subscriber'".into());
            }
            rng.shuffle(&mut columns);
            if partitions > 0 {
                partitions = if rng.bool() { 0 } else { partitions + 1 };
            }
        }
        create(&mut sql, table, &columns, partitions);
    }
    sql
}

fn preamble(options: &Options) -> String {
    let schema = quote(&options.schema);
    format!(
        "CREATE SCHEMA {schema};
         CREATE TYPE {schema}.mood AS ENUM ('sad', 'ok', '''quite'' happy');
         CREATE DOMAIN {schema}.positive AS integer CHECK (VALUE > 0);
         CREATE TYPE {schema}.pair AS (a integer, b text);\n"
    )
}

fn column_ddl(options: &Options, column: &Column, with_default: bool, narrow: bool) -> String {
    let schema = quote(&options.schema);
    let kind = match column.role {
        Role::Identity | Role::Generated(_) => column.kind.sql(&schema),
        _ if narrow => column.kind.narrow_sql(&schema),
        _ => column.kind.sql(&schema),
    };
    let mut sql = format!("{} {kind}", column.sql());
    match &column.role {
        Role::Identity => sql.push_str(" GENERATED ALWAYS AS IDENTITY"),
        Role::Generated(from) => sql.push_str(&format!(" GENERATED ALWAYS AS ({from}) STORED")),
        _ => {}
    }
    if !column.nullable {
        sql.push_str(" NOT NULL");
    }
    if let Some(default) = &column.default
        && with_default
    {
        sql.push_str(&format!(" DEFAULT {default}"));
    }
    sql
}

fn create(sql: &mut String, table: &Table, columns: &[String], partitions: u32) {
    let name = &table.name;
    let key: Vec<String> = table.columns[..table.key_columns].iter().map(Column::sql).collect();
    let key_list = key.join(", ");
    let mut elements = columns.to_vec();
    if matches!(table.key, Key::Primary | Key::CompositePrimary | Key::IdentityAlways) {
        elements.push(format!("PRIMARY KEY ({key_list})"));
    }
    if table.unique == Some(Unique::Deferrable) {
        elements.push("UNIQUE (u1) DEFERRABLE INITIALLY DEFERRED".into());
    }
    if let Some(parent) = &table.parent {
        elements.push(format!(
            "FOREIGN KEY (parent) REFERENCES {parent} ON DELETE CASCADE ON UPDATE CASCADE"
        ));
    }
    let by =
        if partitions > 0 { format!(" PARTITION BY HASH ({})", key[0]) } else { String::new() };
    sql.push_str(&format!("CREATE TABLE {name} (\n  {}){by};\n", elements.join(",\n  ")));
    for remainder in 0..partitions {
        let part = TableName::new(&name.schema, format!("{}_p{remainder}", name.name));
        sql.push_str(&format!(
            "CREATE TABLE {part} PARTITION OF {name} \
             FOR VALUES WITH (MODULUS {partitions}, REMAINDER {remainder});\n"
        ));
    }
    for column in table.columns.iter().filter(|column| column.external) {
        sql.push_str(&format!("ALTER TABLE {name} ALTER {} SET STORAGE EXTERNAL;\n", column.sql()));
    }
    match table.unique {
        Some(Unique::Column) => sql.push_str(&format!("CREATE UNIQUE INDEX ON {name} (u1);\n")),
        Some(Unique::TwoColumns) => {
            sql.push_str(&format!("CREATE UNIQUE INDEX ON {name} (u2, u1);\n"));
        }
        Some(Unique::Partial) => {
            sql.push_str(&format!(
                "CREATE UNIQUE INDEX ON {name} (u1) WHERE u2 > {};\n",
                quoted("b")
            ));
        }
        Some(Unique::Expression) => {
            sql.push_str(&format!("CREATE UNIQUE INDEX ON {name} (lower(u2));\n"));
        }
        Some(Unique::Deferrable) | None => {}
    }
    match table.key {
        Key::UniqueIndex => {
            let index = quote(&format!("{}_identity", name.name));
            sql.push_str(&format!(
                "CREATE UNIQUE INDEX {index} ON {name} ({key_list});\n\
                 ALTER TABLE {name} REPLICA IDENTITY USING INDEX {index};\n"
            ));
        }
        Key::Full => sql.push_str(&format!("ALTER TABLE {name} REPLICA IDENTITY FULL;\n")),
        _ => {}
    }
}
