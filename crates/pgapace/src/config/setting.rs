//! The parts of a declaration of a setting, and how its text becomes a value.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValue;

/// Where help and documentation show a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    Subscription,
    Copy,
    Apply,
    Errors,
    /// Settings that few subscriptions need.
    Advanced,
}

impl Group {
    pub(crate) const ALL: [Self; 5] =
        [Self::Subscription, Self::Copy, Self::Apply, Self::Errors, Self::Advanced];

    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Subscription => "Subscription",
            Self::Copy => "Copying tables",
            Self::Apply => "Applying changes",
            Self::Errors => "Conflicts and errors",
            Self::Advanced => "Advanced",
        }
    }
}

/// Unit of a number without one. With one, it is written as in postgresql.conf: `256MB`, `10s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    None,
    Milliseconds,
    Seconds,
    Days,
    Megabytes,
}

/// The upper limit where there is no natural one, as in PostgreSQL.
pub(crate) const MOST: u64 = i32::MAX as u64;

/// In milliseconds.
const TIMES: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
/// In bytes.
const SIZES: [(&str, u64); 5] =
    [("B", 1), ("kB", 1 << 10), ("MB", 1 << 20), ("GB", 1 << 30), ("TB", 1 << 40)];

impl Unit {
    /// The units that may be written, and the one of a number without.
    pub(crate) fn known(self) -> (&'static [(&'static str, u64)], &'static str) {
        match self {
            Self::None => (&[], ""),
            Self::Milliseconds => (&TIMES, "ms"),
            Self::Seconds => (&TIMES, "s"),
            Self::Days => (&TIMES, "d"),
            Self::Megabytes => (&SIZES, "MB"),
        }
    }

    fn factor(self, written: &str) -> Option<u64> {
        let (known, usual) = self.known();
        let unit = if written.is_empty() { usual } else { written };
        let known = known.iter().find(|(name, _)| *name == unit);
        known.map(|(_, factor)| *factor).or_else(|| unit.is_empty().then_some(1))
    }

    /// A number in the smallest unit of its kind.
    pub(crate) fn amount(self, text: &str) -> Result<u64, String> {
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = (&text[..end], text[end..].trim());
        let (number, factor) =
            number.parse::<u64>().ok().zip(self.factor(unit)).ok_or_else(|| {
                match self.known().0 {
                    [] => format!("{text:?} is not a number"),
                    known => {
                        let known: Vec<_> = known.iter().map(|(name, _)| *name).collect();
                        let known = known.join(", ");
                        format!(
                            "{text:?} is not a number with one of the units {known}, or without"
                        )
                    }
                }
            })?;
        number.checked_mul(factor).ok_or_else(|| format!("{text} is too large"))
    }
}

/// How many values a setting has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    One,
    /// True or false. A flag without a value is true.
    Boolean,
    /// Flags are repeated, or have values between commas, as the environment has.
    List,
}

/// What a flag or variable does with the double quotes of an element of a list, in which a comma separates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quoted {
    /// An element that is quoted as a whole loses its quotes.
    Whole,
    /// They stay: the type reads them.
    Parts,
}

/// When a changed configuration file takes effect in a running process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reload {
    /// At the next run of the subscription, which SIGHUP begins.
    NextRun,
    /// When the process is started again.
    Restart,
}

/// An old name of a setting, which keeps working.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Renamed {
    pub(crate) name: &'static str,
    /// The values for false and true, if the old name was a boolean.
    pub(crate) values: Option<(&'static str, &'static str)>,
}

impl Renamed {
    pub(crate) const fn from(name: &'static str) -> Self {
        Self { name, values: None }
    }
}

