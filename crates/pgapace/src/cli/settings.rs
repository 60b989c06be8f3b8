//! `pgapace settings`: docs/settings.md, from the declarations.

use crate::cli::verbs::described;
use crate::cli::{command, output};
use crate::config::declarations::SETTINGS;
use crate::config::setting::{Group, Reload, Setting, Shape};

const HEAD: &str = "\
# Settings

Made by `pgapace settings > docs/settings.md`. A test compares.

Each setting is a flag, an environment variable and a key of the configuration file: `--copy-workers 2`,
`PGAPACE_COPY_WORKERS=2`, `copy-workers = 2`. A flag overrides the environment, and that the file (`--config`). In the
file, keys of a `[[subscription]]` override those above all of them.

- Times and sizes have units as in postgresql.conf: `500ms`, `10s`, `5min`, `1h`, `30d`; `64MB`, `1GB`. A number without
  a unit has the unit of the default.
- Booleans are `true` or `false`, or another spelling of postgresql.conf such as `on` and `0`. A flag without a value is true.
- A list is repeated flags, values between commas in a flag or variable, and an array or one string in the file. In a flag
  or variable, a comma in double quotes is part of a name: `--publication '\"a,b\",c'` gives `a,b` and `c`. A quote in a quoted
  name is doubled. The file needs no such quotes: `publication = [\"a,b\", \"c\"]`.
- An empty variable is not given.
- `pgapace run` reads the file, and files that it names, again at SIGHUP. Changed settings take effect at once, in another run
  of the subscription; a copy that runs is completed before. These need a restart: {restart},
  the server and the database of `subscriber`, and subscriptions that are added or removed. If the file is invalid, all
  settings stay as they are.
- `log-level` is a key of the file as well, outside of `[[subscription]]`.
- A value that cannot be read or is out of range ends the program with exit code 3; on the command line, one that cannot
  be read with exit code 2.
";

/// Writes the document.
pub(crate) fn run() {
    let restart: Vec<_> = SETTINGS
        .iter()
        .filter(|setting| setting.reload == Reload::Restart)
        .map(|setting| format!("`{}`", setting.name))
        .collect();
    let mut text = HEAD.replace("{restart}", &restart.join(", "));
    for group in Group::ALL {
        text.push_str(&format!(
            "\n## {}\n\n| setting | default | values | what it does |\n|---|---|---|---|\n",
            group.heading()
        ));
        for setting in SETTINGS.iter().filter(|setting| setting.group == group) {
            text.push_str(&row(setting));
        }
    }
    text.push_str("\n## Flags of verbs\n\n| verb | flag | what it does |\n|---|---|---|\n");
    let command = command();
    // Not every program has the demo.
    let verbs = command.get_subcommands().filter(|verb| verb.get_name() != "demo");
    for verb in std::iter::once(&command).chain(verbs) {
        let flags = verb.get_arguments().filter(|arg| arg.get_long().is_some());
        let is_above = |arg: &clap::Arg| {
            arg.get_id() == "config" || SETTINGS.iter().any(|setting| arg.get_id() == setting.name)
        };
        for arg in flags.filter(|arg| !is_above(arg) && !arg.is_hide_set()) {
            let variable = arg.get_env().and_then(|name| name.to_str());
            let variable = variable.map(|name| format!(" (`{name}`)")).unwrap_or_default();
            let flag = arg.get_long().unwrap_or_default();
            text.push_str(&format!(
                "| `{}` | `--{flag}`{variable} | {} |\n",
                verb.get_name(),
                cell(&described(arg))
            ));
        }
    }
    text.push_str("\n## Old names\n\nThey keep working.\n\n| old | now |\n|---|---|\n");
    for setting in SETTINGS {
        for old in setting.renamed {
            let now = old.values.map_or("", |(_, now)| now);
            let now = format!("{} {now}", setting.name);
            text.push_str(&format!("| `{}` | `{}` |\n", old.name, now.trim()));
        }
    }
    output::text(&text);
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn row(setting: &Setting) -> String {
    let default = match (setting.default_is, setting.default) {
        ("", "") => "none".to_owned(),
        ("", default) => format!("`{default}`"),
        (words, _) => words.to_owned(),
    };
    let choices = (setting.choices)();
    let values = match (setting.limits(), setting.shape) {
        (Some((low, Some(high))), _) => format!("`{low}` to `{high}`"),
        (Some((low, None)), _) => format!("`{low}` or more"),
        (None, Shape::Boolean) => "`true`, `false`".to_owned(),
        (None, Shape::List) => format!("list of `{}`", cell(setting.value())),
        (None, Shape::One) if choices.is_empty() => format!("`{}`", cell(setting.value())),
        (None, Shape::One) => {
            let names: Vec<_> =
                choices.iter().map(|choice| format!("`{}`", choice.get_name())).collect();
            names.join(", ")
        }
    };
    let values = match setting.word {
        "" => values,
        word => format!("`{word}`, {values}"),
    };
    let mut what = format!("{}.", setting.help);
    for choice in &choices {
        let help = choice.get_help().map(ToString::to_string).unwrap_or_default();
        what.push_str(&format!(" `{}`: {}.", choice.get_name(), help.trim_end_matches('.')));
    }
    if !setting.more.is_empty() {
        what.push_str(&format!(" {}", setting.more));
    }
    if !setting.environment {
        what.push_str(" It has no environment variable.");
    }
    if setting.reload == Reload::Restart {
        what.push_str(" A change needs a restart.");
    }
    format!("| `{}` | {} | {values} | {} |\n", setting.name, cell(&default), cell(&what))
}
