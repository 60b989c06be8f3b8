//! Records of verifications: the last one of each table, and its differences.
//!
//! A table has up to four rows in `pgapace.verification`:
//!
//! ```text
//!  verb_begun  one of pgapace verify that goes on, or was interrupted ──┐ complete
//!  verb        the last complete one of pgapace verify  ◄───────────────┘
//!  begun       one in the background that goes on (--verify-interval) ──┐ complete
//!  background  the last complete one in the background  ◄───────────────┘
//! ```
//!
//! The results and differences of earlier verifications stay until the table is complete: one that ends before it has
//! compared the table says nothing about it. A table that a verb has completed forgets all other differences, and is
//! begun again in the background.

pub(crate) mod differences;
pub(crate) mod schedule;
pub(crate) mod summary;

use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::FxHashSet;
use serde::Serialize;
use wire::{PreparedStatement, Session, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{field, first_row, parse_name_array};
use crate::subscriber::state::{SubscriptionId, name_array, reading, writing};
use crate::table_name::TableNameFields;

/// The scope of a verification that compares everything.
pub(crate) const ALL_ROWS: &str = "all rows";

/// Counts of the compared rows and bytes, and of the differences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    /// Rows and their text on the publisher.
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) missing: u64,
    pub(crate) extra: u64,
    pub(crate) different: u64,
}

impl Counts {
    pub(crate) fn differences(&self) -> u64 {
        self.missing + self.extra + self.different
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
        self.chunks += other.chunks;
        self.missing += other.missing;
        self.extra += other.extra;
        self.different += other.different;
    }
}

/// The kind of a verification, and of its row. See the head of the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum VerificationKind {
    Verb,
    VerbBegun,
    Begun,
    Background,
}

impl VerificationKind {
    const ALL: [Self; 4] = [Self::Verb, Self::VerbBegun, Self::Begun, Self::Background];

    fn name(self) -> &'static str {
        match self {
            Self::Verb => "verb",
            Self::VerbBegun => "verb_begun",
            Self::Begun => "begun",
            Self::Background => "background",
        }
    }

    fn parse(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| Failure::internal(format!("unknown kind of verification {name:?}")))
    }

    /// Whether it is one of a verb, complete or not.
    pub(crate) fn is_of_verb(self) -> bool {
        matches!(self, Self::Verb | Self::VerbBegun)
    }
}

/// What verifies: the verb `pgapace verify`, or a run in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verifier {
    Verb,
    Background,
}

impl Verifier {
    /// The kinds of its rows: begun, and complete.
    fn kinds(self) -> (VerificationKind, VerificationKind) {
        match self {
            Self::Verb => (VerificationKind::VerbBegun, VerificationKind::Verb),
            Self::Background => (VerificationKind::Begun, VerificationKind::Background),
        }
    }
}

/// The same for all tables of one verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub(crate) struct VerificationNumber(pub(crate) i64);

/// A verification of one table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct TableVerification {
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    pub(crate) kind: VerificationKind,
    pub(crate) number: VerificationNumber,
    /// The rows that were compared: all, or a part.
    pub(crate) scope: String,
    pub(crate) started_at: Option<String>,
    /// Null if it was interrupted, or still runs.
    pub(crate) finished_at: Option<String>,
    /// The LSN of the last pair of snapshots.
    pub(crate) lsn: Option<String>,
    #[serde(flatten)]
    pub(crate) counts: Counts,
    /// `equal` or `different`; null until it is finished.
    pub(crate) result: Option<String>,
    /// Columns that were not compared.
    pub(crate) columns_left: Vec<String>,
    /// The key up to which all rows are compared, if it is compared by ranges.
    pub(crate) position: Option<Vec<String>>,
    /// [`NewTable::plan`]; `None` of earlier versions of pgapace.
    #[serde(skip)]
    pub(crate) plan: Option<i64>,
}

/// A table whose verification begins.
#[derive(Debug, Clone)]
pub(crate) struct NewTable {
    pub(crate) name: TableName,
    /// Columns that are not compared.
    pub(crate) columns_left: Vec<String>,
    /// A number that differs if the table is compared otherwise.
    pub(crate) plan: i64,
}

/// A table of one verification.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TableOf<'a> {
    pub(crate) id: SubscriptionId,
    pub(crate) name: &'a TableName,
    pub(crate) number: VerificationNumber,
}

