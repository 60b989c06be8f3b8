//! Names that settings had in earlier versions.

use std::time::Duration;

use super::{both, one};
use crate::config::declarations::IfNotEmpty;

/// A file and flags with names of earlier versions, with underscores as well.
#[test]
fn old_names_are_known() {
    let old =
        "name='a'\npublications=['p', 'q']\nlock_probe=70\nkeep=true\nschema=true\ncopy_workers=3";
    for found in [
        both(old, &[]),
        both(
            "",
            &[
                "--name=a",
                "--publications=p,q",
                "--lock-probe",
                "70",
                "--keep",
                "--schema",
                "--copy-workers=3",
                "--target=host=s user=u dbname=d",
            ],
        ),
    ] {
        let found = found.expect("valid");
        assert_eq!(found.publications, ["p", "q"]);
        assert_eq!(found.deadlock_timeout, Duration::from_millis(70));
        assert_eq!(found.if_not_empty, IfNotEmpty::Keep);
        assert!(found.copy_schema);
        assert_eq!(found.copy_workers, 3);
    }
    assert_eq!(one("keep = false").if_not_empty, IfNotEmpty::Refuse);
}

/// All keys of a file for the last version before the settings were declared here.
#[test]
fn a_file_of_an_earlier_version_is_read() {
    let text = r#"
        publication = ["p"]
        slot = "s"
        create_slot = true
        copy-data = true
        copy-workers = 2
        copy_split_size = 16
        keep = true
        schema = false
        refresh-interval = 5
        on-missed-changes = "resync"
        analyze = false
        indexes_after = false
        failover = false
        two-phase = true
        two_phase_hold = 1
        origin = "none"
        tag-commits = true
        binary = "off"
        status_interval = 3
        receive-timeout = 30
        busy-timeout = 0
        connect_timeout = 20
        streaming = "on"
        spool-directory = "/tmp"
        spool-limit = 100
        memory_limit = 32
        workers = 2
        preserve-commit-order = false
        lock-probe = 40
        prefetch = "auto"
        apply-mode = "row"
        on-conflict = ["insert_exists=skip", "s.t:update_missing=error"]
        on_table_error = "block"
        conflict-retention = 0
        disable-on-error = true
        [[subscription]]
        name = "a"
        group-transactions = 8
        [[subscription]]
        name = "b"
        group_transactions = "auto"
    "#;
    let a = both(text, &["--name=a"]).expect("valid");
    assert_eq!(a.group_transactions.0.map(usize::from), Some(8));
    assert_eq!((a.copy().split_size, a.spool_limit), (16 << 20, Some(100 << 20)));
    assert_eq!((a.two_phase, a.two_phase_hold), (Some(true), Duration::from_secs(1)));
    assert_eq!(a.connect_timeout, Some(Duration::from_secs(20)));
    assert!(a.origin_none() && a.on_conflict.has_rules() && a.disable_on_error);
    assert_eq!(both(text, &["--name=b"]).expect("valid").group_transactions.0, None);
}
