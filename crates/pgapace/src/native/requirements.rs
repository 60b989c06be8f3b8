//! What must hold before a native subscription is adopted. Pure: facts in, problems out.

use pgoutput::Lsn;
use wire::quote_ident;

use super::subscription::Found;
use crate::error::{Class, Failure};

/// Something that must change first, and the next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) message: String,
    pub(crate) next_step: String,
}

impl Problem {
    fn new(message: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { message: message.into(), next_step: next_step.into() }
    }
}

/// Most tables that a message names.
const NAMED: usize = 5;

/// What keeps the subscription from being adopted.
pub(crate) fn problems(found: &Found) -> Vec<Problem> {
    let Found { subscription: native, tables, prepared, refused_functions, role, .. } = found;
    let name = quote_ident(&native.name);
    let mut problems = Vec::new();
    if !native.may_alter {
        problems.push(Problem::new(
            format!("role {role} may not alter the native subscription: {} owns it", native.owner),
            format!("GRANT {} TO {role};", quote_ident(&native.owner)),
        ));
    }
    if !native.password_required && !native.superuser {
        problems.push(Problem::new(
            "only a superuser may alter a subscription with password_required = false",
            format!("ALTER SUBSCRIPTION {name} SET (password_required = true);"),
        ));
    }
    if !refused_functions.is_empty() {
        let functions = refused_functions.join(", ");
        problems.push(Problem::new(
            format!("role {role} may not use the replication origin of the native subscription"),
            format!("GRANT EXECUTE ON FUNCTION {functions} TO {role};"),
        ));
    }
    if let Some(skip) = native.skip {
        problems.push(Problem::new(
            format!("the native subscription is to skip the transaction with LSN {skip}"),
            format!(
                "Wait until it has, or: ALTER SUBSCRIPTION {name} SKIP (lsn = NONE); and use \
                 pgapace skip after the adoption."
            ),
        ));
    }
    if native.two_phase == 'p' {
        problems.push(Problem::new(
            "two_phase of the native subscription is not enabled yet (subtwophasestate p)",
            "Wait until all its tables are ready and its worker has restarted.",
        ));
    }
    if !prepared.is_empty() {
        problems.push(Problem::new(
            format!(
                "the native subscription has {} prepared transactions: {}",
                prepared.len(),
                list(prepared.iter().cloned())
            ),
            "COMMIT PREPARED or ROLLBACK PREPARED them on the publisher, and wait until the native \
             subscription has applied that.",
        ));
    }
    let unready: Vec<_> = tables.iter().filter(|table| table.state != 'r').collect();
    if !unready.is_empty() {
        let named = unready
            .iter()
            .map(|table| format!("{} ({})", table.display_name(), state_name(table.state)));
        problems.push(Problem::new(
            format!(
                "{} tables of the native subscription are not ready: {}",
                unready.len(),
                list(named)
            ),
            "Wait until srsubstate of pg_subscription_rel is r for all of them.",
        ));
    }
    problems
}

fn state_name(state: char) -> &'static str {
    match state {
        'i' => "init",
        'd' => "datasync",
        'f' => "finishedcopy",
        's' => "syncdone",
        'r' => "ready",
        _ => "unknown",
    }
}

fn list(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMED);
    let mut named: Vec<_> = names.take(NAMED).collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    named.join(", ")
}

/// One failure for all problems.
pub(crate) fn failure(name: &str, problems: &[Problem]) -> Option<Failure> {
    if problems.is_empty() {
        return None;
    }
    let lines = |text: fn(&Problem) -> &str| {
        problems.iter().map(text).collect::<Vec<_>>().join("\n         ")
    };
    let class = if problems.iter().any(|problem| problem.next_step.starts_with("GRANT")) {
        Class::Subscriber
    } else {
        Class::Config
    };
    let message = format!("native subscription {} cannot be adopted", quote_ident(name));
    Some(
        Failure::new(class, message)
            .detail(lines(|problem| &problem.message))
            .hint(lines(|problem| &problem.next_step)),
    )
}

/// Where pgapace starts: after everything that the native subscription has applied or acknowledged.
///
/// `origin` is the end LSN of its last transaction, `None` if there was none; `confirmed` is the
/// position of its slot, which also passes WAL without changes for it.
pub(crate) fn start(origin: Option<Lsn>, confirmed: Lsn) -> Lsn {
    origin.map_or(confirmed, |origin| origin.max(confirmed))
}

/// The LSN before which changes of a table are in its copy. A table of a subscription that has not
/// reached this position since must not get them again.
pub(crate) fn sync_lsn(start: Lsn, recorded: Option<Lsn>) -> Lsn {
    recorded.unwrap_or(start)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::native::subscription::{NativeSubscription, NativeTable};

    pub(crate) fn found() -> Found {
        Found {
            subscription: NativeSubscription {
                oid: 16400,
                name: "Sub".to_owned(),
                owner: "boss".to_owned(),
                may_alter: true,
                superuser: false,
                enabled: true,
                slot: Some("sub".to_owned()),
                publications: vec!["pub".to_owned()],
                binary: false,
                streaming: "f".to_owned(),
                two_phase: 'd',
                disable_on_error: false,
                skip: None,
                password_required: true,
                run_as_owner: false,
                origin: "any".to_owned(),
            },
            tables: vec![table("a", 'r'), table("b", 'r')],
            workers: vec![1],
            prepared: Vec::new(),
            refused_functions: Vec::new(),
            role: "app".to_owned(),
        }
    }

    fn table(name: &str, state: char) -> NativeTable {
        NativeTable { schema: "public".to_owned(), name: name.to_owned(), state, lsn: None }
    }

    #[test]
    fn a_sound_subscription_has_no_problem() {
        assert_eq!(problems(&found()), []);
        assert!(failure("s", &[]).is_none());
    }

    #[test]
    fn every_problem_is_told_at_once_with_its_next_step() {
        let mut found = found();
        found.subscription.may_alter = false;
        found.subscription.password_required = false;
        found.subscription.skip = Some(Lsn(16));
        found.subscription.two_phase = 'p';
        found.tables[1].state = 'd';
        found.prepared = (0..7).map(|n| format!("pg_gid_16400_{n}")).collect();
        found.refused_functions = vec!["pg_replication_origin_progress(text,boolean)".to_owned()];
        let problems = problems(&found);
        assert_eq!(problems.len(), 7);
        let text = failure("Sub", &problems).map(|failure| failure.to_string()).unwrap_or_default();
        for part in [
            "\"Sub\"",
            "GRANT \"boss\" TO app;",
            "password_required = true",
            "GRANT EXECUTE ON FUNCTION pg_replication_origin_progress(text,boolean) TO app;",
            "SKIP (lsn = NONE)",
            "public.b (datasync)",
            "pg_gid_16400_4, 2 more",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn the_start_is_behind_everything_applied_and_acknowledged() {
        assert_eq!(start(None, Lsn(70)), Lsn(70));
        assert_eq!(start(Some(Lsn(90)), Lsn(70)), Lsn(90));
        assert_eq!(start(Some(Lsn(60)), Lsn(70)), Lsn(70));
    }

    #[test]
    fn a_table_keeps_its_own_sync_lsn() {
        assert_eq!(sync_lsn(Lsn(70), Some(Lsn(80))), Lsn(80));
        assert_eq!(sync_lsn(Lsn(70), None), Lsn(70));
    }
}
