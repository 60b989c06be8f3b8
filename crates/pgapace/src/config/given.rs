//! Settings as they were given, by flag, environment or file; nothing is filled in.

use std::env::VarError;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, ValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use wire::quote_ident;

use super::declarations::SETTINGS;
use super::setting::{Group, Quoted, Renamed, Setting, Shape, Value};
use super::wrong;
use crate::error::{Failure, Result};

/// The texts of each setting.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    /// In the order of [`SETTINGS`].
    texts: Vec<Option<Vec<String>>>,
    /// In the same order: the line of the configuration file that has the setting, for messages.
    lines: Vec<Option<usize>>,
    /// The configuration file, if there is one: for messages.
    pub(super) file: Option<PathBuf>,
}

impl Default for Given {
    fn default() -> Self {
        Self { texts: vec![None; SETTINGS.len()], lines: vec![None; SETTINGS.len()], file: None }
    }
}

fn index(name: &str) -> Result<usize> {
    SETTINGS
        .iter()
        .position(|setting| setting.name == name)
        .ok_or_else(|| Failure::internal(format!("there is no setting {name}")))
}

/// The environment variable of a name.
pub(crate) fn variable(name: &str) -> String {
    format!("PGAPACE_{}", name.to_uppercase().replace('-', "_"))
}

/// The present name of a value that was given under an old name of the setting.
fn renamed(setting: &Setting, old: &Renamed, text: &str) -> std::result::Result<String, String> {
    let Some((no, yes)) = old.values else { return Ok(text.to_owned()) };
    let value = bool::parse(text, setting).map_err(|reason| format!("--{}: {reason}", old.name))?;
    Ok(if value { yes } else { no }.to_owned())
}

impl Given {
    /// Takes settings that are not given from weaker ones. A setting and the file that has its value
    /// are one thing: if one of them is given, it overrides both.
    pub(crate) fn or(self, weaker: &Self) -> Self {
        let given = |name: &str| {
            SETTINGS
                .iter()
                .zip(&self.texts)
                .any(|(setting, texts)| setting.name == name && texts.is_some())
        };
        let overridden = SETTINGS.iter().map(|setting| {
            let by_file = SETTINGS.iter().find(|other| other.from_file == Some(setting.name));
            setting.from_file.is_some_and(given) || by_file.is_some_and(|file| given(file.name))
        });
        let overridden: Vec<bool> = overridden.collect();
        let strong = self.texts.into_iter().zip(self.lines);
        let weak = weaker.texts.iter().cloned().zip(weaker.lines.iter().copied());
        let pairs = strong.zip(weak).zip(overridden);
        let chosen = pairs.map(|((strong, weak), overridden)| match strong.0 {
            None if !overridden => weak,
            _ => strong,
        });
        let (texts, lines) = chosen.unzip();
        Self { texts, lines, file: self.file.or_else(|| weaker.file.clone()) }
    }

