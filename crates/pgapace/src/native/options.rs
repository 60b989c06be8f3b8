//! How options of a native subscription map to those of `pgapace run`. Pure.

use super::subscription::NativeSubscription;
use crate::config::list_of_names;

/// Whether the publisher leaves out changes that have an origin. A publisher before 16 sends them in
/// spite of the option.
pub(crate) fn origin_none(native: &NativeSubscription, publisher_major: u32) -> bool {
    native.origin == "none" && publisher_major >= 16
}

/// The arguments of `pgapace run` that carry the subscription on, except for connection strings.
pub(crate) fn run_arguments(
    native: &NativeSubscription,
    publisher_major: u32,
    (name, slot): (&str, &str),
) -> String {
    let mut arguments = vec![format!("--name {name}")];
    if slot != name {
        arguments.push(format!("--slot {slot}"));
    }
    arguments.push(format!("--publication {}", shell(&list_of_names(&native.publications))));
    if origin_none(native, publisher_major) {
        arguments.push("--origin none".to_owned());
    }
    if native.disable_on_error {
        arguments.push("--disable-on-error".to_owned());
    }
    arguments.join(" ")
}

/// A word of a shell command.
fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,/".contains(c);
    if text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// Differences between the native subscription and pgapace, as sentences.
pub(crate) fn differences(native: &NativeSubscription, role: &str) -> Vec<String> {
    let streaming = match native.streaming.as_str() {
        "f" => "off",
        "t" => "on",
        _ => "parallel",
    };
    let mut differences = vec![
        format!("streaming = {streaming}: pgapace uses its own setting (--streaming, parallel)"),
        format!("binary = {}: pgapace receives binary values where all types agree", native.binary),
    ];
    if native.two_phase == 'e' {
        differences.push(
            "two_phase = true: the slot keeps it, and pgapace prepares a transaction on the \
             subscriber only after --two-phase-hold"
                .to_owned(),
        );
    }
    if !native.run_as_owner {
        differences.push(format!(
            "run_as_owner = false: pgapace applies all tables as role {role}, not as their owners"
        ));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::requirements::tests::facts;

    #[test]
    fn the_command_says_only_what_is_not_a_default() {
        let mut native = facts().subscription;
        assert_eq!(run_arguments(&native, 18, ("s", "s")), "--name s --publication pub");
        native.origin = "none".to_owned();
        native.disable_on_error = true;
        native.publications.extend(["it's".to_owned(), "a, b".to_owned()]);
        assert_eq!(
            run_arguments(&native, 18, ("s", "t")),
            "--name s --slot t --publication 'pub,it'\\''s,\"a, b\"' --origin none --disable-on-error"
        );
        assert!(!run_arguments(&native, 15, ("s", "t")).contains("--origin"));
    }

    #[test]
    fn differences_are_told() {
        let mut native = facts().subscription;
        native.two_phase = 'e';
        let text = differences(&native, "app").join("\n");
        assert!(text.contains("streaming = off") && text.contains("two_phase = true"), "{text}");
        assert!(text.contains("as role app"), "{text}");
    }
}
