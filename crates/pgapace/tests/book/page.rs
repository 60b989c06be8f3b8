//! A page of the book: its commands, what they print, and how that is compared.

/// One command, or several lines that are run without looking at what they print.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Of the command, from 1.
    pub(super) line: usize,
    pub(super) command: String,
    /// The lines that the page shows; none for commands that are not shown.
    pub(super) expected: Option<Vec<String>>,
    /// Whether the command is repeated until it prints them.
    pub(super) retry: bool,
}

pub(super) struct Page {
    pub(super) steps: Vec<Step>,
}

impl Page {
    pub(super) fn parse(text: &str) -> Self {
        let mut steps: Vec<Step> = Vec::new();
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        while let Some((line, text)) = lines.next() {
            if text == "<!-- run" {
                let hidden = lines.by_ref().map(|(_, text)| text).take_while(|text| *text != "-->");
                let command = hidden.collect::<Vec<_>>().join("\n");
                steps.push(Step { line: line + 1, command, expected: None, retry: false });
            }
            let Some(kind) = text.strip_prefix("```console") else { continue };
            let retry = kind.trim() == "wait";
            let mut continued = false;
            for (line, text) in lines.by_ref().take_while(|(_, text)| *text != "```") {
                match (text.strip_prefix("$ "), steps.last_mut()) {
                    (None, Some(step)) if continued => {
                        step.command.push('\n');
                        step.command.push_str(text);
                        continued = text.ends_with('\\');
                    }
                    (Some(command), _) => {
                        continued = command.ends_with('\\');
                        let (command, expected) = (command.to_owned(), Some(Vec::new()));
                        steps.push(Step { line, command, expected, retry });
                    }
                    (None, Some(Step { expected: Some(expected), .. })) => {
                        expected.push(text.to_owned());
                    }
                    (None, _) => panic!("line {line}: output without a command"),
                }
            }
        }
        Self { steps }
    }

    /// The text of the page with other output for some commands.
    pub(super) fn with(&self, text: &str, written: &[(&Step, Vec<String>)]) -> String {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        for (step, output) in written.iter().rev() {
            let first = step.line + step.command.lines().count() - 1;
            let old = step.expected.as_ref().map_or(0, Vec::len);
            lines.splice(first..first + old, output.iter().cloned());
        }
        lines.join("\n") + "\n"
    }
}

/// Whether what was printed has the shape of what the page shows.
pub(super) fn alike(page: &[String], printed: &[String]) -> bool {
    let shape = |lines: &[String]| lines.iter().map(|line| shape(line)).collect::<Vec<_>>();
    lines_match(&shape(page), &shape(printed))
}

fn lines_match(page: &[String], printed: &[String]) -> bool {
    match (page.split_first(), printed.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "…" => {
            (0..=printed.len()).any(|skipped| lines_match(rest, &printed[skipped..]))
        }
        (Some((first, page)), Some((line, printed))) => {
            line_matches(first, line) && lines_match(page, printed)
        }
        _ => false,
    }
}

fn line_matches(page: &str, mut printed: &str) -> bool {
    let parts: Vec<_> = page.split('…').collect();
    if let [whole] = parts[..] {
        return whole == printed;
    }
    for (index, part) in parts.iter().enumerate() {
        let found = match index {
            0 if printed.starts_with(part) => Some(0),
            0 => None,
            _ if index + 1 == parts.len() => {
                printed.ends_with(part).then(|| printed.len() - part.len())
            }
            _ => printed.find(part),
        };
        let Some(at) = found else { return false };
        printed = &printed[at + part.len()..];
    }
    true
}

/// A line in which all that differs from run to run is the same: numbers, LSNs, sizes, blanks.
fn shape(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let word = number_shape(word);
        let unit = ["bytes", "kB", "MB", "GB"].iter().find(|unit| word.trim_matches(',') == **unit);
        match (unit, words.last_mut()) {
            (Some(_), Some(last)) if last == "N" => {
                last.push_str(if word.ends_with(',') { " bytes," } else { " bytes" });
            }
            _ => words.push(word),
        }
    }
    words.join(" ")
}

fn number_shape(word: &str) -> String {
    let is_hex = |c: &char| c.is_ascii_digit() || ('A'..='F').contains(c);
    if let Some((before, after)) = word.split_once('/') {
        let high = before.chars().rev().take_while(is_hex).count();
        let low = after.chars().take_while(is_hex).count();
        if high > 0 && low > 4 {
            let before = number_shape(&before[..before.len() - high]);
            return format!("{before}LSN{}", number_shape(&after[low..]));
        }
    }
    let mut shape = String::new();
    for c in word.chars() {
        let c = if c.is_ascii_digit() { 'N' } else { c };
        if !((c == 'N' || c == '-') && shape.ends_with(c)) {
            shape.push(c);
        }
    }
    while let Some(at) = shape.find("N.N") {
        shape.replace_range(at..at + 3, "N");
    }
    shape
}

#[test]
fn output_is_compared_by_its_shape() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let alike = |page, printed| alike(&lines(page), &lines(printed));
    assert!(alike("lag  12 kB, 3.5 s at 0/1754BD0", "lag 811 bytes, 11 s at 1A/2B00000"));
    assert!(alike("x lsn=0/1D98688", "x lsn=A/ABCDE") && !alike("lsn=0/1D98688", "lsn=none"));
    assert!(!alike("lag 12 kB", "lag unknown"));
    assert!(alike("a\n…\nd", "a\nb\nc\nd") && alike("a\n…", "a") && !alike("a\n…\nd", "a\nb"));
    assert!(alike("from … to b", "from x y to b") && !alike("from … to b", "from x to c"));
    assert!(!alike("a", "a\nb") && !alike("a\nb", "a"));
    assert!(alike("a | b\n---+----", "a | b\n-----+---"));
}

#[test]
fn pages_are_taken_apart_and_written() {
    let text = "x\n<!-- run\nhidden 1\nhidden 2\n-->\n```console\n$ one \\\n  two\nout\n$ three\n```\n\
                ```console wait\n$ four\na\nb\n```\n";
    let page = Page::parse(text);
    let step = |line, command: &str, expected: Option<&[&str]>, retry| Step {
        line,
        command: command.to_owned(),
        expected: expected.map(|lines| lines.iter().map(|line| (*line).to_owned()).collect()),
        retry,
    };
    let steps = [
        step(3, "hidden 1\nhidden 2", None, false),
        step(7, "one \\\n  two", Some(&["out"]), false),
        step(10, "three", Some(&[]), false),
        step(13, "four", Some(&["a", "b"]), true),
    ];
    assert_eq!(page.steps, steps);
    let written = [(&page.steps[1], vec!["new".to_owned(), "lines".to_owned()])];
    assert_eq!(page.with(text, &written), text.replace("\nout\n", "\nnew\nlines\n"));
}
