//! Hints for a failure that need a look at both servers: the privileges that are missing.

use std::collections::HashSet;

use wire::quote_ident;

use crate::check;
use crate::check::report::{Fix, Severity, Side};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure};
use crate::sqlstate;
use crate::table_name::sql_name;

/// SQLSTATE of a missing privilege.
const INSUFFICIENT_PRIVILEGE: &str = sqlstate::INSUFFICIENT_PRIVILEGE;
/// How the statement begins that creates pgapace's schema for the role.
const CREATE_SCHEMA: &str = "CREATE SCHEMA pgapace ";
/// Most statements of a hint.
const SHOWN: usize = 10;

/// Adds the statements that grant missing privileges, as `pgapace check` finds them.
pub(super) fn with_grants(config: &Config, failure: Failure) -> Failure {
    let hint = failure.hint.as_deref().unwrap_or_default();
    let complete = grants_something(hint) && !hint.contains('…');
    if failure.sqlstate.as_deref() != Some(INSUFFICIENT_PRIVILEGE) || complete {
        return failure;
    }
    let side = if failure.class == Class::Publisher { Side::Publisher } else { Side::Subscriber };
    let findings = check::check(config).findings;
    let mut grants: Vec<String> = findings
        .into_iter()
        .filter(|finding| finding.side == side)
        .filter(|finding| finding.severity == Severity::Blocker || finding.topic == "privileges")
        .filter_map(|finding| match finding.fix {
            Some(Fix::Sql(sql)) if grants_something(&sql) => Some(sql),
            _ => None,
        })
        .collect();
    // Without its schema, pgapace comes to nothing else. Then comes what the failure is about.
    let failing = failing_relation(&failure);
    let is_of_failure = |sql: &str| failing.as_ref().is_some_and(|name| sql.contains(name));
    grants.sort_by_key(|sql| (!sql.starts_with(CREATE_SCHEMA), !is_of_failure(sql)));
    // One statement may help several tables.
    let mut seen = HashSet::new();
    grants.retain(|grant| seen.insert(grant.clone()));
    if grants.is_empty() {
        return match failure.hint {
            Some(_) => failure,
            None => failure.hint(
                "The role lacks no privilege that pgapace needs for itself: see what the message \
                 names, perhaps a function that a trigger calls. pgapace check looks at all others.",
            ),
        };
    }
    if grants.len() > SHOWN {
        let all = grants.len();
        grants.truncate(SHOWN);
        grants.push(format!("-- and {} more: pgapace check", all - SHOWN));
    }
    failure.hint(grants.join("\n       "))
}

/// The relation that the failure is about, as a statement names it. Messages of other languages do not tell it.
fn failing_relation(failure: &Failure) -> Option<String> {
    let table = || failure.offender.as_deref()?.relation.as_ref().map(sql_name);
    named_relation(failure).or_else(table)
}

fn named_relation(failure: &Failure) -> Option<String> {
    let (_, named) = failure.message.split_once("permission denied for ")?;
    let named = named.rsplit_once(" while ").map_or(named, |(named, _)| named);
    let (kind, name) = named.split_once(' ')?;
    ["table", "sequence", "view"].contains(&kind).then(|| quote_ident(name.trim()))
}

fn grants_something(sql: &str) -> bool {
    ["GRANT ", "ALTER ROLE ", CREATE_SCHEMA].iter().any(|start| sql.starts_with(start))
}
