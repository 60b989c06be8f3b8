//! Names the functions of the subscriber in which an error of a change occurred, from the server's CONTEXT.
//!
//! CONTEXT may quote rows and constants: statements, parameters, expressions, lines of COPY. Only its lines that name a
//! function are taken, in any language. They begin with the innermost function.

use wire::ServerError;

use crate::printable::{escaped, is_obeyed};

/// Most functions that are named.
const MOST: usize = 3;
/// Longest line, in characters.
const LONGEST: usize = 300;

/// The functions, one on each line; `None` if the error occurred in none.
pub(crate) fn of(said: &ServerError) -> Option<String> {
    let lines = functions(said).take(MOST).map(|line| {
        let line = escaped(line, is_obeyed);
        match line.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &line[..end]),
            None => line.into_owned(),
        }
    });
    let lines = lines.collect::<Vec<_>>().join("\n");
    (!lines.is_empty()).then(|| wire::without_passwords(&lines).into_owned())
}

/// Whether the error occurred in a function.
pub(crate) fn is_cause(said: &ServerError) -> bool {
    functions(said).next().is_some()
}

/// The innermost function of PL/pgSQL, as ALTER FUNCTION names it.
pub(crate) fn innermost(said: &ServerError) -> Option<String> {
    let line = functions(said).find(|line| is_of_plpgsql(line))?;
    let begin = line.find('(')?;
    let mut quoted = false;
    let name = line[..begin].rfind(|c: char| {
        quoted ^= c == '"';
        c.is_whitespace() && !quoted
    });
    let end = begin + line[begin..].find(')')? + 1;
    Some(escaped(line[name? + 1..end].trim(), is_obeyed).into_owned())
}

fn functions(said: &ServerError) -> impl Iterator<Item = &str> {
    // Functions of these languages are named in quotes, with nothing else.
    const NAMED: [&str; 3] = ["SQL function \"", "PL/Perl function \"", "PL/Python function \""];
    let lines = said.where_.as_deref().unwrap_or_default().lines();
    lines.filter(|line| is_of_plpgsql(line) || NAMED.iter().any(|begin| line.starts_with(begin)))
}

/// Whether the line has the signature of a function of PL/pgSQL. An assignment or an expression is in quotes. A block
/// of DO has no signature.
fn is_of_plpgsql(line: &str) -> bool {
    const OTHER_QUOTES: [char; 9] = ['\'', '«', '»', '‹', '›', '„', '“', '”', '「'];
    line.split_once('(').is_some_and(|(before, _)| {
        before.contains("PL/pgSQL")
            && !before.contains(":=")
            && !before.contains(OTHER_QUOTES)
            && before.matches('"').count().is_multiple_of(2)
    })
}

#[cfg(test)]
mod tests {
    use wire::ServerError;

    use super::{innermost, is_cause, of};

    fn said(context: &str) -> ServerError {
        let mut said = ServerError::default();
        said.where_ = Some(context.to_owned());
        said
    }

    #[test]
    fn functions_are_named_in_any_language() {
        let english = "PL/pgSQL function public.\"My f\"(integer,text) line 1 at SQL statement";
        let german = "PL/pgSQL-Funktion public.f() Zeile 1 bei RAISE";
        let context = format!("{english}\nSQL statement \"INSERT …\"\n{german}");
        assert_eq!(of(&said(&context)), Some(format!("{english}\n{german}")));
        assert_eq!(innermost(&said(&context)).as_deref(), Some("public.\"My f\"(integer,text)"));
        assert_eq!(innermost(&said(german)).as_deref(), Some("public.f()"));
        let sql = "SQL function \"f\" statement 1";
        assert_eq!(of(&said(sql)).as_deref(), Some(sql));
        assert_eq!(innermost(&said(sql)), None);
        let many = [german; 9].join("\n");
        assert_eq!(of(&said(&many)), Some([german; 3].join("\n")));
        let long = format!("PL/pgSQL function f({})", "x".repeat(1000));
        assert!(of(&said(&long)).is_some_and(|shown| shown.len() == 303 && shown.ends_with("...")));
        let odd = "PL/pgSQL function \"\u{1b}[2J\"() line 1 at RAISE";
        assert!(of(&said(odd)).is_some_and(|shown| shown.contains("\\x1B[2J")));
    }

    #[test]
    fn values_and_constants_are_not_quoted() {
        for quoting in [
            "SQL statement \"SELECT f('secret')\"",
            "SQL statement \"SELECT 'PL/pgSQL', f('secret')\"",
            "COPY t, line 1, column v: \"secret (1)\"",
            "unnamed portal with parameters: $1 = 'secret'",
            "PL/pgSQL assignment \"x := f('secret')\"",
            "PL/pgSQL expression \"f('secret')\"",
            "expression PL/pgSQL « f('secret') »",
            "PL/pgSQL function inline_code_block line 1 at RAISE",
            "while inserting index tuple (0,1) in relation \"t\"",
        ] {
            assert_eq!(of(&said(quoting)), None, "{quoting}");
            assert!(!is_cause(&said(quoting)), "{quoting}");
        }
    }
}
