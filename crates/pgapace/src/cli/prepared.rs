//! `pgapace prepared`: transactions that are prepared on the subscriber, listed or resolved by hand.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wire::Session;

use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::prepared::{self, KnownPrepared, Standing};
use crate::subscriber::state::{Subscription, ownership};

#[derive(Debug, Args)]
pub(crate) struct PreparedArgs {
    #[command(flatten)]
    selection: Selection,

    /// Commit this transaction on the subscriber, whatever the publisher does; its name on either side
    #[arg(long, value_name = "GID", conflicts_with = "rollback")]
    pub(super) commit: Option<String>,

    /// Roll this transaction back on the subscriber, and skip it if the publisher commits it
    #[arg(long, value_name = "GID")]
    pub(super) rollback: Option<String>,

    /// Print a JSON array with one object per transaction
    #[arg(long, conflicts_with_all = ["commit", "rollback"])]
    json: bool,
}

/// A prepared transaction, as shown.
#[derive(Debug, Serialize)]
pub(crate) struct Shown {
    /// On the publisher; empty if it is no longer known.
    gid: String,
    /// On the subscriber.
    name: String,
    xid: u32,
    prepare_lsn: String,
    age_seconds: f64,
    /// `prepared`; `committed` or `rolled back` by pgapace prepared; `absent`: about to be prepared, or
    /// rolled back by another session.
    state: &'static str,
}

impl Shown {
    pub(crate) fn new(known: &KnownPrepared) -> Self {
        let KnownPrepared { prepared, standing, age, given_up, .. } = known;
        Self {
            gid: prepared.gid.clone(),
            name: prepared.name.clone(),
            xid: prepared.xid.0,
            prepare_lsn: prepared.prepare_lsn.to_string(),
            age_seconds: *age,
            state: match standing {
                Standing::Prepared => "prepared",
                Standing::Committed => "committed",
                Standing::Absent if *given_up => "rolled back",
                Standing::Absent => "absent",
            },
        }
    }

    pub(crate) fn line(&self) -> String {
        format!(
            "{:?} for {:.0} s: {} (xid {}, PREPARE at {}, {} on the subscriber)",
            self.gid, self.age_seconds, self.state, self.xid, self.prepare_lsn, self.name
        )
    }
}

pub(crate) fn run(args: &PreparedArgs) -> Result<()> {
    let (mut control, row) = args.selection.existing()?;
    let known = prepared::read(&mut control, row.id)?;
    let (gid, commit) = match (&args.commit, &args.rollback) {
        (Some(gid), _) => (gid, true),
        (None, Some(gid)) => (gid, false),
        (None, None) => {
            let shown: Vec<_> = known.iter().map(Shown::new).collect();
            if args.json {
                return output::json(&shown);
            }
            if shown.is_empty() {
                output::line("the subscription has no prepared transactions on the subscriber");
            }
            shown.iter().for_each(|one| output::line(&one.line()));
            return Ok(());
        }
    };
    let mut named = known.iter().filter(|one| {
        let KnownPrepared { prepared, .. } = one;
        prepared.name == *gid || prepared.gid == *gid
    });
    let (Some(one), None) = (named.next(), named.next()) else {
        return Err(Failure::new(
            Class::Config,
            format!("subscription {} has no single transaction {gid:?}", row.name),
        )
        .hint("Use its name on the subscriber: pgapace prepared lists them."));
    };
    if !commit {
        if one.standing == Standing::Committed {
            return Err(is_committed(one));
        }
        if one.standing == Standing::Absent && !one.given_up {
            check_not_run(&mut control, &row, one)?;
        }
        // Recorded before the rollback, so that no transaction disappears without a record.
        one.prepared.give_up(&mut control)?;
    }
    let there = one.prepared.resolve(&mut control, commit)?;
    if commit && !there {
        return Err(Failure::new(
            Class::Subscriber,
            format!("{} is not prepared on the subscriber", one.prepared.describe()),
        ));
    }
    if !there {
        check_not_ended(&mut control, &row, one)?;
    }
    let verb = if commit { "committed" } else { "rolled back" };
    output::line(&format!("{verb} {}", one.prepared.describe()));
    Ok(())
}

/// The failure of a rollback that comes too late.
fn is_committed(one: &KnownPrepared) -> Failure {
    Failure::new(
        Class::Config,
        format!("{} is committed on the subscriber already", one.prepared.describe()),
    )
    .hint("Revert its changes on the subscriber by hand, if they are not wanted.")
}

/// Refuses a rollback that has found no prepared transaction, if another session has ended the transaction meanwhile.
/// One that was never prepared is given up.
fn check_not_ended(control: &mut Session, row: &Subscription, one: &KnownPrepared) -> Result<()> {
    let known = prepared::read(control, row.id)?;
    match known.iter().find(|known| known.prepared.name == one.prepared.name) {
        Some(known) if known.standing == Standing::Committed => Err(is_committed(one)),
        Some(_) => Ok(()),
        None => Err(Failure::new(
            Class::Subscriber,
            format!("another session has ended {} meanwhile", one.prepared.describe()),
        )
        .hint("Look in its tables whether it was committed.")),
    }
}

/// Refuses to give up a transaction that the process of the subscription may hold until there is a place for it: it
/// would apply the transaction at its COMMIT PREPARED, because it reads at its start which ones are given up. This
/// session owns the subscription then, so that no such process starts.
fn check_not_run(control: &mut Session, row: &Subscription, one: &KnownPrepared) -> Result<()> {
    let former = ownership::Former::default();
    let owned = ownership::become_owner(control, row.id, Duration::ZERO, &former, None, &|| false)
        .and_then(|owning| ownership::fence(control, row.id, &owning, &|| false));
    match owned {
        Err(failure) if failure.class == Class::Busy => Err(Failure::new(
            Class::Busy,
            format!(
                "{} is not prepared on the subscriber, and the process that runs the subscription may still apply it",
                one.prepared.describe()
            ),
        )
        .detail(failure.message)
        .hint(
            "Stop that process before, or wait until pgapace prepared shows the transaction as prepared.",
        )),
        other => other.map(|_| ()),
    }
}
