//! The texts of errors, with and without the values of rows that they quote (keys, and DETAIL).
//!
//! Members of pg_monitor read why a subscription does not run and why a table is blocked, and may not read rows
//! of users. So these texts are recorded without that. The full text is in a table of the owner, for `status`.

use std::collections::HashMap;

use wire::Session;

use super::{SubscriptionId, reading, writing};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::state::repertoire::Repertoire;

/// Names of texts: of the last error of the subscription, and of the reason why it was disabled. Other texts have the
/// name of their table.
pub(crate) const WHOLE: &str = "";
pub(crate) const DISABLED: &str = "disabled";

/// The text of a failure that every reader of the state may see.
pub(crate) fn public_text(failure: &Failure) -> String {
    format!("{failure:#}")
}

/// Records the full text of a failure, if it has more than the public one.
pub(crate) fn write(
    session: &mut Session,
    id: SubscriptionId,
    about: &str,
    failure: &Failure,
) -> Result<()> {
    let (public, full) = (public_text(failure), failure.to_string());
    if public == full {
        return Ok(());
    }
    let repertoire = Repertoire::of(session);
    let (public, full) = (repertoire.storable(&public), repertoire.storable(&full));
    session
        .execute(
            "INSERT INTO pgapace.error_detail (subscription, about, error, full_text) \
             VALUES ($1::pg_catalog.int4, $2, $3, $4) \
             ON CONFLICT (subscription, about) DO UPDATE SET error = $3, full_text = $4",
            &[Some(&id.0.to_string()), Some(about), Some(&public), Some(&full)],
        )
        .map_err(|e| writing(&e))?;
    Ok(())
}

/// The same beside a public text that is recorded, and is enough.
pub(crate) fn offer(session: &mut Session, id: SubscriptionId, about: &str, failure: &Failure) {
    if let Err(error) = write(session, id, about, failure) {
        tracing::debug!(%error, "cannot record the full text of a failure on the subscriber");
    }
}

/// The full texts of a subscription, by what they are about, with their public texts.
#[derive(Debug, Default)]
pub(crate) struct FullTexts(HashMap<String, (String, String)>);

impl FullTexts {
    /// The full text in place of a public one, if it is known.
    pub(crate) fn of(&self, about: &str, public: Option<String>) -> Option<String> {
        match (self.0.get(about), public) {
            (Some((known, full)), Some(public)) if *known == public => Some(full.clone()),
            (_, public) => public,
        }
    }
}

/// Reads the full texts; none if the role may not.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<FullTexts> {
    let permitted = session
        .simple(
            "SELECT coalesce(pg_catalog.has_table_privilege( \
               pg_catalog.to_regclass('pgapace.error_detail'), 'SELECT'), false)",
        )
        .map_err(|e| reading(&e))?;
    if !boolean(&first_row(&permitted, "has_table_privilege")?, 0)? {
        return Ok(FullTexts::default());
    }
    let sql = "SELECT about, error, full_text FROM pgapace.error_detail \
               WHERE subscription = $1::pg_catalog.int4";
    let rows = session.query(sql, &[Some(&id.0.to_string())]).map_err(|e| reading(&e))?;
    let texts = rows.iter().map(|row| Ok((field(&row, 0)?, (field(&row, 1)?, field(&row, 2)?))));
    texts.collect::<Result<_>>().map(FullTexts)
}

#[cfg(test)]
mod tests {
    use pgoutput::{Lsn, Xid};

    use super::{FullTexts, WHOLE, public_text};
    use crate::error::{Class, Failure, Offender};

    #[test]
    fn the_public_text_quotes_no_row() {
        let offender = || Offender {
            commit_lsn: Lsn(16),
            is_prepare: false,
            xid: Xid(7),
            table: Some("public.t".to_owned()),
            relation: None,
            operation: "INSERT",
            key: Some("(name)=(secret)".to_owned()),
        };
        let failure = Failure::new(Class::Apply, "a check is violated")
            .of(offender)
            .detail("Failing row contains (secret).")
            .hint("mend it");
        assert_eq!(failure.to_string().matches("secret").count(), 2);
        let public = public_text(&failure);
        assert!(public.contains("INSERT on public.t\nHINT:  mend it"), "{public}");
        assert!(!public.contains("secret"), "{public}");
        let texts = [(WHOLE.to_owned(), (public.clone(), failure.to_string()))];
        let texts = FullTexts(texts.into());
        assert_eq!(texts.of(WHOLE, Some(public.clone())), Some(failure.to_string()));
        // Of another error, or about something else.
        assert_eq!(texts.of(WHOLE, Some("other".to_owned())).as_deref(), Some("other"));
        assert_eq!(texts.of("public.t", Some(public.clone())), Some(public));
        assert_eq!(texts.of(WHOLE, None), None);
    }
}
