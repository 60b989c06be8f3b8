//! The roles of the process that applies. Behind the end it turns round, and applies the way back with its own
//! connection strings, not with those of the verb. So their roles need the privileges of the way back.

use wire::{ConnInfo, Session, quote_literal};

use super::procedure::Sides;
use crate::config::Subscription as Config;
use crate::error::{Failure, Result};
use crate::publisher::slot;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership;

/// The roles of the process on both servers, where they are not those of the verb.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ApplyingRoles {
    pub(super) on_publisher: Option<OtherRole>,
    pub(super) on_subscriber: Option<OtherRole>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct OtherRole {
    pub(super) name: String,
    /// Whether the verb's role may act as this one.
    pub(super) is_settable: bool,
    pub(super) may_replicate: bool,
}

impl ApplyingRoles {
    /// Of the sessions that the process has. One that does not run has none.
    pub(super) fn read(sides: &mut Sides<'_>) -> Result<Self> {
        let Sides { control, source, row, .. } = sides;
        let owner = ownership::owner(control, row.id)?.map(|owner| owner.pid);
        let reader = slot::find(source, &row.slot_name)?.and_then(|slot| slot.active_pid);
        let doing = "reading the roles of the process that applies";
        Ok(Self {
            on_publisher: other_role(source, reader, |e| Failure::publisher(e, doing))?,
            on_subscriber: other_role(control, owner, |e| Failure::subscriber(e, doing))?,
        })
    }

    /// The settings of the way back, with whose sessions the verb looks as the process would.
    pub(super) fn act(&self, config: &mut Config) -> Result<()> {
        // The sides are swapped.
        if let Some(role) = &self.on_publisher {
            role.act(&mut config.subscriber)?;
        }
        if let Some(role) = &self.on_subscriber {
            role.act(&mut config.publisher)?;
        }
        Ok(())
    }

    /// What the verb cannot look at.
    pub(super) fn notes(&self) -> Vec<String> {
        let sides = [("publisher", &self.on_publisher), ("subscriber", &self.on_subscriber)];
        let unknown = sides.into_iter().filter_map(|(side, role)| {
            let role = role.as_ref().filter(|role| !role.is_settable)?;
            Some(format!(
                "pgapace run has role {} on the {side}, which needs the privileges of the way back, and this role may \
                 not act as that one: run the plan with the connection strings of pgapace run",
                role.name
            ))
        });
        unknown.collect()
    }
}

impl OtherRole {
    fn act(&self, info: &mut ConnInfo) -> Result<()> {
        if !self.is_settable {
            return Ok(());
        }
        let before = info.get("options").map_or(String::new(), |options| format!("{options} "));
        let options = format!("{before}-c role={}", escaped(&self.name));
        *info = info
            .clone()
            .with("options", &options)
            .map_err(|e| Failure::internal(format!("options of a connection: {e}")))?;
        Ok(())
    }
}

/// A value in the connection parameter `options`, which the server splits at white space (`pg_split_opts`).
fn escaped(value: &str) -> String {
    let mut text = String::new();
    for c in value.chars() {
        if c == '\\' || c.is_ascii_whitespace() {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

/// The login role of a session, unless it is that of this session.
fn other_role(
    session: &mut Session,
    pid: Option<i32>,
    failed: impl Fn(&wire::Error) -> Failure,
) -> Result<Option<OtherRole>> {
    let Some(pid) = pid else { return Ok(None) };
    // Before 16, a member of a role may act as it.
    let settable = if session.server_version().major() >= 16 { "SET" } else { "MEMBER" };
    // Amazon RDS has a role in place of the attribute.
    let sql = format!(
        "SELECT r.rolname, pg_catalog.pg_has_role(session_user, r.oid, {}), r.rolsuper OR r.rolreplication \
           OR EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'rds_replication' \
             AND pg_catalog.pg_has_role(r.oid, g.oid, 'MEMBER')) \
         FROM pg_catalog.pg_stat_get_activity({pid}) a JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid \
         WHERE r.rolname <> session_user",
        quote_literal(settable)
    );
    let results = session.simple(&sql).map_err(|e| failed(&e))?;
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    Ok(Some(OtherRole {
        name: field(&row, 0)?,
        is_settable: boolean(&row, 1)?,
        may_replicate: boolean(&row, 2)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn a_role_of_two_words_is_one_value() {
        assert_eq!(escaped("pgapace_run"), "pgapace_run");
        assert_eq!(escaped(r"night \shift"), r"night\ \\shift");
    }
}
