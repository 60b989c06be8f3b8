//! Tables of a server, and their lock rules as text.

use std::sync::{Arc, OnceLock};

use engine::relation::{RemoteColumn, RemoteRelation};
use engine::table_name::TableName;
use engine::writeset::{LockColumn, LockRules, RowLock};
use pgoutput::ReplicaIdentity;
use testbed::{Cluster, servers};
use wire::{ConnInfo, Session};

use super::MAJORS;
use crate::subscriber::catalogue::{CatalogueReader, TableFacts};
use crate::subscriber::format::PublisherTypes;
use crate::subscriber::locks::Locking;
use crate::subscriber::mapping::TableMap;
use crate::subscriber::session::{Purpose, Subscriber};

fn cluster(major: u16) -> &'static Cluster {
    static SERVERS: [OnceLock<Cluster>; MAJORS.len()] = [const { OnceLock::new() }; MAJORS.len()];
    let at = MAJORS.iter().position(|known| *known == major).unwrap();
    SERVERS[at]
        .get_or_init(|| Cluster::builder(&servers::find_or_fetch(major).unwrap()).start().unwrap())
}

/// Runs a test in a new database on each server.
pub(super) fn on_servers(name: &str, sql: &str, test: impl Fn(&mut Bed)) {
    for major in MAJORS {
        let cluster = cluster(major);
        cluster.create_database(name).unwrap();
        cluster.sql(name, sql).unwrap();
        let info = ConnInfo::parse_with_env(&cluster.conninfo(name), &|_| None, None).unwrap();
        let session = Subscriber::new(info, "locks").connect(Purpose::Apply).unwrap();
        test(&mut Bed { session, ordered: true });
    }
}

/// A mapped table with its lock rules.
pub(super) struct Mapped {
    remote: Arc<RemoteRelation>,
    pub(super) locks: LockRules,
}

pub(super) struct Bed {
    session: Session,
    pub(super) ordered: bool,
}

impl Bed {
    pub(super) fn map(&mut self, name: &str, columns: &str) -> Mapped {
        self.map_with(name, ReplicaIdentity::Default, columns)
    }

    /// `columns` are `name:type`; a `*` marks those of the publisher's replica identity.
    pub(super) fn map_with(
        &mut self,
        name: &str,
        identity: ReplicaIdentity,
        columns: &str,
    ) -> Mapped {
        let table = TableName { schema: "public".to_owned(), name: name.to_owned() };
        let found = CatalogueReader::default().read_one(&mut self.session, &table);
        let TableFacts { table, constraints } = found.unwrap().unwrap();
        let column = |words: &str| {
            let (name, type_name) = words.split_once(':').unwrap();
            let type_oid = match type_name {
                "int4" => 23,
                "int8" => 20,
                "text" => 25,
                "numeric" => 1700,
                _ => panic!("{type_name}"),
            };
            RemoteColumn {
                name: name.trim_end_matches('*').to_owned(),
                key: name.ends_with('*') || identity == ReplicaIdentity::Full,
                type_oid: pgoutput::TypeOid(type_oid),
                type_modifier: -1,
            }
        };
        let remote = RemoteRelation {
            id: pgoutput::RelId(1),
            name: TableName { schema: "public".to_owned(), name: name.to_owned() },
            replica_identity: identity,
            columns: columns.split_whitespace().map(column).collect(),
        };
        let types = PublisherTypes::default();
        let map = TableMap::new(Arc::new(remote), table, &types).unwrap();
        let map = map.with_constraints(&constraints, &types, Locking::of_workers(self.ordered));
        Mapped { remote: map.remote, locks: map.locks.unwrap() }
    }

    pub(super) fn oid(&mut self, name: &str) -> u32 {
        let sql = "SELECT $1::pg_catalog.regclass::pg_catalog.oid";
        let name = format!("public.{name}");
        let rows = self.session.query(sql, &[Some(&name)]).unwrap();
        rows.one().unwrap().str(0).unwrap().parse().unwrap()
    }
}

pub(super) fn names(map: &Mapped, columns: &[LockColumn]) -> String {
    let name = |column: &LockColumn| {
        let star = if column.in_identity { "*" } else { "" };
        format!("{}{star} {:?}", map.remote.columns[column.column].name, column.form)
    };
    columns.iter().map(name).collect::<Vec<_>>().join(", ")
}

pub(super) fn row(map: &Mapped) -> String {
    match &map.locks.row {
        RowLock::Key(columns) => format!("key {}", names(map, columns)),
        RowLock::WholeRow(columns) => format!("row {}", names(map, columns)),
        RowLock::Table => "table".to_owned(),
    }
}

/// Sorted by columns.
pub(super) fn unique(map: &Mapped) -> Vec<String> {
    let describe = |lock: &engine::writeset::UniqueLock| {
        let certain = if lock.certain { "" } else { " uncertain" };
        let nulls = if lock.nulls_not_distinct { " nulls" } else { "" };
        format!("{}{certain}{nulls}", names(map, &lock.columns))
    };
    let mut all: Vec<_> = map.locks.unique.iter().map(describe).collect();
    all.sort();
    all
}