/// A declaration. Flag, environment variable, TOML key, help, completions, man page and
/// docs/settings.md are made from it.
#[derive(Debug)]
pub(crate) struct Setting {
    /// The flag without dashes, and the TOML key.
    pub(crate) name: &'static str,
    /// Stands for its value in help texts, if its type does not say it.
    pub(crate) value: &'static str,
    pub(crate) help: &'static str,
    /// More text in `--help` and the documentation, in sentences.
    pub(crate) more: &'static str,
    pub(crate) group: Group,
    /// As it would be given; empty if there is none.
    pub(crate) default: &'static str,
    /// The default in words, if it is not a fixed value.
    pub(crate) default_is: &'static str,
    pub(crate) unit: Unit,
    /// May be given in place of a number or boolean.
    pub(crate) word: &'static str,
    /// In its unit. Without one, a number with a unit is at most [`MOST`].
    pub(crate) range: Option<RangeInclusive<u64>>,
    /// Whether there is an environment variable.
    pub(crate) environment: bool,
    pub(crate) renamed: &'static [Renamed],
    /// The setting whose value is in the file that this one names. Each source gives one of both.
    pub(crate) from_file: Option<&'static str>,
    /// Whether a running process takes another value over.
    pub(crate) reload: Reload,
    /// Verbs that use it; the others accept it as well, without showing it.
    pub(crate) verbs: &'static [&'static str],
    /// These follow from its type.
    pub(crate) shape: Shape,
    pub(crate) quoted: Quoted,
    pub(crate) choices: fn() -> Vec<PossibleValue>,
    /// Whether a value can be read at all.
    pub(crate) check: fn(&str, &Self) -> Result<(), String>,
}

impl Setting {
    pub(crate) const UNNAMED: Self = Self {
        name: "",
        value: "",
        help: "",
        more: "",
        group: Group::Advanced,
        default: "",
        default_is: "",
        unit: Unit::None,
        word: "",
        range: None,
        environment: true,
        renamed: &[],
        from_file: None,
        reload: Reload::NextRun,
        verbs: &["run", "check"],
        shape: Shape::One,
        quoted: Quoted::Whole,
        choices: Vec::new,
        check: |_, _| Ok(()),
    };

    fn range(&self) -> Option<RangeInclusive<u64>> {
        let range = (self.unit != Unit::None).then_some(0..=MOST);
        self.range.clone().or(range)
    }

    /// Stands for its value in help texts.
    pub(crate) fn value(&self) -> &'static str {
        match (self.value, self.shape, self.unit) {
            ("", Shape::Boolean, _) => "BOOL",
            ("", _, Unit::Megabytes) => "SIZE",
            ("", _, Unit::Milliseconds | Unit::Seconds | Unit::Days) => "TIME",
            ("", ..) if self.range.is_some() => "N",
            ("", ..) => "CHOICE",
            (value, ..) => value,
        }
    }

    /// The lowest and the highest value as they would be given, the latter if it is not [`MOST`].
    pub(crate) fn limits(&self) -> Option<(String, Option<String>)> {
        let unit = self.unit.known().1;
        let range = self.range()?;
        let high = (*range.end() != MOST).then(|| format!("{}{unit}", range.end()));
        Some((format!("{}{unit}", range.start()), high))
    }

    /// The value of the setting from the texts that were given. The only place where ranges are
    /// checked.
    pub(crate) fn read<T: Value>(&self, texts: &[String]) -> Result<T, String> {
        let colon = |reason| format!(": {reason}");
        if let Some(range) = self.range() {
            let factor = self.unit.factor("").unwrap_or(1);
            let range = range.start().saturating_mul(factor)..=range.end().saturating_mul(factor);
            for text in texts.iter().filter(|text| self.word.is_empty() || *text != self.word) {
                if !range.contains(&self.unit.amount(text).map_err(colon)?) {
                    return Err(match self.limits().unwrap_or_default() {
                        (low, Some(high)) => format!(" must be between {low} and {high}"),
                        (low, None) => format!(" must be between {low} and {MOST}"),
                    });
                }
            }
        }
        T::parse_all(texts, self).map_err(colon)
    }
}

/// A type that settings have.
pub(crate) trait Value: Sized {
    const SHAPE: Shape = Shape::One;
    const QUOTED: Quoted = Quoted::Whole;

    /// The values to choose from; empty if the type has no fixed list.
    fn choices() -> Vec<PossibleValue> {
        Vec::new()
    }

    fn parse(text: &str, setting: &Setting) -> Result<Self, String>;

    fn parse_all(texts: &[String], setting: &Setting) -> Result<Self, String> {
        Self::parse(texts.last().map_or("", String::as_str), setting)
    }

    /// Whether the command line is wrong if it has this. Its message repeats the text.
    fn check(text: &str, setting: &Setting) -> Result<(), String> {
        Self::parse(text, setting).map(drop)
    }

