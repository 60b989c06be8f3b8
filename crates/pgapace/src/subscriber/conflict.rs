//! The rules of `--on-conflict`: how a conflict is resolved, by conflict type and table.

use std::str::FromStr;

use engine::table_name::TableName;

use crate::publisher::publication::PublishedTable;
use crate::sqlstate;
use serde::Deserialize;

/// Conflict types, with the names of native logical replication ("Conflicts" in the chapter
/// "Logical Replication"). Violations of foreign keys and exclusion constraints are plain errors
/// there, so they are named after their SQLSTATEs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConflictType {
    InsertExists,
    UpdateExists,
    MultipleUniqueConflicts,
    UpdateMissing,
    DeleteMissing,
    UpdateOriginDiffers,
    DeleteOriginDiffers,
    ForeignKeyViolation,
    ExclusionViolation,
}

const TYPES: usize = 9;

impl ConflictType {
    pub(crate) const ALL: [Self; TYPES] = [
        Self::InsertExists,
        Self::UpdateExists,
        Self::MultipleUniqueConflicts,
        Self::UpdateMissing,
        Self::DeleteMissing,
        Self::UpdateOriginDiffers,
        Self::DeleteOriginDiffers,
        Self::ForeignKeyViolation,
        Self::ExclusionViolation,
    ];

    /// The conflict type of an error of an INSERT, UPDATE or DELETE, if it is a conflict.
    pub(crate) fn of(sqlstate: &str, operation: &str) -> Option<Self> {
        match (sqlstate, operation) {
            (sqlstate::UNIQUE_VIOLATION, "INSERT") => Some(Self::InsertExists),
            (sqlstate::UNIQUE_VIOLATION, "UPDATE") => Some(Self::UpdateExists),
            (sqlstate::EXCLUSION_VIOLATION, _) => Some(Self::ExclusionViolation),
            (sqlstate::FOREIGN_KEY_VIOLATION, _) => Some(Self::ForeignKeyViolation),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::InsertExists => "insert_exists",
            Self::UpdateExists => "update_exists",
            Self::MultipleUniqueConflicts => "multiple_unique_conflicts",
            Self::UpdateMissing => "update_missing",
            Self::DeleteMissing => "delete_missing",
            Self::UpdateOriginDiffers => "update_origin_differs",
            Self::DeleteOriginDiffers => "delete_origin_differs",
            Self::ForeignKeyViolation => "foreign_key_violation",
            Self::ExclusionViolation => "exclusion_violation",
        }
    }

    /// The action without a rule, as in native logical replication.
    fn default_action(self) -> Action {
        match self {
            Self::UpdateMissing | Self::DeleteMissing => Action::Skip,
            // Without a rule, pgapace does not check the origin of rows.
            Self::UpdateOriginDiffers | Self::DeleteOriginDiffers => Action::Apply,
            _ => Action::Error,
        }
    }

    /// The actions that are possible for this type.
    fn actions(self) -> &'static [Action] {
        use Action::{Apply, Error, LastUpdateWins, Skip};
        match self {
            Self::InsertExists | Self::UpdateOriginDiffers | Self::DeleteOriginDiffers => {
                &[Error, Skip, Apply, LastUpdateWins]
            }
            // The update's new row can be inserted, if the publisher sent all of its columns.
            Self::UpdateMissing => &[Error, Skip, Apply],
            // Applying such a change would require deleting other rows.
            Self::UpdateExists
            | Self::MultipleUniqueConflicts
            | Self::DeleteMissing
            | Self::ForeignKeyViolation
            | Self::ExclusionViolation => &[Error, Skip],
        }
    }

    fn is_origin_differs(self) -> bool {
        matches!(self, Self::UpdateOriginDiffers | Self::DeleteOriginDiffers)
    }
}

/// The resolution of a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Stop the subscription.
    Error,
    /// Do not apply the change.
    Skip,
    /// Make the subscriber's row equal to the publisher's: an insert becomes an update, an update
    /// an insert.
    Apply,
    /// Apply if the publisher's commit is not older than the commit that wrote the row, otherwise
    /// skip.
    LastUpdateWins,
}

