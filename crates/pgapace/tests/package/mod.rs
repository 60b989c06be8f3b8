//! The .deb in a fresh Debian root, with servers outside of it: installed, used, upgraded and removed, and
//! the pages of the book that a new user reads. `cargo xtask dist --try` makes what these tests need.

mod root;

use testbed::program::Process;
use testbed::{Pair, wait_until};

pub(crate) use root::Root;

use crate::book;
use crate::support::{PATIENCE, must};

const CONFIGURATION: &str = "/etc/pgapace/shop.toml";

#[test]
fn install() {
    let Some(mut root) = Root::unpack("package::install") else { return };
    let pair = root.servers();
    book::run_within(&root, None, "/root", &pair, "install.md");
}

#[test]
fn first_hour() {
    let Some(mut root) = Root::unpack("package::first_hour") else { return };
    let pair = root.servers();
    root.run("dpkg --install now.deb; useradd --create-home --user-group reader");
    book::run_within(&root, Some("reader"), "/home/reader", &pair, "first-hour.md");
}

#[test]
fn used_upgraded_and_removed() {
    let Some(mut root) = Root::unpack("package::used_upgraded_and_removed") else { return };
    let pair = root.servers();
    for server in [&pair.publisher, &pair.subscriber] {
        must(server.sql("shop", "CREATE TABLE orders (id int PRIMARY KEY)"));
    }
    must(pair.publisher.sql("shop", "CREATE PUBLICATION shop FOR TABLE orders"));

    root.run("dpkg --install before.deb");
    has_what_a_package_has(&root);
    let (code, said) = root.try_run(Some("pgapace"), "pgapace demo --duration 3");
    assert!(code == 3 && said.contains("cargo run --release -- demo"), "{code}: {said}");

    configure(&root, &pair);
    let check = format!("pgapace check --config {CONFIGURATION}");
    let (code, said) = root.try_run(Some("pgapace"), &check);
    assert_eq!(code, 0, "{said}");
    let mut process = start(&root, "first");
    arrives(&pair, 1, &mut process);

    // The process keeps the program that it started with.
    root.run("dpkg --install now.deb");
    arrives(&pair, 2, &mut process);
    stop(process);
    let mut process = start(&root, "second");
    arrives(&pair, 3, &mut process);
    let status = format!("pgapace status --config {CONFIGURATION} --check");
    let (code, said) = root.try_run(Some("pgapace"), &status);
    assert!(code == 0 && said.contains("streaming"), "{code}: {said}");
    let said = root.run("pgapace --version; dpkg-query --show --showformat '${Version}' pgapace");
    assert!(
        said.starts_with(concat!("pgapace ", env!("CARGO_PKG_VERSION"), " (commit ")),
        "{said}"
    );
    assert!(said.ends_with(env!("CARGO_PKG_VERSION")), "{said}");
    stop(process);

    root.run("dpkg --remove pgapace");
    assert!(!root.path("/usr/bin/pgapace").exists() && root.path(CONFIGURATION).exists());
    // The administrator's file is not the package's.
    root.run("dpkg --purge pgapace");
    assert!(root.path(CONFIGURATION).exists());
    root.run(&format!("dpkg --install now.deb; rm {CONFIGURATION}; dpkg --purge pgapace"));
    assert!(!root.path("/etc/pgapace").exists() && !root.path("/var/lib/pgapace").exists());
    let left = root.run("find / -xdev -name '*pgapace*' -not -path '/root/*' -not -path '/tmp/*'");
    assert_eq!(left, "", "the package leaves files behind");
    // Nor is the state, which is in the subscriber.
    let names = pair.subscriber.query_one_text("shop", "SELECT name FROM pgapace.subscription");
    assert_eq!(must(names), "shop");
}

fn has_what_a_package_has(root: &Root) {
    let modes =
        root.run("stat --format '%n %U:%G %a' /etc/pgapace /var/lib/pgapace /usr/bin/pgapace");
    assert_eq!(
        modes,
        "/etc/pgapace root:pgapace 750\n/var/lib/pgapace pgapace:pgapace 700\n\
         /usr/bin/pgapace root:root 755\n"
    );
    for file in [
        "/usr/lib/systemd/system/pgapace@.service",
        "/usr/share/man/man1/pgapace.1.gz",
        "/usr/share/man/man1/pgapace-run.1.gz",
        "/usr/share/bash-completion/completions/pgapace",
        "/usr/share/zsh/vendor-completions/_pgapace",
        "/usr/share/fish/vendor_completions.d/pgapace.fish",
        "/usr/share/doc/pgapace/copyright",
        "/usr/share/doc/pgapace/examples/pgapace.toml",
    ] {
        let length = root.path(file).metadata().map(|metadata| metadata.len());
        assert!(length.is_ok_and(|length| length > 100), "{file}");
    }
    root.run("bash -n /usr/share/bash-completion/completions/pgapace");
    // A static program needs nothing of the root.
    let (_, said) = root.try_run(None, "ldd /usr/bin/pgapace");
    assert!(said.contains("statically linked") || said.contains("not a dynamic"), "{said}");
}

fn configure(root: &Root, pair: &Pair) {
    let text = format!(
        "publisher = {:?}\nsubscriber = {:?}\n[[subscription]]\nname = \"shop\"\npublication = \"shop\"\n",
        pair.publisher.conninfo("shop"),
        pair.subscriber.conninfo("shop")
    );
    must(std::fs::write(root.path("/root/shop.toml"), text));
    root.run(&format!("install -o root -g pgapace -m 0640 shop.toml {CONFIGURATION}"));
}

/// The command of the unit, as the user of the unit.
fn start(root: &Root, log: &str) -> Process {
    let unit = must(std::fs::read_to_string(root.path("/usr/lib/systemd/system/pgapace@.service")));
    let value = |key: &str| {
        let line = unit.lines().find_map(|line| line.strip_prefix(key));
        line.expect("the unit has it").replace("%i", "shop")
    };
    let command = value("ExecStart=");
    let command: Vec<_> = command.split(' ').collect();
    let log = root.path("/root").join(format!("{log}.log"));
    must(root.program(&value("User="), &command).spawn_logged(log))
}

/// Inserts row `id` on the publisher; it must come to the subscriber.
fn arrives(pair: &Pair, id: u32, process: &mut Process) {
    must(pair.publisher.sql("shop", &format!("INSERT INTO orders VALUES ({id})")));
    let expected = id.to_string();
    let arrived = wait_until(PATIENCE, format!("row {id}"), || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        Ok(pair.subscriber.query_one_text("shop", "SELECT count(*) FROM orders")? == expected)
    });
    arrived.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
}

fn stop(mut process: Process) {
    must(process.terminate());
    let status = must(process.wait(PATIENCE));
    assert!(status.success(), "{status}:\n{}", process.log());
}
