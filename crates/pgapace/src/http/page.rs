//! The page: one file with its style and script, which the Content-Security-Policy names by their hashes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};

const HTML: &str = include_str!("page.html");

/// The page and its policy.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) html: &'static str,
    pub(crate) policy: String,
}

impl Page {
    pub(crate) fn new() -> Self {
        let hash = |element| format!("'sha256-{}'", STANDARD.encode(digest(&SHA256, element)));
        let policy = format!(
            "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            hash(content("script").as_bytes()),
            hash(content("style").as_bytes())
        );
        Self { html: HTML, policy }
    }
}

/// The text inside the only element of this name.
fn content(element: &str) -> &'static str {
    let (open, close) = (format!("<{element}>"), format!("</{element}>"));
    let inside = HTML.split_once(&open).and_then(|(_, rest)| rest.split_once(&close));
    inside.map_or("", |(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::{HTML, Page, content};

    #[test]
    fn the_page_needs_nothing_else() {
        assert!(content("script").len() > 1000 && content("style").len() > 500);
        // Nothing is loaded from elsewhere, and nothing needs a weaker policy.
        for not in
            ["http://", "https://", "src=", "<link", "@import", " style=", " onclick=", "innerHTML"]
        {
            let allowed = HTML.replace("http://www.w3.org/2000/svg", "");
            assert!(!allowed.contains(not), "{not}");
        }
        let policy = Page::new().policy;
        assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
}