impl Action {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Skip => "skip",
            Self::Apply => "apply",
            Self::LastUpdateWins => "last_update_wins",
        }
    }
}

/// One rule of `--on-conflict`: `TYPE=ACTION` or `schema.table:TYPE=ACTION`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Rule {
    /// `None` for all tables.
    table: Option<TableName>,
    conflict: ConflictType,
    action: Action,
}

impl TryFrom<String> for Rule {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is neither TYPE=ACTION nor schema.table:TYPE=ACTION");
        let (left, action) = text.rsplit_once('=').ok_or_else(form)?;
        let (table, conflict) = match left.rsplit_once(':') {
            Some((table, conflict)) => (Some(parse_table(table).ok_or_else(form)?), conflict),
            None => (None, left),
        };
        let conflict = ConflictType::ALL
            .into_iter()
            .find(|known| known.name() == conflict)
            .ok_or_else(|| {
                let known: Vec<_> = ConflictType::ALL.iter().map(|known| known.name()).collect();
                format!("{conflict:?} is not a conflict type; use one of: {}", known.join(", "))
            })?;
        let allowed = conflict.actions();
        let action =
            allowed.iter().copied().find(|known| known.name() == action).ok_or_else(|| {
                let allowed: Vec<_> = allowed.iter().map(|known| known.name()).collect();
                format!(
                    "{action:?} is not an action for {}; use one of: {}",
                    conflict.name(),
                    allowed.join(", ")
                )
            })?;
        Ok(Self { table, conflict, action })
    }
}

/// Parses `schema.table`; each name may be in double quotes.
fn parse_table(text: &str) -> Option<TableName> {
    let (schema, rest) = parse_name(text)?;
    let (name, rest) = parse_name(rest.strip_prefix('.')?)?;
    rest.is_empty().then_some(TableName { schema, name })
}

fn parse_name(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find('.').unwrap_or(text.len());
        return (end > 0).then(|| (text[..end].to_owned(), &text[end..]));
    };
    let mut name = String::new();
    let mut rest = quoted;
    loop {
        let end = rest.find('"')?;
        name.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(more) => {
                name.push('"');
                rest = more;
            }
            None => return Some((name, rest)),
        }
    }
}

/// The rules of a subscription. A rule for one table overrides a rule for all tables.
#[derive(Debug, Clone, Default)]
pub(crate) struct Policy(Vec<Rule>);

impl Policy {
    pub(crate) fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// Whether there are any rules.
    pub(crate) fn has_rules(&self) -> bool {
        !self.0.is_empty()
    }

    /// The tables that rules name without effect, because none of that name is published.
    pub(crate) fn unpublished(&self, published: &[PublishedTable]) -> Vec<String> {
        let is_published = |name: &TableName| published.iter().any(|table| table.name == *name);
        let named = self.0.iter().filter_map(|rule| rule.table.as_ref());
        let mut names: Vec<_> =
            named.filter(|table| !is_published(table)).map(TableName::to_string).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The rules for a table; `None` if no rule applies to it.
    pub(crate) fn of(&self, table: &TableName) -> Option<TablePolicy> {
        let of_table = |rule: &&Rule| rule.table.as_ref() == Some(table);
        let mut policy = TablePolicy { actions: [None; TYPES], copied_at: None };
        let general = self.0.iter().filter(|rule| rule.table.is_none());
        for rule in general.chain(self.0.iter().filter(of_table)) {
            policy.actions[rule.conflict as usize] = Some(rule.action);
        }
        policy.actions.iter().any(Option::is_some).then_some(policy)
    }

    /// The first rule that needs the commit time or the origin of rows on the subscriber.
    pub(crate) fn needs_commit_times(&self) -> Option<String> {
        let rule = self.0.iter().find(|rule| {
            rule.action == Action::LastUpdateWins || rule.conflict.is_origin_differs()
        })?;
        Some(format!("{}={}", rule.conflict.name(), rule.action.name()))
    }
}

/// The resolutions for one table with rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TablePolicy {
    actions: [Option<Action>; TYPES],
    /// When the table's copy was committed, in microseconds since 1970. Rows that the copy wrote
    /// belong to this subscription.
    pub(crate) copied_at: Option<i64>,
}