    /// The settings that differ.
    pub(crate) fn differences<'g>(
        &'g self,
        other: &'g Self,
    ) -> impl Iterator<Item = &'static Setting> + 'g {
        let pairs = self.texts.iter().zip(&other.texts);
        SETTINGS.iter().zip(pairs).filter(|(_, (own, other))| own != other).map(|(one, _)| one)
    }

    /// Takes a setting as it is in another place, given or not.
    pub(crate) fn take_from(&mut self, other: &Self, setting: &Setting) -> Result<()> {
        let index = index(setting.name)?;
        self.texts[index].clone_from(&other.texts[index]);
        self.lines[index] = other.lines[index];
        Ok(())
    }

    /// The given value of a setting, for messages; not for one that may have a password.
    pub(crate) fn shown(&self, setting: &Setting) -> String {
        let secret = SETTINGS.iter().any(|other| other.from_file == Some(setting.name));
        let texts = self.get(setting.name).ok().flatten();
        match texts {
            _ if secret => setting.name.to_owned(),
            Some(texts) => format!("{} = {}", setting.name, texts.join(",")),
            None => format!("{} = default", setting.name),
        }
    }

    /// Refuses a setting together with the file that has its value: in one source they say the same.
    fn check_files(&self) -> Result<()> {
        for setting in SETTINGS {
            if let Some(of) = setting.from_file
                && self.get(of)?.is_some()
                && self.get(setting.name)?.is_some()
            {
                let name = setting.name;
                return Err(wrong(format!("{of} and {name} exclude each other")));
            }
        }
        Ok(())
    }

    /// An empty value is none.
    pub(crate) fn get(&self, name: &str) -> Result<Option<&[String]>> {
        let texts = self.texts[index(name)?].as_deref();
        Ok(texts.filter(|texts| texts.iter().any(|text| !text.is_empty())))
    }

    pub(crate) fn set(&mut self, name: &str, text: &str) -> Result<()> {
        self.set_all(name, &[text.to_owned()])
    }

    /// The same for a list.
    pub(crate) fn set_all(&mut self, name: &str, texts: &[String]) -> Result<()> {
        let index = index(name)?;
        (self.texts[index], self.lines[index]) = (Some(texts.to_vec()), None);
        Ok(())
    }

    /// The settings are those of a table of the configuration file, in which each is on such a line.
    pub(super) fn set_lines(&mut self, line: impl Fn(&Setting) -> Option<usize>) {
        for ((setting, texts), found) in SETTINGS.iter().zip(&self.texts).zip(&mut self.lines) {
            *found = texts.as_ref().and_then(|_| line(setting));
        }
    }

    /// A failure because of the value of a setting: of which file and line it is, if it is of one.
    pub(super) fn blame(&self, name: &str, mut failure: Failure) -> Failure {
        let line = index(name).ok().and_then(|index| self.lines[index]);
        if let (Some(file), Some(line)) = (&self.file, line) {
            failure.message =
                format!("configuration file {}: line {line}: {}", file.display(), failure.message);
        }
        failure
    }

    /// The value that was given, or the default.
    pub(crate) fn value<T: Value>(&self, name: &str) -> Result<T> {
        let setting = &SETTINGS[index(name)?];
        let default = [setting.default.to_owned()];
        let texts = match self.get(name)? {
            Some(texts) => texts,
            None if !setting.default.is_empty() => &default,
            None => {
                return T::absent().ok_or_else(|| {
                    let file = self.file.as_ref().map(|file| file.display());
                    let nor = file.map_or(String::new(), |file| {
                        format!(", and configuration file {file} does not have it")
                    });
                    wrong(format!("--{name} is not given{nor}")).hint(format!(
                        "Give it as a flag, as {name} in the configuration file, or as {} in the \
                         environment.{}",
                        variable(name),
                        self.credential_hint(name)
                    ))
                });
            }
        };
        setting.read(texts).map_err(|reason| self.blame(name, wrong(format!("--{name}{reason}"))))
    }

    /// How a verb gets the credentials that systemd passes to the service of the configuration file.
    fn credential_hint(&self, name: &str) -> String {
        let is_secret = SETTINGS.iter().any(|setting| setting.from_file == Some(name));
        let Some(file) = self.file.as_ref().filter(|_| is_secret) else { return String::new() };
        let unit = file.file_stem().unwrap_or_default().to_string_lossy();
        format!(
            " Credentials of systemd exist only within a unit: sudo systemd-run --pipe --wait -p User=pgapace \
             -p LoadCredential=publisher:pgapace.{unit}.publisher \
             -p LoadCredential=subscriber:pgapace.{unit}.subscriber pgapace check --config {}",
            file.display()
        )
    }

    /// Settings of a table of the configuration file.
    pub(crate) fn from_table(table: &toml::Table) -> Result<Self> {
        let mut given = Self::default();
        for (key, value) in table {
            if key == "truncate" {
                return Err(no_setting());
            }
            let name = key.replace('_', "-");
            let found = SETTINGS.iter().enumerate().find_map(|(index, setting)| {
                let old = setting.renamed.iter().find(|old| old.name == name);
                (setting.name == name || old.is_some()).then_some((index, setting, old))
            });
            let (index, setting, old) = found.ok_or_else(|| {
                wrong(format!("there is no setting {key}"))
                    .hint("docs/settings.md and pgapace run --help list them.")
            })?;
            let texts = texts(value, setting.shape)
                .ok_or_else(|| wrong(format!("{key}: a value cannot be {}", value.type_str())))?;
            let new = |text: String| match old {
                Some(old) => renamed(setting, old, &text).map_err(wrong),
                None => Ok(text),
            };
            let texts: Vec<_> = texts.into_iter().map(new).collect::<Result<_>>()?;
            if setting.name == "if-not-empty" && texts == ["truncate"] {
                return Err(no_setting());
            }
            if given.texts[index].replace(texts).is_some() {
                return Err(wrong(format!("{} is given twice: as {key} as well", setting.name)));
            }
        }
        given.check_files()?;
        Ok(given)
    }

    /// Adds the settings that the environment has and flags have not.
    pub(crate) fn or_environment(self) -> Result<Self> {
        let mut environment = Self::default();
        let lookup = |name: &str| match std::env::var(variable(name)) {
            Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(_)) => {
                Err(format!("environment variable {} is not valid UTF-8", variable(name)))
            }
        };
        for name in ["truncate", "if-not-empty"] {
            if lookup(name).map_err(wrong)?.is_some() {
                return Err(no_setting());
            }
        }
        for ((setting, texts), flag) in SETTINGS.iter().zip(&mut environment.texts).zip(&self.texts)
        {
            if flag.is_some() {
                continue;
            }
            let mut found = lookup(setting.name).map_err(wrong)?;
            for old in setting.renamed {
                if found.is_none() {
                    let text = lookup(old.name).map_err(wrong)?;
                    let text = text.map(|text| renamed(setting, old, &text)).transpose();
                    found = text.map_err(wrong)?;
                }
            }
            if let Some(text) = found {
                *texts = Some(match setting.shape {
                    Shape::List => elements(setting, &text),
                    Shape::One | Shape::Boolean => vec![text],
                });
            }
        }
        environment.check_files()?;
        Ok(self.or(&environment))
    }
}

