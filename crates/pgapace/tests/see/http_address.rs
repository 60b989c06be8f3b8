//! `run --http` with an address that cannot be used.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use crate::support::{Case, must};

#[test]
fn an_address_that_cannot_be_used_ends_the_start_before_anything_is_done() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let token = case.log_file("token");
    must(std::fs::write(&token, "0123456789abcdef0123456789abcdef\n"));
    must(std::fs::set_permissions(&token, Permissions::from_mode(0o600)));
    let token = token.to_string_lossy().into_owned();
    let occupied = must(TcpListener::bind("127.0.0.1:0"));
    let occupied_address = must(occupied.local_addr()).to_string();
    // The second one is of a network for documentation (RFC 5737): no machine has it.
    for address in [occupied_address.as_str(), "192.0.2.1:9187"] {
        let args = ["--http", address, "--http-token-file", &token];
        let refused = case.tool.finish("run", &args);
        refused.expect(3, &[&format!("cannot listen on --http {address}"), "a free port"]);
    }
    let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
    assert_eq!(case.subscriber.value(schema), "0");
    assert_eq!(
        case.publisher
            .value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"),
        "0"
    );
}
