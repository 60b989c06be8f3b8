//! The configuration file, and the files that it and other sources name for connection strings.

use std::ffi::OsStr;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::declarations::SETTINGS;
use super::given::Given;
use super::secret_file::SecretFile;
use super::wrong;
use crate::error::{Failure, Result};

/// The given settings of the chosen subscriptions, from all sources.
#[derive(Debug)]
pub(crate) struct Entries {
    pub(super) given: Vec<Given>,
    /// `log-level` of the file.
    pub(crate) log_level: Option<String>,
}

/// Puts file, environment and flags together. With several subscriptions in the file, `--name`
/// picks one, and other flags hold for all that are chosen.
pub(super) fn entries(file: Option<&Path>, given: &Given) -> Result<Entries> {
    let mut given = given.clone().or_environment()?;
    given.file = file.map(Path::to_owned);
    let (chosen, log_level) = match file {
        Some(path) => chosen(path, given)?,
        None => (vec![given], None),
    };
    let given = chosen.into_iter().map(with_files).collect::<Result<_>>()?;
    Ok(Entries { given, log_level })
}

fn chosen(path: &Path, given: Given) -> Result<(Vec<Given>, Option<String>)> {
    let shown = path.display();
    let file = SecretFile::read(path, "configuration file")?;
    let in_file = |mut failure: Failure| {
        failure.message = format!("configuration file {shown}: {}", failure.message);
        failure
    };
    let unreadable = |e: toml::de::Error| {
        // Its usual text quotes the line, which may have a password.
        let line = line_at(&file.text, e.span().map_or(0, |span| span.start));
        in_file(wrong(format!("line {line}: {}", e.message())))
    };
    let mut common: toml::Table = file.text.parse().map_err(unreadable)?;
    let spans = DeTable::parse(&file.text).map_err(unreadable)?.into_inner();
    let tables: Vec<toml::Table> = match common.remove("subscription") {
        // It may be a connection string: its text is not shown.
        Some(found) => tables_of(found).ok_or_else(|| {
            in_file(wrong("subscription is not a table").hint(
                "Write [[subscription]], and below it the name and other settings of a subscription.",
            ))
        })?,
        None => Vec::new(),
    };
    let log_level = match common.remove("log-level").or_else(|| common.remove("log_level")) {
        None => None,
        Some(toml::Value::String(level)) => Some(level),
        Some(_) => return Err(in_file(wrong("log-level: a level is a string"))),
    };
    let read = |table: &toml::Table, spans: Option<&DeTable<'_>>| {
        let line = |key: &str| {
            let (key, _) = spans?.iter().find(|(found, _)| found.get_ref() == key)?;
            Some(line_at(&file.text, key.span().start))
        };
        let mut entry = Given::from_table(table).map_err(|mut failure| {
            let one = |key, value| toml::Table::from_iter([(key, value)]);
            let mut each = table.iter().map(|(key, value)| (key, one(key.clone(), value.clone())));
            let wrong = each.find(|(_, alone)| Given::from_table(alone).is_err());
            if let Some(line) = wrong.and_then(|(key, _)| line(key)) {
                failure.message = format!("line {line}: {}", failure.message);
            }
            in_file(failure)
        })?;
        entry.set_lines(|setting| {
            let names =
                std::iter::once(setting.name).chain(setting.renamed.iter().map(|old| old.name));
            names.into_iter().find_map(|name| line(name).or_else(|| line(&name.replace('-', "_"))))
        });
        for setting in SETTINGS {
            if setting.from_file.is_some()
                && let Some([named]) = entry.get(setting.name)?
            {
                // Relative to the configuration file, as an include of postgresql.conf.
                let named = path.parent().unwrap_or(Path::new("")).join(named);
                entry.set(setting.name, &named.to_string_lossy())?;
            }
            if SETTINGS.iter().any(|other| other.from_file == Some(setting.name)) {
                for text in entry.get(setting.name)?.unwrap_or_default() {
                    file.protects(text)?;
                }
            }
        }
        Ok::<_, Failure>(entry)
    };
    let common = read(&common, Some(&spans))?;
    // Of all, so that a mistake is found whichever is chosen.
    let entries =
        tables.iter().enumerate().map(|(index, table)| read(table, spans_of(&spans, index)));
    let entries: Vec<_> = entries.collect::<Result<_>>()?;
    if entries.is_empty() {
        return Ok((vec![given.or(&common)], log_level));
    }
    let name = given.get("name")?;
    let mut chosen = Vec::new();
    for entry in entries {
        if name.is_none() || entry.get("name")? == name {
            chosen.push(given.clone().or(&entry.or(&common)));
        }
    }
    if chosen.is_empty() {
        let name = name.and_then(<[_]>::first).map_or("", String::as_str);
        return Err(wrong(format!("configuration file {shown} has no subscription {name:?}")));
    }
    Ok((chosen, log_level))
}

/// The number of the line that has this byte.
fn line_at(text: &str, byte: usize) -> usize {
    text.get(..byte).unwrap_or_default().matches('\n').count() + 1
}

/// The subscription of this number, with the places of its keys.
fn spans_of<'t, 'i>(file: &'t DeTable<'i>, index: usize) -> Option<&'t DeTable<'i>> {
    let found = file.iter().find(|(key, _)| key.get_ref() == "subscription")?.1;
    match found.get_ref() {
        DeValue::Table(table) => Some(table).filter(|_| index == 0),
        DeValue::Array(tables) => match tables.get(index)?.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => None,
        },
        _ => None,
    }
}

/// The subscriptions of the file: `[subscription]` is a list of one.
fn tables_of(found: toml::Value) -> Option<Vec<toml::Table>> {
    match found {
        toml::Value::Table(table) => Some(vec![table]),
        toml::Value::Array(tables) => {
            let tables = tables.into_iter().map(|one| match one {
                toml::Value::Table(table) => Some(table),
                _ => None,
            });
            tables.collect()
        }
        _ => None,
    }
}

/// Reads the values that are given by the name of a file. Without that and without the setting
/// itself, the value is in the credential that systemd passes under its name, if there is one.
fn with_files(mut given: Given) -> Result<Given> {
    let credentials = std::env::var_os("CREDENTIALS_DIRECTORY");
    for setting in SETTINGS {
        let Some(of) = setting.from_file else { continue };
        if given.get(setting.name)?.is_none() && given.get(of)?.is_none() {
            let credential = credentials.as_deref().filter(|directory| !directory.is_empty());
            let credential = credential.map(|directory: &OsStr| Path::new(directory).join(of));
            if let Some(file) = credential.filter(|file| file.exists()) {
                given.set(setting.name, &file.to_string_lossy())?;
            }
        }
        let Some([file]) = given.get(setting.name)? else { continue };
        let file = SecretFile::read(Path::new(file), &format!("--{}", setting.name))?;
        let text = file.text.trim();
        if text.is_empty() {
            return Err(wrong(format!("--{} names an empty file", setting.name)));
        }
        file.protects(text)?;
        given.set(of, text)?;
    }
    Ok(given)
}
