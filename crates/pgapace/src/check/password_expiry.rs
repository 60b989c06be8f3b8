//! Whether the password of the login role ends soon. Sessions that stay open go on; a later one cannot begin, for example
//! after a restart at night.

use wire::{Session, quote_ident};

use crate::check::failed;
use crate::check::report::{Reporter, Side};
use crate::error::Result;
use crate::subscriber::catalogue::{boolean, field};

/// The role and the time, if it is less than 30 days ahead. A role with another kind of authentication may have one, too.
const SQL: &str = "\
SELECT rolname, pg_catalog.date_trunc('second', rolvaliduntil)::pg_catalog.text, rolvaliduntil < pg_catalog.now()
FROM pg_catalog.pg_roles
WHERE rolname = session_user AND pg_catalog.isfinite(rolvaliduntil)
  AND rolvaliduntil < pg_catalog.now() + pg_catalog.make_interval(days => 30)";

pub(super) fn check(session: &mut Session, side: Side, reporter: &mut Reporter<'_>) -> Result<()> {
    let rows = session.query(SQL, &[]).map_err(|e| failed(side, &e, "reading its role"))?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (name, until): (String, String) = (field(&row, 0)?, field(&row, 1)?);
    let message = if boolean(&row, 2)? {
        format!("the password of role {name} was valid until {until}: no session begins with it")
    } else {
        format!(
            "the password of role {name} is valid until {until}: no later session begins with it"
        )
    };
    reporter
        .warn("role", message)
        .on(name.as_str())
        .sql(format!("ALTER ROLE {} VALID UNTIL 'infinity';", quote_ident(&name)));
    Ok(())
}