    /// The value if nothing is given and there is no default.
    fn absent() -> Option<Self> {
        None
    }
}

impl Value for String {
    fn parse(text: &str, _: &Setting) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

/// Of a value that is not used once it was read.
impl Value for () {
    fn parse(_: &str, _: &Setting) -> Result<Self, String> {
        Ok(())
    }

    fn absent() -> Option<Self> {
        Some(())
    }
}

impl Value for PathBuf {
    fn parse(text: &str, _: &Setting) -> Result<Self, String> {
        Ok(text.into())
    }
}

/// The spellings of postgresql.conf.
pub(crate) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "on" | "yes" | "1" => Ok(true),
        "false" | "off" | "no" | "0" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

impl Value for bool {
    const SHAPE: Shape = Shape::Boolean;

    fn parse(text: &str, _: &Setting) -> Result<Self, String> {
        boolean(text)
    }
}

impl Value for usize {
    fn parse(text: &str, setting: &Setting) -> Result<Self, String> {
        setting.unit.amount(text)?.try_into().map_err(|_| format!("{text} is too large"))
    }
}

impl Value for u64 {
    fn parse(text: &str, setting: &Setting) -> Result<Self, String> {
        setting.unit.amount(text)
    }
}

impl Value for Duration {
    fn parse(text: &str, setting: &Setting) -> Result<Self, String> {
        setting.unit.amount(text).map(Self::from_millis)
    }
}

impl<T: Value> Value for Option<T> {
    const SHAPE: Shape = T::SHAPE;

    fn choices() -> Vec<PossibleValue> {
        T::choices()
    }

    fn parse(text: &str, setting: &Setting) -> Result<Self, String> {
        T::parse(text, setting).map(Some)
    }

    fn check(text: &str, setting: &Setting) -> Result<(), String> {
        T::check(text, setting)
    }

    fn absent() -> Option<Self> {
        Some(None)
    }
}

impl<T: Value> Value for Vec<T> {
    const SHAPE: Shape = Shape::List;

    fn parse(text: &str, setting: &Setting) -> Result<Self, String> {
        Ok(vec![T::parse(text, setting)?])
    }

    fn parse_all(texts: &[String], setting: &Setting) -> Result<Self, String> {
        texts.iter().map(|text| T::parse(text, setting)).collect()
    }

    fn absent() -> Option<Self> {
        Some(Self::new())
    }
}

/// Makes enums values of settings.
macro_rules! choices {
    ($($type:ty),+) => { $(
        impl $crate::config::setting::Value for $type {
            fn choices() -> Vec<clap::builder::PossibleValue> {
                let all = <Self as clap::ValueEnum>::value_variants().iter();
                all.filter_map(clap::ValueEnum::to_possible_value).collect()
            }

            fn parse(
                text: &str,
                _: &$crate::config::setting::Setting,
            ) -> std::result::Result<Self, String> {
                clap::ValueEnum::from_str(text, false).map_err(|_| {
                    let known: Vec<_> =
                        Self::choices().iter().map(|one| one.get_name().to_owned()).collect();
                    format!("{text:?} is not one of {}", known.join(", "))
                })
            }
        }
    )+ };
}
pub(crate) use choices;

/// Declares settings: the table of them, and the struct that has their values.
macro_rules! settings {
    ($(#[$attribute:meta])* $values:ident {
        $($name:literal $field:ident: $type:ty { $($key:ident: $value:expr),+ $(,)? })+
    }) => {
        pub(crate) static SETTINGS: &[Setting] = &[$(Setting {
            name: $name,
            shape: <$type as Value>::SHAPE,
            quoted: <$type as Value>::QUOTED,
            choices: <$type as Value>::choices,
            check: <$type as Value>::check,
            $($key: $value,)+
            ..Setting::UNNAMED
        }),+];

        $(#[$attribute])*
        pub(crate) struct $values { $(pub(crate) $field: $type),+ }

        impl $values {
            /// Reads all settings.
            pub(crate) fn of(given: &Given) -> Result<Self> {
                Ok(Self { $($field: given.value($name)?),+ })
            }
        }
    };
}
pub(crate) use settings;
