//! One table: COPY OUT of the publisher into COPY IN of the target, bytes unparsed.

use wire::{Session, quote_ident};

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::target::catalogue::Table;

/// What a copy moved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
    pub(crate) binary: bool,
}

/// Built-in types whose binary form is the same on all supported servers, whatever their settings
/// and encodings are, and that hold no oids of one database.
const EXACT_IN_BINARY: &[u32] = &[
    16,   // bool
    17,   // bytea
    18,   // "char"
    20,   // int8
    21,   // int2
    23,   // int4
    25,   // text
    700,  // float4
    701,  // float8
    1042, // bpchar
    1043, // varchar
    1082, // date
    1083, // time
    1114, // timestamp
    1184, // timestamptz
    1186, // interval
    1266, // timetz
    1700, // numeric
    2950, // uuid
    3802, // jsonb
    869,  // inet
    650,  // cidr
    829,  // macaddr
    774,  // macaddr8
    1560, // bit
    1562, // varbit
];

/// Copies one table in one transaction of the target; `record` writes what goes with it.
pub(crate) fn table(
    source: &mut Session,
    target: &mut Session,
    published: &PublishedTable,
    table: &Table,
    record: impl FnOnce(&mut Session, u64) -> Result<()>,
) -> Result<Copied> {
    let name = table.display_name();
    let failed = |e: &wire::Error| Failure::target(e, &format!("copying into {name}"));
    target.simple("BEGIN").map_err(|e| failed(&e))?;
    let copied = if published.columns.is_empty() {
        rows_without_columns(source, target, published, table)?
    } else {
        bytes(source, target, published, table)?
    };
    record(target, copied.rows)?;
    target.simple("COMMIT").map_err(|e| failed(&e))?;
    Ok(copied)
}

fn bytes(
    source: &mut Session,
    target: &mut Session,
    published: &PublishedTable,
    table: &Table,
) -> Result<Copied> {
    let name = table.display_name();
    let from = |e: &wire::Error| Failure::publisher(e, &format!("copying {name}"));
    let into = |e: &wire::Error| Failure::target(e, &format!("copying into {name}"));
    let binary = is_exact_in_binary(published, table);
    let format = if binary { " WITH (FORMAT binary)" } else { "" };
    let columns: Vec<_> = published.columns.iter().map(|c| quote_ident(&c.name)).collect();
    let mut out = source
        .copy_out(&format!("COPY {} TO STDOUT{format}", published.copy_source()))
        .map_err(|e| from(&e))?;
    let sql = format!("COPY {} ({}) FROM STDIN{format}", table.sql_name(), columns.join(", "));
    let mut input = target.copy_in(&sql).map_err(|e| into(&e))?;
    let mut bytes = 0;
    loop {
        match out.next() {
            Ok(Some(data)) => {
                bytes += data.len() as u64;
                input.send(data).map_err(|e| into(&e))?;
            }
            Ok(None) => break,
            Err(error) => {
                let failure = from(&error);
                if let Err(error) = input.abort("the publisher failed") {
                    tracing::debug!(%error, "ending the copy");
                }
                return Err(failure);
            }
        }
    }
    let rows = input.finish().map_err(|e| into(&e))?;
    Ok(Copied { rows, bytes, binary })
}

/// A table without columns has rows all the same; COPY has no way to say them.
fn rows_without_columns(
    source: &mut Session,
    target: &mut Session,
    published: &PublishedTable,
    table: &Table,
) -> Result<Copied> {
    let sql = format!("SELECT pg_catalog.count(*) FROM {} AS rows", published.copy_source());
    let results = source
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, &format!("counting {}", table.display_name())))?;
    let rows: u64 = results
        .first()
        .and_then(wire::Rows::first)
        .and_then(|row| row.get(0).and_then(|text| text.parse().ok()))
        .ok_or_else(|| Failure::internal("count returned no number"))?;
    let sql = format!(
        "INSERT INTO {} SELECT FROM pg_catalog.generate_series(1, {rows})",
        table.sql_name()
    );
    target
        .simple(&sql)
        .map_err(|e| Failure::target(&e, &format!("filling {}", table.display_name())))?;
    Ok(Copied { rows, bytes: 0, binary: false })
}

fn is_exact_in_binary(published: &PublishedTable, table: &Table) -> bool {
    published.columns.iter().all(|column| {
        table.column(&column.name).is_some_and(|(_, local)| {
            local.base_type == column.base_type && EXACT_IN_BINARY.contains(&local.base_type)
        })
    })
}
