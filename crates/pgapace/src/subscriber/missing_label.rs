//! Errors of a server about a label that its enum does not have.

use wire::{ServerError, quote_literal};

/// Functions of the server that refuse a label (`enum.c`). Their message may be in any language.
const ROUTINES: [&str; 2] = ["enum_in", "enum_recv"];

/// Whether the error is about a label.
pub(crate) fn is_reported(said: &ServerError) -> bool {
    said.routine.as_deref().is_some_and(|routine| ROUTINES.contains(&routine))
}

/// The statements that give the enum its label. A renamed label comes first: once the new one is added, the old one
/// cannot get its name, and rows that have it differ for good. `enums`: the types of which one may lack it, if they are known.
pub(crate) fn hint<'a>(said: &ServerError, enums: impl Iterator<Item = &'a str>) -> String {
    // The message ends with the type, a colon, and the label in quotes.
    let quoted = said.message.strip_suffix('"').and_then(|text| text.split_once(": \""));
    let (before, label) = quoted.unzip();
    let label = label.map_or_else(|| "…".to_owned(), quote_literal);
    let mut enums: Vec<_> = enums.collect();
    enums.sort_unstable();
    enums.dedup();
    let is_plain =
        |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
    let name = match (before, enums.as_slice()) {
        // It may be an enum in an array or below a domain, which no column names.
        (Some(text), _) => {
            let plain = text.rsplit(' ').next().filter(is_plain);
            enums.iter().copied().find(|name| text.ends_with(name)).or(plain)
        }
        (None, [name]) => Some(*name),
        (None, _) => None,
    };
    let name = name.unwrap_or("…");
    format!(
        "The subscriber's enum lacks the label. If the publisher has renamed one: ALTER TYPE {name} RENAME VALUE … TO \
         {label}; otherwise, with BEFORE or AFTER where the publisher's order is another: ALTER TYPE {name} ADD VALUE {label};"
    )
}

#[cfg(test)]
mod tests {
    use wire::ServerError;

    use super::hint;

    #[test]
    fn type_and_label_are_those_of_the_message() {
        let added = |message: &str, enums: &[&str]| {
            let mut said = ServerError::default();
            message.clone_into(&mut said.message);
            let hint = hint(&said, enums.iter().copied());
            hint.rsplit_once("ALTER ").map(|(_, sql)| sql.to_owned()).unwrap_or_default()
        };
        let message = "invalid input value for enum s.mood: \"it's: \"b\"\"";
        let added_to_mood = "TYPE s.mood ADD VALUE 'it''s: \"b\"';";
        assert_eq!(added(message, &[]), added_to_mood);
        assert_eq!(added(message, &["s.mood"]), added_to_mood);
        assert_eq!(added(message, &["s.other", "s.mood"]), added_to_mood);
        let odd = "invalid input value for enum \"My S\".\"T x\": \"b\"";
        assert_eq!(added(odd, &[]), "TYPE … ADD VALUE 'b';");
        assert_eq!(added(odd, &["\"My S\".\"T x\""]), "TYPE \"My S\".\"T x\" ADD VALUE 'b';");
        assert_eq!(added("« b » n'est pas une valeur", &[]), "TYPE … ADD VALUE …;");
    }
}
