//! Passwords are never shown.

use super::parse;

#[test]
fn passwords_stay_secret() {
    let info = parse("host=h user=u password=sup3r").unwrap();
    for shown in [info.redacted(), info.to_string(), format!("{info:?}")] {
        assert!(!shown.contains("sup3r"), "{shown}");
        assert!(shown.contains("password=****"), "{shown}");
    }
    assert!(parse("postgres://u:sup3r@h?uzer=1").unwrap_err().to_string().find("sup3r").is_none());
    // The redacted form can be parsed again.
    assert_eq!(parse(&info.redacted()).unwrap().get("host"), Some("h"));
}

/// A password without the necessary quotes or encoding is cut into pieces that look like other
/// parameters. No message may show any of them.
#[test]
fn malformed_strings_show_no_piece_of_a_password() {
    const SECRET: &str = "hunter2";
    let cases = [
        // Blanks and quotes.
        "password=my hunter2 host=h",
        "password=my hunter2",
        "password=my hunter2=x host=h",
        "password=my hunter2 =x host=h",
        "password=hunter2 's host=h",
        "password='hunter2 host=h",
        "password='it's hunter2' host=h",
        "password='my'hunter2 host=h",
        "password=hunter2\\ host=h x",
        "password = hunter2 xyz=1",
        "password=my port=hunter2",
        "password=my hostaddr=hunter2",
        "password=my sslmode=hunter2",
        "password=my connect_timeout=hunter2",
        "password=my require_auth=hunter2",
        "password=my require_auth=md5,!hunter2",
        "password=my ssl_min_protocol_version=hunter2",
        "password=my service=hunter2",
        "sslpassword=hunter2",
        "hunter2",
        "postgre://u:hunter2@h/db",
        // A `?`, `/`, `@`, `:`, `[`, `,` or `&` in the password of a URI.
        "postgres://u:pa/?hunter2@h/db",
        "postgres://u:1/?hunter2@h/db",
        "postgres://u:hunter2?x@h/db?a",
        "postgres://u:1/?hunter2=x@h/db",
        "postgres://u:1/?x=hunter2@h/db",
        "postgres://u:1/?user=x=hunter2@h/db",
        "postgres://u:1/?port=hunter2@h/db",
        "postgres://u:1/?sslmode=hunter2@h/db",
        "postgres://u:1/?a&hunter2@h/db",
        "postgres://u:hunter2/x@h/db",
        "postgres://u:pa/hunter2@h/db",
        "postgres://u:/hunter2 @h x",
        "postgres://u:x@hunter2@h/db",
        "postgres://u:hunter2@x@h/db",
        "postgres://u:x@@hunter2@h/db",
        "postgres://u:x@y:hunter2@h/db",
        "postgres://u:x@h:hunter2",
        "postgres://u:a:hunter2:b/@h",
        "postgres://u:hunter2,x/@h",
        "postgres://u:x@[hunter2@h/db",
        "postgres://u:x@[]hunter2@h/db",
        "postgres://u:x@[y]hunter2@h/db",
        "postgres://u:hunter2@[::1",
        // Percent signs and blanks.
        "postgres://u:%hunter2@h",
        "postgres://u:hunter2%@h",
        "postgres://u:hunter2%zz@h",
        "postgres://u:hunter2%00@h",
        "postgres://u:hunter2%ff@h",
        "postgres://u:hunter2 x@h",
        "postgres://hunter2%zz:x@h",
        "postgres://u:x@hunter2%zz",
        "postgres://u:x@h/hunter2%zz",
        "postgres://u:x@h?hunter2%zz=1",
        "postgres://u@h?password=hunter2%zz",
        "postgres://u@h?password=my hunter2",
        "postgres://u@h?password=my&hunter2",
        "postgres://u@h?password=my=hunter2",
    ];
    for text in cases {
        let error = parse(text).unwrap_err();
        for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
            for piece in SECRET.as_bytes().windows(4) {
                let piece = std::str::from_utf8(piece).unwrap();
                assert!(!shown.contains(piece), "{text}: {shown}");
            }
        }
    }
}
