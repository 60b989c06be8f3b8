//! A client of the HTTP server, which reads metrics as Prometheus does.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::support::must;

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = must(TcpListener::bind("127.0.0.1:0"));
    must(listener.local_addr()).port()
}

/// An answer: status, headers in lower case, body.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

pub(crate) fn request(port: u16, request: &str) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(0);
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    Ok(Answer { status, headers, body: body.to_owned() })
}

#[track_caller]
pub(crate) fn get(port: u16, path: &str) -> Answer {
    must(request(port, &format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n")))
}

/// A sample: metric, labels, value.
pub(crate) type Samples = BTreeMap<(String, BTreeMap<String, String>), f64>;

/// Parses the text format strictly: a family is named once, with HELP and TYPE before its samples, names and
/// labels are valid, no sample occurs twice, and counters end with `_total`.
#[track_caller]
pub(crate) fn parse(text: &str) -> Samples {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    let (mut helped, mut typed) = (BTreeSet::new(), BTreeMap::new());
    let mut current = String::new();
    let mut samples = Samples::new();
    assert!(text.ends_with('\n'), "the last line ends");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect(line);
            assert!(
                is_name(name) && help.ends_with('.') && helped.insert(name.to_owned()),
                "{line}"
            );
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect(line);
            assert!(helped.contains(name) && ["gauge", "counter"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(typed.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}");
            name.clone_into(&mut current);
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect(line);
        let (name, labels) = match series.split_once('{') {
            Some((name, rest)) => (name, rest.strip_suffix('}').expect(line)),
            None => (series, ""),
        };
        assert_eq!(name, current, "samples follow their TYPE: {line}");
        let mut parsed = BTreeMap::new();
        for label in labels.split(',').filter(|label| !label.is_empty()) {
            let (label, text) = label.split_once('=').expect(line);
            let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).expect(line);
            assert!(is_name(label), "{line}");
            parsed.insert(label.to_owned(), text.to_owned());
        }
        let value = value.parse::<f64>().unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(samples.insert((name.to_owned(), parsed), value).is_none(), "twice: {line}");
    }
    samples
}