impl TableOf<'_> {
    /// Finds the rows of the table, in the relation with alias `of`.
    fn of_table(&self, of: char) -> String {
        format!(
            "{of}.subscription = {} AND {of}.schema_name = {} AND {of}.table_name = {}",
            self.id.0,
            quote_literal(&self.name.schema),
            quote_literal(&self.name.name)
        )
    }

    /// Finds the rows of this verification of the table.
    fn of_verification(&self, of: char) -> String {
        format!("{} AND {of}.verification = {}", self.of_table(of), self.number.0)
    }
}

const COLUMNS: &str = "schema_name, table_name, verification, scope, started_at, finished_at, lsn, \
    rows, bytes, chunks, missing, extra, different, result, columns_left, position, \
    kind, plan";

/// The verifications of all tables of a subscription.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Vec<TableVerification>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM pgapace.verification WHERE subscription = $1::pg_catalog.int4 \
         ORDER BY schema_name, table_name, verification"
    );
    let rows = session.query(&sql, &[Some(&id.0.to_string())]).map_err(|e| reading(&e))?;
    let names = |text: Option<&str>| text.map(parse_name_array).transpose();
    rows.iter()
        .map(|row| {
            Ok(TableVerification {
                name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
                kind: VerificationKind::parse(row.get(16).unwrap_or_default())?,
                number: VerificationNumber(field(&row, 2)?),
                scope: field(&row, 3)?,
                started_at: row.get(4).map(str::to_owned),
                finished_at: row.get(5).map(str::to_owned),
                lsn: row.get(6).map(str::to_owned),
                counts: Counts {
                    rows: field(&row, 7)?,
                    bytes: field(&row, 8)?,
                    chunks: field(&row, 9)?,
                    missing: field(&row, 10)?,
                    extra: field(&row, 11)?,
                    different: field(&row, 12)?,
                },
                result: row.get(13).map(str::to_owned),
                columns_left: names(row.get(14))?.unwrap_or_default(),
                position: names(row.get(15))?,
                plan: row.get(17).map(|_| field(&row, 17)).transpose()?,
            })
        })
        .collect()
}

/// A verification that was begun.
#[derive(Debug)]
pub(crate) struct BegunVerification {
    pub(crate) number: VerificationNumber,
    /// Its tables with results or differences of earlier verifications. Nobody adds others meanwhile: one session at
    /// a time verifies.
    earlier: FxHashSet<TableName>,
}

impl BegunVerification {
    /// Whether the end of the table's verification forgets something.
    pub(crate) fn has_earlier(&self, table: &TableName) -> bool {
        self.earlier.contains(table)
    }
}

/// Begins a verification of these tables, which forgets what an interrupted one of the same verifier has found.
pub(crate) fn begin(
    session: &mut Session,
    id: SubscriptionId,
    verifier: Verifier,
    tables: &[NewTable],
    scope: &str,
) -> Result<BegunVerification> {
    let values: Vec<_> = tables
        .iter()
        .map(|table| {
            format!(
                "({}, {}, {}::pg_catalog.text[], {}::pg_catalog.int8)",
                quote_literal(&table.name.schema),
                quote_literal(&table.name.name),
                quote_literal(&name_array(&table.columns_left)),
                quote_literal(&table.plan.to_string()),
            )
        })
        .collect();
    let values = values.join(", ");
    // The tables have no statistics, with which one row is expected: the planner would compare each row with each
    // name.
    let results = session
        .simple(&format!(
            "BEGIN; SET LOCAL enable_nestloop = off; SET LOCAL enable_hashjoin = on; \
             DELETE FROM pgapace.difference d USING pgapace.verification v, \
                 (VALUES {values}) t (schema_name, table_name, l, p) \
               WHERE v.subscription = {id} AND v.schema_name = t.schema_name \
                 AND v.table_name = t.table_name AND v.kind = '{kind}' AND d.subscription = {id} \
                 AND d.schema_name = v.schema_name AND d.table_name = v.table_name \
                 AND d.verification = v.verification; \
             DELETE FROM pgapace.verification v USING (VALUES {values}) t (schema_name, table_name, l, p) \
               WHERE v.subscription = {id} AND v.schema_name = t.schema_name \
                 AND v.table_name = t.table_name AND v.kind = '{kind}'; \
             SELECT pg_catalog.nextval('pgapace.verification_number'); \
             INSERT INTO pgapace.verification \
               (subscription, schema_name, table_name, kind, verification, scope, columns_left, plan) \
             SELECT {id}, t.schema_name, t.table_name, '{kind}', \
               pg_catalog.currval('pgapace.verification_number'), {scope}, t.columns_left, t.plan \
             FROM (VALUES {values}) t (schema_name, table_name, columns_left, plan); \
             SELECT t.schema_name, t.table_name FROM (VALUES {values}) t (schema_name, table_name, l, p) \
               JOIN (SELECT v.schema_name, v.table_name FROM pgapace.verification v \
                   WHERE v.subscription = {id} AND v.kind <> '{kind}' \
                 UNION SELECT d.schema_name, d.table_name FROM pgapace.difference d \
                   WHERE d.subscription = {id}) e USING (schema_name, table_name); \
             SELECT pg_catalog.currval('pgapace.verification_number'); \
             COMMIT",
            id = id.0,
            kind = verifier.kinds().0.name(),
            scope = quote_literal(scope),
        ))
        .map_err(|e| writing(&e))?;
    let [.., known, number, _] = &results[..] else {
        return Err(Failure::internal("no results of the begin of a verification"));
    };
    let name =
        |row: wire::Row<'_>| Ok(TableName { schema: field(&row, 0)?, name: field(&row, 1)? });
    let earlier = known.iter().map(name).collect::<Result<_>>()?;
    let number = first_row(std::slice::from_ref(number), "the number of a verification")?;
    Ok(BegunVerification { number: VerificationNumber(field(&number, 0)?), earlier })
}

