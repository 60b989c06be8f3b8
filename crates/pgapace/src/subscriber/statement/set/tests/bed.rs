//! A server, a session with the settings of an apply worker, and rows as a publisher sends them.

use std::sync::{Arc, OnceLock};

use engine::net::{Old, Row, Segment, Update};
use engine::relation::{RemoteColumn, RemoteRelation};
use engine::table_name::TableName;
use pgoutput::{Column, ReplicaIdentity};
use testbed::{Cluster, servers};
use wire::{ConnInfo, Reply, Session, affected_rows};

use super::MAJORS;
use crate::subscriber::catalogue::{CatalogueReader, TableFacts};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::locks::Locking;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::statement::cache::StatementCache;
use crate::subscriber::statement::copy::Format;
use crate::subscriber::statement::set::{Expected, SetBuffers, queue_segment};

pub(super) const FORMATS: [Format; 2] = [Format::Text, Format::Binary];

/// The values of one row.
pub(super) type Values = Vec<Option<Vec<u8>>>;

fn cluster(major: u16) -> &'static Cluster {
    static SERVERS: [OnceLock<Cluster>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
    let at = MAJORS.iter().position(|known| *known == major).unwrap();
    SERVERS[at]
        .get_or_init(|| Cluster::builder(&servers::find_or_fetch(major).unwrap()).start().unwrap())
}

pub(super) struct Bed {
    pub(super) session: Session,
    info: ConnInfo,
    pub(super) statements: StatementCache,
    buffers: SetBuffers,
    /// Whether statements check their row counts themselves.
    pub(super) counted: bool,
    /// The numbers that the statements of the last segment have returned.
    pub(super) returned: Vec<i64>,
}

/// The row counts of the statements between BEGIN and COMMIT: (expected, affected).
pub(super) type Counts = Vec<(u64, u64)>;

impl Bed {
    /// Creates a database with these objects.
    pub(super) fn new(major: u16, sql: &str) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("bed{number}");
        let cluster = cluster(major);
        cluster.create_database(&name).unwrap();
        cluster.sql(&name, sql).unwrap();
        let info = ConnInfo::parse_with_env(&cluster.conninfo(&name), &|_| None, None).unwrap();
        let session = Subscriber::new(info.clone(), "bed").connect(Purpose::Apply).unwrap();
        let (statements, buffers) = (StatementCache::default(), SetBuffers::default());
        Self { session, info, statements, buffers, counted: false, returned: Vec::new() }
    }

    /// Opens another session on the same database.
    pub(super) fn second_session(&self) -> Session {
        Subscriber::new(self.info.clone(), "bed").connect(Purpose::Apply).unwrap()
    }

    /// Maps `public.name` with the published `columns`; a `*` marks key columns.
    pub(super) fn map(&mut self, name: &str, identity: ReplicaIdentity, columns: &str) -> TableMap {
        let table = TableName { schema: "public".to_owned(), name: name.to_owned() };
        let found = CatalogueReader::default().read_one(&mut self.session, &table);
        let TableFacts { table, constraints } = found.unwrap().unwrap();
        let columns = columns
            .split_whitespace()
            .map(|column| RemoteColumn {
                name: column.trim_end_matches('*').to_owned(),
                key: column.ends_with('*') || identity == ReplicaIdentity::Full,
                type_oid: pgoutput::TypeOid(25),
                type_modifier: -1,
            })
            .collect();
        let remote = RemoteRelation {
            id: pgoutput::RelId(1),
            name: TableName { schema: "public".to_owned(), name: name.to_owned() },
            replica_identity: identity,
            columns,
        };
        let types = PublisherTypes::default();
        TableMap::new(Arc::new(remote), table, &types).unwrap().with_constraints(
            &constraints,
            &types,
            Locking::SingleWorker,
        )
    }

    pub(super) fn sql(&mut self, sql: &str) {
        self.session.simple(sql).unwrap();
    }

    pub(super) fn value(&mut self, sql: &str) -> String {
        self.session.query(sql, &[]).unwrap().one().unwrap().str(0).unwrap().to_owned()
    }

    /// Rows in the format in which a publisher sends them.
    pub(super) fn rows(&mut self, format: Format, query: &str) -> Vec<Values> {
        match format {
            Format::Text => self
                .session
                .query(query, &[])
                .unwrap()
                .iter()
                .map(|row| {
                    (0..row.len()).map(|at| row.get(at).map(|v| v.as_bytes().to_vec())).collect()
                })
                .collect(),
            Format::Binary => {
                let mut bytes = Vec::new();
                let sql = format!("COPY ({query}) TO STDOUT (FORMAT binary)");
                let mut out = self.session.copy_out(&sql).unwrap();
                while let Some(data) = out.next().unwrap() {
                    bytes.extend_from_slice(data);
                }
                binary_rows(&bytes[19..])
            }
        }
    }

    /// Executes a segment in a transaction; returns the counts, or the SQLSTATE.
    pub(super) fn apply(
        &mut self,
        map: &TableMap,
        segment: &Segment<'_>,
    ) -> Result<Counts, String> {
        let result = self.begin(map, segment);
        self.sql(if result.is_ok() { "COMMIT" } else { "ROLLBACK" });
        result
    }

    /// Executes a segment in a transaction that stays open.
    pub(super) fn begin(
        &mut self,
        map: &TableMap,
        segment: &Segment<'_>,
    ) -> Result<Counts, String> {
        self.sql("BEGIN");
        let parsed = self.statements.parsed();
        let mut expected: Vec<u64> = Vec::new();
        let queued = queue_segment(
            &mut self.session,
            &mut self.statements,
            &mut self.buffers,
            map,
            segment,
            self.counted,
            &mut |Expected { rows, .. }| expected.push(rows),
        );
        self.session.queue_sync();
        self.session.flush().unwrap();
        let (mut affected, mut failed) = (Vec::new(), None);
        self.returned.clear();
        loop {
            match self.session.next_reply().unwrap() {
                Reply::CommandComplete("LOCK TABLE") => affected.push(None),
                Reply::CommandComplete(tag) => affected.push(Some(affected_rows(tag))),
                Reply::DataRow(row) => {
                    let number = row
                        .get(0)
                        .and_then(|value| str::from_utf8(value).ok()?.parse::<i64>().ok());
                    self.returned.extend(number);
                }
                Reply::Error(error) => failed = Some(format!("{} {}", error.code, error.message)),
                Reply::Ready(_) => break,
                _ => {}
            }
        }
        let failed = failed.or(queued.err().map(|error| error.to_string()));
        if let Some(failed) = failed {
            for name in self.statements.forget_after(parsed) {
                self.session.queue_close_statement(&name);
            }
            self.session.finish_queued().unwrap();
            return Err(failed);
        }
        self.statements.executed(self.statements.parsed());
        assert_eq!(expected.len(), affected.len(), "one answer for each Execute");
        // A lock changes no rows.
        let counts = expected.into_iter().zip(affected);
        Ok(counts.filter_map(|(expected, affected)| Some((expected, affected?))).collect())
    }

    /// Executes a segment that must affect the expected rows; returns the number of statements.
    pub(super) fn apply_all(&mut self, map: &TableMap, segment: &Segment<'_>) -> usize {
        let counts = self.apply(map, segment).unwrap();
        for (expected, affected) in &counts {
            assert_eq!(expected, affected, "{counts:?}");
        }
        counts.len()
    }

    /// Fails unless both queries return the same rows as text.
    pub(super) fn assert_same(&mut self, left: &str, right: &str) {
        let texts = |bed: &mut Self, sql: &str| {
            let rows = bed.rows(Format::Text, &format!("SELECT r::text FROM ({sql}) r ORDER BY 1"));
            rows.into_iter()
                .map(|mut row| String::from_utf8(row.remove(0).unwrap()).unwrap())
                .collect::<Vec<_>>()
        };
        let (left, right) = (texts(self, left), texts(self, right));
        assert_eq!(left, right);
        assert!(!left.is_empty());
    }
}