/// The elements of a list: a comma in double quotes is part of a name.
fn elements(setting: &Setting, text: &str) -> Vec<String> {
    let mut quoted = false;
    let elements = text.split(move |c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    });
    let name = |element: &str| match setting.quoted {
        Quoted::Whole => unquoted(element).unwrap_or_else(|| element.to_owned()),
        Quoted::Parts => element.to_owned(),
    };
    elements.map(name).collect()
}

/// The name of an element that is quoted as a whole, in which a quote is doubled.
fn unquoted(element: &str) -> Option<String> {
    let inner = element.strip_prefix('"')?.strip_suffix('"')?;
    let is_whole = !inner.replace("\"\"", "").contains('"');
    is_whole.then(|| inner.replace("\"\"", "\""))
}

/// Names as the value of a flag that takes a list and [`Quoted::Whole`] names.
pub(crate) fn list_of_names(names: &[String]) -> String {
    let element = |name: &String| {
        if name.contains([',', '"']) { quote_ident(name) } else { name.clone() }
    };
    names.iter().map(element).collect::<Vec<_>>().join(",")
}

fn texts(value: &toml::Value, shape: Shape) -> Option<Vec<String>> {
    match value {
        toml::Value::String(text) => Some(vec![text.clone()]),
        toml::Value::Integer(number) => Some(vec![number.to_string()]),
        toml::Value::Boolean(boolean) => Some(vec![boolean.to_string()]),
        toml::Value::Array(values) if shape == Shape::List => {
            values.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        }
        _ => None,
    }
}

fn no_setting() -> Failure {
    wrong("to truncate tables is not a setting, but a decision for one start").hint(
        "Take truncate, and if-not-empty = \"truncate\", out of the configuration file, and \
         PGAPACE_TRUNCATE and PGAPACE_IF_NOT_EMPTY out of the environment. If tables are not empty \
         at the first start, the error prints the --truncate to give.",
    )
}

/// The flag of a setting.
fn flag(setting: &'static Setting) -> Arg {
    let mut help = setting.help.to_owned();
    let default = if setting.default_is.is_empty() { setting.default } else { setting.default_is };
    let default = if default.is_empty() { String::new() } else { format!(" [default: {default}]") };
    let mut long = help.clone();
    if !setting.more.is_empty() {
        long.push_str(". ");
        long.push_str(setting.more);
    }
    if let Some((low, Some(high))) = setting.limits() {
        long.push_str(&format!(" [from {low} to {high}]"));
    }
    help.push_str(&default);
    long.push_str(&default);
    let choices = (setting.choices)();
    let parser = if choices.is_empty() {
        let check = |text: &str| match setting.shape {
            Shape::List => {
                elements(setting, text).iter().try_for_each(|one| (setting.check)(one, setting))
            }
            Shape::One | Shape::Boolean => (setting.check)(text, setting),
        };
        ValueParser::new(move |text: &str| check(text).map(|()| text.to_owned()))
    } else {
        PossibleValuesParser::new(choices).into()
    };
    let arg = Arg::new(setting.name)
        .long(setting.name)
        .value_name(setting.value())
        .help(help)
        .long_help(long)
        .help_heading(setting.group.heading())
        .hide_short_help(setting.group == Group::Advanced)
        .aliases(setting.renamed.iter().filter(|old| old.values.is_none()).map(|old| old.name))
        .value_parser(parser);
    let arg = match setting.from_file {
        Some(of) => arg.conflicts_with(of),
        None => arg,
    };
    match setting.shape {
        Shape::One => arg.action(ArgAction::Set),
        Shape::Boolean => optional(arg),
        Shape::List => arg.action(ArgAction::Append),
    }
}

/// A flag that is true without a value.
fn optional(arg: Arg) -> Arg {
    arg.action(ArgAction::Set).num_args(0..=1).default_missing_value("true")
}

impl Args for Given {
    fn augment_args(mut command: Command) -> Command {
        for setting in SETTINGS {
            command = command.arg(flag(setting));
            for old in setting.renamed.iter().filter(|old| old.values.is_some()) {
                let arg = Arg::new(old.name).long(old.name).hide(true);
                command = command.arg(optional(arg).conflicts_with(setting.name));
            }
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        let flags = |name: &str| {
            matches.get_many::<String>(name).map(|texts| texts.cloned().collect::<Vec<_>>())
        };
        let given = SETTINGS.iter().map(|setting| {
            let old = || {
                let mut old = setting.renamed.iter().filter(|old| old.values.is_some());
                old.find_map(|old| {
                    let text = flags(old.name)?.pop()?;
                    Some(renamed(setting, old, &text).map(|text| vec![text]))
                })
            };
            let given = flags(setting.name).map(|texts| match setting.shape {
                Shape::List => texts.iter().flat_map(|text| elements(setting, text)).collect(),
                Shape::One | Shape::Boolean => texts,
            });
            given.map(Ok).or_else(old).transpose()
        });
        let given: std::result::Result<_, String> = given.collect();
        given
            .map(|texts| Self { texts, ..Self::default() })
            .map_err(|e| clap::Error::raw(ErrorKind::InvalidValue, format!("{e}\n")))
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