/// Begins again with a table that is compared otherwise than before the interruption, which may have been complete.
pub(crate) fn begin_again(session: &mut Session, table: TableOf<'_>, plan: i64) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.verification v SET plan = {plan}, position = NULL, result = NULL, finished_at = NULL, \
           first_lsn = NULL, rows = 0, bytes = 0, chunks = 0, missing = 0, extra = 0, different = 0, \
           kind = CASE v.kind WHEN 'verb' THEN 'verb_begun' ELSE v.kind END WHERE {}",
        table.of_verification('v')
    );
    session.simple(&sql).map(drop).map_err(|e| writing(&e))
}

/// SQL for the transaction that makes all rows equal that a verification found different. So its result is that they
/// are, and no difference is left.
pub(crate) fn made_equal_sql(table: TableOf<'_>) -> String {
    format!(
        "DELETE FROM pgapace.difference d WHERE {}; \
         UPDATE pgapace.verification v SET missing = 0, extra = 0, different = 0, result = 'equal' WHERE {}",
        table.of_table('d'),
        table.of_verification('v')
    )
}

/// Where the verification of a table stands.
#[derive(Debug)]
pub(crate) struct Standing<'a> {
    pub(crate) lsn: Lsn,
    /// All that is compared up to the position.
    pub(crate) counts: Counts,
    pub(crate) position: Option<&'a [String]>,
    pub(crate) result: Option<&'static str>,
}

/// How the rows of a table change when its verification advances, by the parameters of [`advance`].
const STANDING: &str = "\
    lsn = $5::pg_catalog.pg_lsn, first_lsn = least(v.first_lsn, $5::pg_catalog.pg_lsn), \
    rows = $6::pg_catalog.int8, bytes = $7::pg_catalog.int8, chunks = $8::pg_catalog.int8, \
    missing = $9::pg_catalog.int8, extra = $10::pg_catalog.int8, different = $11::pg_catalog.int8, \
    position = $12::pg_catalog.text[], result = $13::pg_catalog.text, \
    started_at = coalesce(v.started_at, pg_catalog.now()), \
    finished_at = CASE WHEN $13::pg_catalog.text IS NOT NULL THEN pg_catalog.now() END";

/// Finds the rows of the table by the parameters of [`advance`], in the relation with alias `of`.
fn of_table(of: char) -> String {
    format!(
        "{of}.subscription = $1::pg_catalog.int4 AND {of}.schema_name = $2::pg_catalog.text \
           AND {of}.table_name = $3::pg_catalog.text"
    )
}

/// The same for the rows of the verification.
fn of_verification(of: char) -> String {
    format!("{} AND {of}.verification = $4::pg_catalog.int8", of_table(of))
}