fn binary_rows(mut bytes: &[u8]) -> Vec<Values> {
    fn take<'b>(bytes: &mut &'b [u8], count: usize) -> &'b [u8] {
        let (head, tail) = bytes.split_at(count);
        *bytes = tail;
        head
    }
    let mut rows = Vec::new();
    loop {
        let count = i16::from_be_bytes(take(&mut bytes, 2).try_into().unwrap());
        if count < 0 {
            return rows;
        }
        let mut row = Vec::new();
        for _ in 0..count {
            let length = i32::from_be_bytes(take(&mut bytes, 4).try_into().unwrap());
            row.push(usize::try_from(length).ok().map(|length| take(&mut bytes, length).to_vec()));
        }
        rows.push(row);
    }
}

/// A row of a message.
pub(super) fn row(format: Format, values: &Values) -> Row<'_> {
    Row::Merged(columns(format, values))
}

pub(super) fn columns(format: Format, values: &Values) -> Vec<Column<'_>> {
    values
        .iter()
        .map(|value| match (value, format) {
            (None, _) => Column::Null,
            (Some(value), Format::Text) => Column::Text(value),
            (Some(value), Format::Binary) => Column::Binary(value),
        })
        .collect()
}

/// A row to find, with its class.
pub(super) fn old(format: Format, values: &Values, class: u32, nth: u32) -> Old<'_> {
    Old { row: row(format, values), class, nth }
}

pub(super) fn inserts(format: Format, rows: &[Values]) -> Segment<'_> {
    Segment { inserts: rows.iter().map(|r| row(format, r)).collect(), ..Segment::default() }
}

pub(super) fn updates(format: Format, rows: &[Values]) -> Segment<'_> {
    let update = |values| Update { old: None, new: row(format, values) };
    Segment { updates: rows.iter().map(update).collect(), ..Segment::default() }
}

pub(super) fn deletes(format: Format, rows: &[Values]) -> Segment<'_> {
    let deletes = rows.iter().map(|values| old(format, values, 0, 0)).collect();
    Segment { deletes, ..Segment::default() }
}
