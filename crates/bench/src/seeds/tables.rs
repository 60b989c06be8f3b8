//! The tables of a random workload.

use std::fmt;

use fastrand::Rng;

/// The type of a key, or what stands for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Int,
    Bigint,
    Text,
    Uuid,
    Date,
    Numeric,
    /// Two columns, the second of which has one of three values.
    Pair,
    /// The unique index of another column is the replica identity.
    Index,
    /// REPLICA IDENTITY FULL, without any index.
    Full,
}

impl Key {
    /// The type of column `id`.
    fn column(self) -> &'static str {
        match self {
            Self::Int | Self::Pair | Self::Index | Self::Full => "int",
            Self::Bigint => "bigint",
            Self::Text => "text",
            Self::Uuid => "uuid",
            Self::Date => "date",
            Self::Numeric => "numeric",
        }
    }

    /// The key with this number: SQL.
    pub(super) fn value(self, number: &str) -> String {
        match self {
            Self::Int | Self::Pair | Self::Index | Self::Full => format!("({number})::int"),
            Self::Bigint => format!("({number})::bigint * 1000"),
            Self::Text => format!("'key ' || ({number})"),
            Self::Uuid => format!("md5(({number})::text)::uuid"),
            Self::Date => format!("date '2000-01-01' + ({number})::int"),
            Self::Numeric => format!("({number})::numeric / 4"),
        }
    }

    /// The columns of ON CONFLICT, if two rows with one key cannot exist.
    pub(super) fn unique(self) -> Option<&'static str> {
        match self {
            Self::Pair => Some("id, part"),
            Self::Full => None,
            _ => Some("id"),
        }
    }
}

/// A table.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) name: String,
    pub(super) key: Key,
    /// Rows before the first transaction.
    pub(super) rows: u64,
    /// Number of partitions by the hash of the key; none: a plain table.
    partitions: u64,
    /// Whether column `one` has a unique index.
    pub(super) unique: bool,
    /// Whether column `big` has values outside of the row.
    pub(super) toast: bool,
    json: bool,
    /// A column with an array.
    tags: bool,
    /// Additional integer columns.
    wide: u64,
    generated: bool,
    /// REPLICA IDENTITY FULL beside a key.
    full_identity: bool,
    /// Columns with an index of their own.
    indexed: Vec<&'static str>,
    /// Whether column `parent` references the previous table.
    pub(super) child: bool,
    /// Bytes of column `s`.
    text: u64,
}

/// All tables.
#[derive(Debug)]
pub(super) struct Tables(pub(super) Vec<Table>);

impl Tables {
    pub(super) fn random(rng: &mut Rng) -> Self {
        let number = *choose(rng, &[1, 1, 1, 2, 3, 5, 10, 40]);
        let rows = *choose(rng, &[100, 2000, 20_000, 100_000]);
        let rows = if number > 5 { rows.min(5000) } else { rows };
        let mut tables: Vec<Table> = Vec::new();
        for position in 0..number {
            let table = Table::random(rng, position, rows, tables.last());
            tables.push(table);
        }
        Self(tables)
    }

    pub(super) fn are_partitioned(&self) -> bool {
        self.0.iter().any(|table| table.partitions > 0)
    }

    /// The number of the first key that no row has.
    pub(super) fn next_key(&self) -> u64 {
        self.0.iter().map(|table| table.rows).max().unwrap_or(0) * 4
    }

    pub(super) fn schema(&self) -> String {
        let sequence = format!("CREATE SEQUENCE next START {}", self.next_key());
        let tables = self.0.iter().map(Table::schema);
        [sequence].into_iter().chain(tables).collect::<Vec<_>>().join(";\n")
    }

    /// DDL for the subscriber alone.
    pub(super) fn subscriber_schema(&self, rng: &mut Rng) -> String {
        let Some(table) = self.0.first() else { return String::new() };
        let name = &table.name;
        if rng.u8(0..12) == 0 { format!("CREATE INDEX ON {name} (v, g)") } else { String::new() }
    }

    pub(super) fn load(&self) -> String {
        self.0.iter().map(Table::load).collect::<Vec<_>>().join(";\n")
    }
}

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.0.first().map_or(0, |table| table.rows);
        write!(f, "{} tables of {rows} rows:", self.0.len())?;
        let mut kinds: Vec<String> = self.0.iter().map(Table::kind).collect();
        kinds.sort();
        kinds.dedup();
        kinds.truncate(4);
        write!(f, " {}", kinds.join(", "))
    }
}

