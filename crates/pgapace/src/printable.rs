//! Characters that a terminal or a browser would obey instead of showing them. Queries and names of other users may
//! contain them.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Whether a character is a control character, or changes the direction in which the text is shown (`Bidi_Control`
/// of Unicode): then a statement looks like another one.
pub(crate) fn is_obeyed(c: char) -> bool {
    c.is_control() || changes_direction(c)
}

/// Source: `Bidi_Control` in <https://www.unicode.org/Public/UCD/latest/ucd/PropList.txt>.
pub(crate) fn changes_direction(c: char) -> bool {
    matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

/// Whether a terminal shows the character, or begins a line with it, and does nothing else.
pub(crate) fn is_safe(c: char) -> bool {
    c == '\n' || !is_obeyed(c)
}

/// Text with such characters as psql shows them, except for new lines.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| !is_safe(c))
}

/// Text in which such characters are written as escapes.
pub(crate) fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        let _ = match u32::from(c) {
            _ if !is_escaped(c) => shown.write_char(c),
            code @ ..=0xff => write!(shown, "\\x{code:02X}"),
            code => write!(shown, "\\u{code:04X}"),
        };
    }
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_are_shown_and_not_obeyed() {
        assert_eq!(printable("one line\nand ä"), "one line\nand ä");
        assert_eq!(printable("\u{1b}[2Jgone\r\u{7}\t\u{9b}"), "\\x1B[2Jgone\\x0D\\x07\\x09\\x9B");
        assert_eq!(printable("a\u{202e}b\u{61c}\u{2069}"), "a\\u202Eb\\u061C\\u2069");
    }
}
