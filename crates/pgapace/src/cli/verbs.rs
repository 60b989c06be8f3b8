//! `pgapace verbs`: docs/verbs.md, from the definition of the command line.

use crate::cli::{EXIT_CODES, command, output};
use crate::config::declarations::SETTINGS;

const HEAD: &str = "\
# Verbs and exit codes

Made by `pgapace verbs`. A test compares. `pgapace help VERB` and `pgapace man VERB` say the same.
[Settings](settings.md) describes the settings that verbs share.
";

/// Writes the document.
pub(crate) fn run() {
    let mut text = HEAD.to_owned();
    let mut program = command();
    program.build();
    // Not every program has the demo; `help` is clap's own.
    let verbs = program
        .get_subcommands()
        .filter(|verb| !["demo", "help"].contains(&verb.get_name()) && !verb.is_hide_set());
    for verb in verbs {
        text.push_str(&section(verb));
    }
    text.push_str("\n## Exit codes\n\n| code | meaning |\n|---|---|\n");
    for line in EXIT_CODES.lines().skip(1) {
        let (code, meaning) = line.trim().split_once("  ").unwrap_or((line, ""));
        text.push_str(&format!("| {code} | {} |\n", meaning.trim()));
    }
    output::text(&text);
}

fn section(verb: &clap::Command) -> String {
    let name = verb.get_name();
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let mut text = format!("\n## pgapace {name}\n\n{about}.\n");
    let more = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (more, example) = more.split_once("Example:\n").unwrap_or((&more, ""));
    for paragraph in more.split("\n\n").map(str::trim).filter(|text| !text.is_empty()) {
        text.push_str(&format!("\n{}\n", escaped(paragraph)));
    }
    let is_shared = |arg: &clap::Arg| {
        ["config", "log_format", "log_level", "help"].contains(&arg.get_id().as_str())
            || SETTINGS.iter().any(|setting| arg.get_id() == setting.name)
    };
    let own: Vec<_> =
        verb.get_arguments().filter(|arg| !is_shared(arg) && !arg.is_hide_set()).collect();
    if !own.is_empty() {
        text.push_str("\n| argument | what it does |\n|---|---|\n");
    }
    for arg in own {
        let value = arg.get_value_names().unwrap_or_default().first().map(ToString::to_string);
        let takes_value = arg.get_action().takes_values();
        let value = value.filter(|_| takes_value).unwrap_or_default();
        let shown = match arg.get_long() {
            Some(long) => format!("--{long} {value}").trim_end().to_owned(),
            None => value,
        };
        text.push_str(&format!("| `{shown}` | {} |\n", escaped(&described(arg))));
    }
    let settings: Vec<_> = SETTINGS
        .iter()
        .filter(|setting| setting.verbs.contains(&name))
        .map(|setting| format!("`--{}`", setting.name))
        .collect();
    if !settings.is_empty() {
        text.push_str(&format!("\nSettings: {}.\n", settings.join(", ")));
    }
    if !example.is_empty() {
        let lines: Vec<_> =
            example.lines().map(|line| line.strip_prefix("  ").unwrap_or(line)).collect();
        text.push_str(&format!("\n```sh\n{}\n```\n", lines.join("\n").trim_end()));
    }
    text
}

/// The help of an argument, with its default as `--help` shows it.
pub(super) fn described(arg: &clap::Arg) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let is_shown = arg.get_action().takes_values() && !arg.is_hide_default_value_set();
    if defaults.is_empty() || !is_shown || help.contains("[default") {
        return help;
    }
    format!("{help} [default: {}]", defaults.join(" "))
}

/// Text of the help is no Markdown.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}
