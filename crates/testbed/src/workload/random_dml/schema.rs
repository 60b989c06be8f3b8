//! Random table definitions.

use fastrand::Rng;

use super::ddl;
use super::value::ValueType;
use crate::compare::{TableName, quote};

/// Features that may occur in a schema and its changes.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of tables. With six or more, each kind of key occurs at least once.
    pub tables: usize,
    /// The SQL schema of the tables.
    pub schema: String,
    /// Tables with REPLICA IDENTITY FULL and no key.
    pub identity_full: bool,
    /// Partitioned tables, which the subscriber partitions differently or not at all.
    pub partitioned: bool,
    /// Stored generated columns.
    pub generated_columns: bool,
    /// Unique indexes in addition to the key: plain, multicolumn, partial, on an expression,
    /// deferrable.
    pub unique_indexes: bool,
    /// Foreign keys with cascading actions.
    pub foreign_keys: bool,
    /// The subscriber has a different order of columns, different defaults, and additional columns.
    pub subscriber_differs: bool,
    /// Tables without a key may have additional columns on the subscriber. Off by default, because
    /// the native apply worker compares the whole row and does not find such a row.
    pub full_identity_extra_columns: bool,
    /// Names that require quotes.
    pub odd_names: bool,
    /// Statements that change keys.
    pub key_changes: bool,
    /// TRUNCATE statements.
    pub truncate: bool,
    /// Some transactions commit in two phases.
    pub two_phase: bool,
    /// Values that are equal but not identical (`1.0` and `1.00`), in keys and in tables without a
    /// key. Off by default, because the native apply worker may change any of several equal rows.
    pub equal_spellings: bool,
    /// The subscriber's columns have a smaller precision or length, or another type. The values on
    /// the subscriber then differ from the publisher's.
    pub narrow_subscriber: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tables: 8,
            schema: "random".into(),
            identity_full: true,
            partitioned: true,
            generated_columns: true,
            unique_indexes: true,
            foreign_keys: true,
            subscriber_differs: true,
            full_identity_extra_columns: false,
            odd_names: true,
            key_changes: true,
            truncate: true,
            two_phase: false,
            equal_spellings: false,
            narrow_subscriber: false,
        }
    }
}

/// A random schema: its DDL for both sides, and its tables.
#[derive(Clone, Debug)]
pub struct RandomSchema {
    /// DDL for the publisher.
    pub publisher_ddl: String,
    /// DDL for the subscriber.
    pub subscriber_ddl: String,
    /// The tables to publish: roots of partition trees, not partitions.
    pub tables: Vec<TableName>,
    pub(super) options: Options,
    pub(super) models: Vec<Table>,
}

impl RandomSchema {
    /// Generates the schema of a seed.
    pub fn generate(seed: u64, options: &Options) -> Self {
        let mut rng = Rng::with_seed(seed ^ 0x5c8e_3a00);
        let mut models = Vec::new();
        for number in 0..options.tables.max(1) {
            let table = Table::random(&mut rng, options, number, &models);
            models.push(table);
        }
        let publisher_ddl = ddl::publisher(options, &models);
        let subscriber_ddl = ddl::subscriber(options, &models, &mut rng);
        let tables = models.iter().map(|table| table.name.clone()).collect();
        Self { publisher_ddl, subscriber_ddl, tables, options: options.clone(), models }
    }

    /// The DDL of a publication of all tables that publishes via the partition root.
    pub fn publication_ddl(&self, name: &str) -> String {
        let tables: Vec<String> = self.tables.iter().map(TableName::to_string).collect();
        format!(
            "CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)",
            quote(name),
            tables.join(", ")
        )
    }
}

/// How rows of a table are identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Primary,
    /// Both key columns together.
    CompositePrimary,
    /// A primary key that is an identity column GENERATED ALWAYS.
    IdentityAlways,
    /// No primary key: a unique index is the replica identity.
    UniqueIndex,
    /// No key: the whole old row is the replica identity.
    Full,
    /// No key and no replica identity: rows are only inserted.
    InsertOnly,
}

/// A unique index in addition to the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unique {
    Column,
    TwoColumns,
    Partial,
    Expression,
    Deferrable,
}

#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) name: TableName,
    pub(super) key: Key,
    /// Columns; the key columns come first.
    pub(super) columns: Vec<Column>,
    pub(super) key_columns: usize,
    pub(super) partitions: u32,
    pub(super) unique: Option<Unique>,
    /// The table that a foreign key references.
    pub(super) parent: Option<TableName>,
}

#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) kind: ValueType,
    pub(super) role: Role,
    pub(super) nullable: bool,
    pub(super) default: Option<String>,
    /// TOAST storage without compression.
    pub(super) external: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Key,
    Identity,
    Plain,
    /// One of the two columns in unique indexes.
    Unique,
    /// References the key of the parent table.
    Reference,
    /// A generated column, with the column in its expression.
    Generated(String),
}

impl Column {
    fn new(name: &str, kind: ValueType, role: Role) -> Self {
        let nullable = !matches!(role, Role::Key | Role::Identity);
        Self { name: name.to_string(), kind, role, nullable, default: None, external: false }
    }

    /// The quoted column name.
    pub(super) fn sql(&self) -> String {
        quote(&self.name)
    }

