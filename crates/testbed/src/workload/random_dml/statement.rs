//! Random statements for a random schema.

use fastrand::Rng;

use super::schema::{Column, Key, RandomSchema, Role, Table, Unique};
use super::value::{ValueType, quoted};
use crate::compare::quote;

/// Highest identity value in conditions; low values exist the longest.
const IDENTITY_MAX: u32 = 300;

pub(super) struct Generator<'a> {
    schema: &'a RandomSchema,
    /// The quoted name of the schema.
    schema_sql: String,
}

impl<'a> Generator<'a> {
    pub(super) fn new(schema: &'a RandomSchema) -> Self {
        Self { schema, schema_sql: quote(&schema.options.schema) }
    }

    /// Generates the next statement.
    pub(super) fn next(&self, rng: &mut Rng) -> String {
        let table = &self.schema.models[rng.usize(..self.schema.models.len())];
        let options = &self.schema.options;
        let choice = rng.u32(0..1000);
        if options.truncate && choice < 4 {
            let restart = if rng.bool() { " RESTART IDENTITY" } else { "" };
            return format!("TRUNCATE {}{restart} CASCADE", table.name);
        }
        if table.key == Key::InsertOnly {
            return self.insert(table, rng);
        }
        match choice {
            0..400 => self.insert(table, rng),
            400..700 => self.update(table, rng),
            700..800 if options.key_changes && table.key != Key::IdentityAlways => {
                self.change_key(table, rng)
            }
            700..850 => self.update(table, rng),
            _ => format!("DELETE FROM {} WHERE {}", table.name, condition(table, rng)),
        }
    }

    fn insert(&self, table: &Table, rng: &mut Rng) -> String {
        let columns: Vec<&Column> = table
            .columns
            .iter()
            .filter(|column| column.is_writable())
            .filter(|column| !(column.default.is_some() && rng.bool()))
            .collect();
        let rows = match rng.u8(0..50) {
            0 => rng.usize(50..200),
            1..20 => rng.usize(2..6),
            _ => 1,
        };
        // More rows with long values would not improve the test.
        let rows = if table.columns.iter().any(is_long) { rows.min(8) } else { rows };
        let names: Vec<String> = columns.iter().map(|column| column.sql()).collect();
        let values: Vec<String> = (0..rows)
            .map(|_| {
                let row: Vec<String> = columns.iter().map(|c| self.value(c, rng)).collect();
                format!("({})", row.join(", "))
            })
            .collect();
        if columns.is_empty() {
            return format!("INSERT INTO {} DEFAULT VALUES", table.name);
        }
        let conflict = self.on_conflict(table, rng);
        let (names, values) = (names.join(", "), values.join(",\n"));
        format!("INSERT INTO {} ({names}) VALUES {values}{conflict}", table.name)
    }

    fn on_conflict(&self, table: &Table, rng: &mut Rng) -> String {
        let choice = rng.u8(0..10);
        // A deferrable constraint cannot be the arbiter of ON CONFLICT.
        if table.unique == Some(Unique::Deferrable) || choice < 3 {
            return String::new();
        }
        let has_key = matches!(table.key, Key::Primary | Key::CompositePrimary | Key::UniqueIndex);
        if choice < 5 && has_key {
            let key: Vec<String> =
                table.columns[..table.key_columns].iter().map(Column::sql).collect();
            if let Some(column) = random_column(table, rng, |c| c.role == Role::Plain) {
                let column = column.sql();
                return format!(
                    " ON CONFLICT ({}) DO UPDATE SET {column} = excluded.{column}",
                    key.join(", ")
                );
            }
        }
        " ON CONFLICT DO NOTHING".into()
    }

    fn update(&self, table: &Table, rng: &mut Rng) -> String {
        let changeable =
            |column: &Column| matches!(column.role, Role::Plain | Role::Unique | Role::Reference);
        let mut assignments: Vec<String> = Vec::new();
        for _ in 0..rng.usize(1..=3) {
            let Some(column) = random_column(table, rng, changeable) else { break };
            let name = column.sql();
            if assignments.iter().any(|assignment| assignment.starts_with(&format!("{name} = "))) {
                continue;
            }
            let value = match rng.u8(0..6) {
                0 if column.role == Role::Plain && column.kind.is_number() => {
                    format!("{name} + {}", rng.u8(1..9))
                }
                0 if column.kind.is_text() => format!("{name} || {}", quoted("+")),
                1 => name.clone(),
                _ => self.value(column, rng),
            };
            assignments.push(format!("{name} = {value}"));
        }
        if assignments.is_empty() {
            return self.insert(table, rng);
        }
        let condition = condition(table, rng);
        format!("UPDATE {} SET {} WHERE {condition}", table.name, assignments.join(", "))
    }

    fn change_key(&self, table: &Table, rng: &mut Rng) -> String {
        let column = &table.columns[rng.usize(..table.key_columns)];
        let mut sets = format!("{} = {}", column.sql(), column.kind.random_key(rng));
        if rng.bool()
            && let Some(other) = random_column(table, rng, |c| c.role == Role::Plain)
        {
            sets.push_str(&format!(", {} = {}", other.sql(), self.value(other, rng)));
        }
        format!("UPDATE {} SET {sets} WHERE {}", table.name, one_row(table, rng))
    }

    fn value(&self, column: &Column, rng: &mut Rng) -> String {
        if column.nullable && rng.u8(0..6) == 0 {
            return "NULL".into();
        }
        match column.role {
            Role::Key | Role::Reference => column.kind.random_key(rng),
            Role::Unique if column.kind == ValueType::Int => rng.u32(1..150).to_string(),
            Role::Unique => {
                let case = if rng.bool() { 'a' } else { 'A' };
                quoted(&format!("{case}{}", rng.u32(1..150)))
            }
            _ => column.kind.random(rng, &self.schema_sql),
        }
    }
}

fn is_long(column: &Column) -> bool {
    matches!(column.kind, ValueType::LongText | ValueType::LongBytes)
}

fn random_column<'t>(
    table: &'t Table,
    rng: &mut Rng,
    fits: impl Fn(&Column) -> bool,
) -> Option<&'t Column> {
    let fitting: Vec<&Column> = table.columns.iter().filter(|column| fits(column)).collect();
    rng.choice(fitting)
}

/// A condition that matches often one row, sometimes a few.
fn condition(table: &Table, rng: &mut Rng) -> String {
    if table.key == Key::IdentityAlways || rng.u8(0..4) > 0 {
        return one_row(table, rng);
    }
    let column = &table.columns[0];
    let (first, last) = column.kind.random_key_range(rng);
    format!("{} BETWEEN {first} AND {last}", column.sql())
}

/// A condition on all key columns.
fn one_row(table: &Table, rng: &mut Rng) -> String {
    let equal: Vec<String> = table.columns[..table.key_columns]
        .iter()
        .map(|column| {
            let value = match column.role {
                Role::Identity => rng.u32(1..=IDENTITY_MAX).to_string(),
                _ => column.kind.random_key(rng),
            };
            format!("{} = {value}", column.sql())
        })
        .collect();
    equal.join(" AND ")
}
