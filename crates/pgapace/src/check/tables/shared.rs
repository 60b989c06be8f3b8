//! Published tables that other subscriptions change, too.

use std::collections::HashSet;

use engine::table_name::TableName;
use wire::Session;

use crate::check::SubscriptionState;
use crate::check::report::{Reporter, Severity};
use crate::check::same_rows::{self, Overlap};
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::other_subscriptions;

/// Published tables that other subscriptions change, too.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) tables: HashSet<TableName>,
    /// Those of which another one has copied the same rows.
    pub(super) same_rows: HashSet<TableName>,
}

/// Reports tables that other subscriptions change, too.
pub(super) fn report(
    (publisher, session): (&mut Session, &mut Session),
    (config, known): (&Config, &SubscriptionState),
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<Shared> {
    let keys: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
    let listed = other_subscriptions::list(session, &config.name, &keys)?;
    let others = other_subscriptions::labels(&listed);
    let same_rows = same_rows::among(publisher, listed, &config.publications, published)?;
    let mut shared = Shared::default();
    for (place, others) in others {
        let table = &published[place];
        let name = table.name.to_string();
        let of_it = || same_rows.iter().filter(|same| same.place == place);
        let message = if let Some(same) = of_it().find(|same| same.overlap != Overlap::Possible) {
            if same.copies_data || same.is_earlier() {
                shared.same_rows.insert(table.name.clone());
            }
            same_rows::message(&name, same)
        } else {
            let same = of_it().next().map(same_rows::message_of_possible).unwrap_or_default();
            format!(
                "table {name} is changed by {others}, too. pgapace resync and rebase refuse it, and pgapace verify \
                 reports rows of the others{same}"
            )
        };
        let refused = shared.same_rows.contains(&table.name)
            && config.if_not_empty != IfNotEmpty::Keep
            && known.to_copy(config, table);
        let severity = if refused { Severity::Blocker } else { Severity::Warning };
        let side = reporter.side;
        reporter.report.add(severity, side, "shared", message).on(&name);
        shared.tables.insert(table.name.clone());
    }
    Ok(shared)
}