impl Table {
    fn random(rng: &mut Rng, position: usize, rows: u64, previous: Option<&Self>) -> Self {
        let keys = [
            Key::Bigint,
            Key::Text,
            Key::Uuid,
            Key::Date,
            Key::Numeric,
            Key::Pair,
            Key::Index,
            Key::Full,
        ];
        let mut key = if rng.bool() { Key::Int } else { *choose(rng, &keys) };
        // Native reads the whole table for each change.
        if key == Key::Full && rows > 2000 {
            key = Key::Text;
        }
        let whole = matches!(key, Key::Full | Key::Index);
        let partitions = if !whole && rng.u8(0..5) == 0 { *choose(rng, &[2, 7, 24]) } else { 0 };
        let plain = |table: &&Self| table.key == Key::Int && table.partitions == 0;
        let child = key == Key::Int && rng.u8(0..5) == 0 && previous.filter(plain).is_some();
        let columns = ["g", "s", "v"];
        let indexes = *choose(rng, &[0, 0, 1, 3]);
        let full_identity = !whole && rng.u8(0..10) == 0;
        Self {
            name: format!("t{position}"),
            key,
            rows,
            partitions,
            unique: partitions == 0 && rng.u8(0..4) == 0,
            toast: rng.u8(0..8) == 0,
            json: rng.u8(0..5) == 0,
            tags: rng.u8(0..5) == 0,
            wide: *choose(rng, &[0, 0, 0, 8, 30]),
            // It would belong to the whole row, and is not published.
            generated: !full_identity && key != Key::Full && rng.u8(0..10) == 0,
            full_identity,
            indexed: columns.into_iter().take(indexes).collect(),
            child,
            text: *choose(rng, &[8, 32, 32, 200]),
        }
    }

    fn schema(&self) -> String {
        let name = &self.name;
        let mut columns = vec![
            format!("id {} NOT NULL", self.key.column()),
            "g int DEFAULT 0".into(),
            "v bigint DEFAULT 0".into(),
            format!("s text DEFAULT repeat('x', {})", self.text),
        ];
        let mut add = |is: bool, column: &str| {
            if is {
                columns.push(column.to_owned());
            }
        };
        add(self.key == Key::Pair, "part text NOT NULL DEFAULT 'a'");
        add(self.unique, "one int");
        add(self.toast, "big text");
        add(self.json, r#"j jsonb DEFAULT '{"a": 1, "b": [1, 2, 3]}'"#);
        add(self.tags, "tags text[] DEFAULT '{one,two}'");
        add(self.generated, "twice bigint GENERATED ALWAYS AS (v * 2) STORED");
        for number in 0..self.wide {
            add(true, &format!("w{number} int DEFAULT {number}"));
        }
        if let (Some(unique), false) = (self.key.unique(), self.key == Key::Index) {
            add(true, &format!("PRIMARY KEY ({unique})"));
        }
        let by = if self.partitions > 0 { " PARTITION BY HASH (id)" } else { "" };
        let mut statements = vec![format!("CREATE TABLE {name} ({}){by}", columns.join(", "))];
        for partition in 0..self.partitions {
            statements.push(format!(
                "CREATE TABLE {name}_{partition} PARTITION OF {name} FOR VALUES \
                 WITH (MODULUS {}, REMAINDER {partition})",
                self.partitions
            ));
        }
        if self.unique {
            statements.push(format!("CREATE UNIQUE INDEX ON {name} (one)"));
        }
        if self.toast {
            statements.push(format!("ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL"));
        }
        if self.key == Key::Index {
            statements.push(format!("CREATE UNIQUE INDEX {name}_id ON {name} (id)"));
            statements.push(format!("ALTER TABLE {name} REPLICA IDENTITY USING INDEX {name}_id"));
        }
        if self.key == Key::Full || self.full_identity {
            statements.push(format!("ALTER TABLE {name} REPLICA IDENTITY FULL"));
            for partition in 0..self.partitions {
                statements.push(format!("ALTER TABLE {name}_{partition} REPLICA IDENTITY FULL"));
            }
        }
        for column in &self.indexed {
            statements.push(format!("CREATE INDEX ON {name} ({column})"));
        }
        if let (true, Some(parent)) = (self.child, self.previous()) {
            statements.push(format!(
                "ALTER TABLE {name} ADD COLUMN parent int REFERENCES {parent} \
                 ON DELETE CASCADE ON UPDATE CASCADE"
            ));
            statements.push(format!("CREATE INDEX ON {name} (parent)"));
        }
        statements.join(";\n")
    }

    /// The table before this one.
    pub(super) fn previous(&self) -> Option<String> {
        let position: usize = self.name.strip_prefix('t')?.parse().ok()?;
        Some(format!("t{}", position.checked_sub(1)?))
    }

    fn load(&self) -> String {
        let mut columns = vec!["id", "g", "v"];
        let mut values = vec![self.key.value("i"), "i % 50".into(), "0".into()];
        if self.unique {
            columns.push("one");
            values.push("i".into());
        }
        if self.toast {
            columns.push("big");
            values.push("repeat(md5(i::text), 100)".into());
        }
        if self.child {
            columns.push("parent");
            values.push("i".into());
        }
        format!(
            "INSERT INTO {} ({}) SELECT {} FROM generate_series(1, {}) i",
            self.name,
            columns.join(", "),
            values.join(", "),
            self.rows
        )
    }

    /// A few words for the output.
    fn kind(&self) -> String {
        let mut words = vec![format!("{:?}", self.key).to_lowercase()];
        let mut add = |is: bool, word: String| {
            if is {
                words.push(word);
            }
        };
        add(self.partitions > 0, format!("{} partitions", self.partitions));
        add(self.unique, "unique".into());
        add(self.toast, "toast".into());
        add(self.tags, "array".into());
        add(self.wide > 0, format!("{} columns", self.wide + 4));
        add(self.full_identity, "full identity".into());
        add(!self.indexed.is_empty(), format!("{} indexes", self.indexed.len()));
        add(self.child, "child".into());
        words.join(" ")
    }
}

pub(super) fn choose<'a, T>(rng: &mut Rng, values: &'a [T]) -> &'a T {
    &values[rng.usize(0..values.len())]
}