    /// Whether a statement may assign a value to the column.
    pub(super) fn is_writable(&self) -> bool {
        !matches!(self.role, Role::Identity | Role::Generated(_))
    }
}

impl Table {
    fn random(rng: &mut Rng, options: &Options, number: usize, earlier: &[Self]) -> Self {
        let mut kinds = vec![
            Key::Primary,
            Key::CompositePrimary,
            Key::IdentityAlways,
            Key::UniqueIndex,
            Key::InsertOnly,
        ];
        if options.identity_full {
            kinds.push(Key::Full);
        }
        // Use every kind once, then choose at random.
        let key = match kinds.get(number) {
            Some(key) => *key,
            None => kinds[rng.usize(..kinds.len())],
        };
        let odd = ["Mixed Case", "quo\"te", "select", "naïve.dot", "back\\slash", "it's"];
        let plain_name = format!("t{number}");
        let name = if options.odd_names && rng.u8(0..3) == 0 {
            format!("{plain_name} {}", odd[rng.usize(..odd.len())])
        } else {
            plain_name
        };
        let mut columns = key_columns(rng, options, key);
        let key_columns = columns.len();
        let mut unique = None;
        if options.unique_indexes && rng.u8(0..3) > 0 && key != Key::Full {
            let kinds = [
                Unique::Column,
                Unique::TwoColumns,
                Unique::Partial,
                Unique::Expression,
                Unique::Deferrable,
            ];
            unique = Some(kinds[rng.usize(..kinds.len())]);
            columns.push(Column::new("u1", ValueType::Int, Role::Unique));
            columns.push(Column::new("u2", ValueType::Text, Role::Unique));
        }
        let mut parent = None;
        // A cascade deletes and updates rows, which a table without replica identity cannot
        // publish.
        if options.foreign_keys && key != Key::InsertOnly && rng.bool() {
            let parents: Vec<&Self> =
                earlier.iter().filter(|table| table.key == Key::Primary).collect();
            if let Some(found) = rng.choice(parents) {
                parent = Some(found.name.clone());
                columns.push(Column::new("parent", found.columns[0].kind, Role::Reference));
            }
        }
        columns.extend(plain_columns(rng, options, key));
        // Since PostgreSQL 18 a replica identity must not contain an unpublished generated column.
        if options.generated_columns && key != Key::Full && rng.bool() {
            let from = columns.iter().find(|column| column.role == Role::Plain);
            let expression = from.map_or("'none'".into(), |column| {
                format!("CASE WHEN {} IS NULL THEN 'null' ELSE 'set' END", column.sql())
            });
            columns.push(Column::new("generated", ValueType::Text, Role::Generated(expression)));
        }
        let can_partition = matches!(key, Key::Primary | Key::CompositePrimary)
            && unique.is_none()
            && parent.is_none();
        let partitions = if options.partitioned && can_partition && rng.u8(0..2) == 0 {
            rng.u32(2..=4)
        } else {
            0
        };
        let name = TableName::new(&options.schema, name);
        Self { name, key, columns, key_columns, partitions, unique, parent }
    }
}

fn key_columns(rng: &mut Rng, options: &Options, key: Key) -> Vec<Column> {
    let mut kind = || match ValueType::KEYS[rng.usize(..ValueType::KEYS.len())] {
        ValueType::Numeric if options.equal_spellings => ValueType::LooseNumeric,
        kind => kind,
    };
    match key {
        Key::Primary | Key::UniqueIndex => vec![Column::new("k", kind(), Role::Key)],
        Key::CompositePrimary => {
            vec![Column::new("k1", kind(), Role::Key), Column::new("k 2", kind(), Role::Key)]
        }
        Key::IdentityAlways => vec![Column::new("id", ValueType::BigInt, Role::Identity)],
        // A column to select rows by; it is not unique.
        Key::Full => vec![Column::new("pick", ValueType::Int, Role::Key)],
        Key::InsertOnly => Vec::new(),
    }
}

fn plain_columns(rng: &mut Rng, options: &Options, key: Key) -> Vec<Column> {
    let mut columns = Vec::new();
    // Few columns with few values, so that whole rows are equal.
    let spelled = options.equal_spellings && key == Key::Full;
    let count = if spelled { rng.usize(1..=2) } else { rng.usize(2..=7) };
    for number in 0..count {
        let kind = if spelled {
            ValueType::SPELLED[rng.usize(..ValueType::SPELLED.len())]
        } else {
            ValueType::ALL[rng.usize(..ValueType::ALL.len())]
        };
        if key == Key::Full && !kind.has_equality() {
            continue;
        }
        let name = match (options.odd_names, number) {
            (true, 1) => "Order".to_string(),
            (true, 2) => "a \"b\"".to_string(),
            _ => format!("c{number}"),
        };
        let mut column = Column::new(&name, kind, Role::Plain);
        column.nullable = rng.u8(0..4) > 0;
        if rng.u8(0..3) == 0 {
            column.default = Some(kind.random(rng, &quote(&options.schema)))
                .filter(|default| !default.contains("SELECT"));
        }
        column.external = kind == ValueType::LongText && rng.bool();
        columns.push(column);
    }
    columns
}