/// The end of a table's verification, whose row takes the place of the last one of this verifier. It does nothing if
/// another verification has begun. With `has_earlier`, results and differences of earlier ones are forgotten: they stay
/// until the table is complete, so in the same statement, after the row is found and locked.
fn completed_sql(verifier: Verifier, has_earlier: bool) -> String {
    let (begun, complete) = verifier.kinds();
    let (begun, complete) = (begun.name(), complete.name());
    // The background leaves an interrupted verb as it is, because that may be resumed.
    let (kept, replaced) = match verifier {
        Verifier::Verb => (String::new(), "'verb', 'begun'"),
        Verifier::Background => {
            let of_verb = format!(
                " AND NOT EXISTS (SELECT FROM pgapace.verification v WHERE {} \
                   AND v.verification = d.verification AND v.kind = 'verb_begun')",
                of_table('v')
            );
            (of_verb, "'background'")
        }
    };
    let (forget, forgotten) = match has_earlier {
        true => {
            let forget = format!(
                "begun AS MATERIALIZED (SELECT FROM pgapace.verification v \
                   WHERE {of_verification} AND v.kind = '{begun}' FOR UPDATE), \
                 differences AS (DELETE FROM pgapace.difference d \
                   WHERE {of_difference} AND d.verification IS DISTINCT FROM $4::pg_catalog.int8 \
                     AND EXISTS (SELECT FROM begun){kept}), \
                 replaced AS (DELETE FROM pgapace.verification v \
                   WHERE {of_table} AND v.kind IN ({replaced}) AND EXISTS (SELECT FROM begun) RETURNING v.kind), ",
                of_verification = of_verification('v'),
                of_difference = of_table('d'),
                of_table = of_table('v'),
            );
            // The key has room for the new kind when the row of that kind is gone.
            (forget, " AND (SELECT pg_catalog.count(*) FROM replaced) >= 0")
        }
        false => (String::new(), ""),
    };
    format!(
        "WITH {forget}advanced AS (UPDATE pgapace.verification v SET {STANDING}, kind = '{complete}' \
           WHERE {of_verification} AND v.kind = '{begun}'{forgotten} RETURNING v.*), \
         unmarked AS (UPDATE pgapace.relation r \
           SET stale_lsn = NULL, stale_reason = NULL, stale_through = NULL FROM advanced v \
           WHERE {of_relation} AND v.result = 'equal' AND v.scope = '{ALL_ROWS}' AND v.columns_left = '{{}}' \
             AND r.state = 'ready' AND r.requested IS NULL AND r.stale_lsn IS NOT NULL \
             AND v.first_lsn >= greatest(r.stale_lsn, r.stale_through, r.sync_lsn) \
           RETURNING r.subscription) \
         SELECT (SELECT pg_catalog.count(*) FROM advanced), (SELECT pg_catalog.count(*) FROM unmarked)",
        of_verification = of_verification('v'),
        of_relation = of_table('r'),
    )
}

/// Records where the verification of a table stands. Returns whether it ended a mark that the
/// table may lack changes. `has_earlier`: [`BegunVerification::has_earlier`].
///
/// Such a mark ends when all rows and columns were found equal, all of them under snapshots behind the
/// mark: the publisher's rows then include the changes that it did not send.
pub(crate) fn advance(
    session: &mut Session,
    table: TableOf<'_>,
    standing: &Standing<'_>,
    (verifier, has_earlier): (Verifier, bool),
) -> Result<bool> {
    let Standing { lsn, counts, position, result } = standing;
    let Counts { rows, bytes, chunks, missing, extra, different } = *counts;
    let numbers = [rows, bytes, chunks, missing, extra, different].map(|number| number.to_string());
    let [id, number] = [i64::from(table.id.0), table.number.0].map(|number| number.to_string());
    let (lsn, position) = (lsn.to_string(), position.map(name_array));
    let mut params = [&id, &table.name.schema, &table.name.name, &number, &lsn]
        .map(|text| Some(text.as_str()))
        .to_vec();
    params.extend(numbers.iter().map(|number| Some(number.as_str())));
    params.extend([position.as_deref(), *result]);
    let (name, sql) = match (result, has_earlier) {
        (None, _) => {
            let sql = format!(
                "UPDATE pgapace.verification v SET {STANDING} WHERE {} RETURNING 1, 0",
                of_verification('v')
            );
            ("verification_advanced", sql)
        }
        (Some(_), false) => ("verification_completed", completed_sql(verifier, has_earlier)),
        (Some(_), true) => ("verification_replaced", completed_sql(verifier, has_earlier)),
    };
    let statement = PreparedStatement { name, sql: &sql };
    let [written] =
        session.query_prepared_each([(statement, &params[..])]).map_err(|e| writing(&e))?;
    let row = written.first();
    let [advanced, unmarked]: [u64; 2] = match &row {
        Some(row) => [field(row, 0)?, field(row, 1)?],
        None => [0, 0],
    };
    if advanced == 0 {
        return Err(Failure::new(
            Class::Busy,
            format!("the verification of table {} was replaced", table.name),
        )
        .hint("Another verification of it has begun, or the subscription was dropped."));
    }
    Ok(unmarked > 0)
}