impl TablePolicy {
    pub(crate) fn action(&self, conflict: ConflictType) -> Action {
        self.actions[conflict as usize].unwrap_or(conflict.default_action())
    }

    /// Whether the subscription goes on after a change whose values another row has.
    pub(crate) fn is_about_unique_values(&self) -> bool {
        use ConflictType::{
            ExclusionViolation, InsertExists, MultipleUniqueConflicts, UpdateExists,
        };
        [InsertExists, UpdateExists, MultipleUniqueConflicts, ExclusionViolation]
            .into_iter()
            .any(|kind| self.action(kind) != Action::Error)
    }

    /// Whether pgapace must read the origin of a row before it changes that row. The number of
    /// affected rows does not show a different origin.
    pub(crate) fn looks_before(&self, conflict: ConflictType) -> bool {
        conflict.is_origin_differs() && self.actions[conflict as usize].is_some()
    }

    /// Whether each transaction is committed alone, so that its rows carry its commit time.
    pub(crate) fn is_timed(&self) -> bool {
        self.actions.contains(&Some(Action::LastUpdateWins))
            || ConflictType::ALL.iter().any(|conflict| self.looks_before(*conflict))
    }
}

/// The resolution of a conflict, for a table with or without rules.
pub(crate) fn action(policy: Option<&TablePolicy>, conflict: ConflictType) -> Action {
    policy.map_or(conflict.default_action(), |policy| policy.action(conflict))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &[&str]) -> Policy {
        Policy::new(rules.iter().map(|rule| rule.parse().unwrap()).collect())
    }

    fn table(schema: &str, name: &str) -> TableName {
        TableName { schema: schema.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn a_tables_own_rule_wins() {
        let policy = policy(&["public.t:insert_exists=apply", "insert_exists=skip"]);
        let of =
            |name| policy.of(&table("public", name)).unwrap().action(ConflictType::InsertExists);
        assert_eq!((of("t"), of("u")), (Action::Apply, Action::Skip));
        let other = policy.of(&table("public", "u")).unwrap();
        assert_eq!(other.action(ConflictType::UpdateExists), Action::Error);
        assert_eq!(other.action(ConflictType::DeleteMissing), Action::Skip);
    }

    #[test]
    fn tables_without_rules_have_no_policy() {
        assert_eq!(policy(&[]).of(&table("public", "t")), None);
        assert_eq!(policy(&["public.t:insert_exists=apply"]).of(&table("other", "t")), None);
        assert_eq!(action(None, ConflictType::InsertExists), Action::Error);
    }

    #[test]
    fn names_may_be_quoted() {
        let rule: Rule = r#""a.b"."c:=""d":delete_missing=error"#.parse().unwrap();
        assert_eq!(rule.table, Some(table("a.b", "c:=\"d")));
    }

    #[test]
    fn nonsense_is_refused() {
        let message = |text: &str| text.parse::<Rule>().unwrap_err();
        assert!(message("update_exists=apply").contains("error, skip"));
        assert!(message("delete_missing=last_update_wins").contains("not an action"));
        assert!(message("insert_exist=skip").contains("insert_exists, update_exists"));
        assert!(message("t:insert_exists=skip").contains("schema.table"));
        assert!(message("insert_exists").contains("TYPE=ACTION"));
    }

    #[test]
    fn rules_that_need_commit_times() {
        let needs = |rule: &str| policy(&[rule]).needs_commit_times().is_some();
        assert!(needs("insert_exists=last_update_wins") && needs("update_origin_differs=skip"));
        assert!(needs("delete_origin_differs=apply") && !needs("insert_exists=apply"));
        let timed = |rule: &str| policy(&[rule]).of(&table("a", "b")).unwrap().is_timed();
        assert!(timed("insert_exists=last_update_wins") && timed("delete_origin_differs=error"));
        assert!(!timed("insert_exists=apply"));
        let looks = policy(&["update_origin_differs=apply"]).of(&table("a", "b")).unwrap();
        assert!(looks.looks_before(ConflictType::UpdateOriginDiffers));
        assert!(!looks.looks_before(ConflictType::DeleteOriginDiffers));
    }
}
