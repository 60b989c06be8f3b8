//! The migrations of schema `pgapace`: each file makes the version of its number from the one before it.
//!
//! A released migration is never changed; each new version appends a file.

/// The text of a file, without its last line break.
macro_rules! migration {
    ($name:literal) => {
        include_str!(concat!($name, ".sql")).trim_ascii_end()
    };
}

/// Each entry upgrades the schema from the version of its index to the next.
pub(super) const MIGRATIONS: &[&str] = &[
    migration!("001_first_tables"),
    migration!("002_apply_mode_and_format"),
    migration!("003_copy_parts"),
    migration!("004_applied_view"),
    migration!("005_rules_and_parallel_apply"),
    migration!("006_schema_copy"),
    migration!("007_catch_up"),
    migration!("008_prepared"),
    migration!("009_streaming_and_spool"),
    migration!("010_serialized_tables"),
    migration!("011_conflict_comment"),
    migration!("012_publisher_history"),
    migration!("013_slot_made_at"),
    migration!("014_retries"),
    migration!("015_table_states"),
    migration!("016_published_by"),
    migration!("017_empty_snapshot"),
    migration!("018_renamed_columns"),
    migration!("019_comments"),
    migration!("020_workers_in_use"),
    migration!("021_figures"),
    migration!("022_events"),
    migration!("023_verification"),
    migration!("024_adoption"),
    migration!("025_barrier"),
    migration!("026_rebasing"),
    migration!("027_switchover"),
    migration!("028_hand_over"),
    migration!("029_background_verification"),
    migration!("030_owner_and_member"),
    migration!("031_switchover_back"),
    migration!("032_shared_subscriptions"),
    migration!("033_verification_plan"),
    migration!("034_difference_order"),
    migration!("035_switchover_for_monitoring"),
    migration!("036_error_detail"),
    migration!("037_copy_wanted"),
    migration!("038_copied_into"),
    migration!("039_owner_walsender"),
    migration!("040_error_exit_code"),
    migration!("041_interrupted_verification"),
    migration!("042_two_phase"),
    migration!("043_held_progress"),
    migration!("044_lacks_prepared"),
    migration!("045_skip_found"),
    migration!("046_way_back_slot"),
    migration!("047_publisher_database"),
    migration!("048_barrier_exit_code"),
];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::MIGRATIONS;

    #[test]
    fn each_file_is_the_migration_of_its_number() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/subscriber/state/migrations");
        let entries = std::fs::read_dir(folder).expect("the folder");
        let files = entries.map(|entry| entry.expect("a file").path());
        let mut files: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|kind| kind == "sql")).collect();
        files.sort();
        assert_eq!(files.len(), MIGRATIONS.len());
        for (index, (path, migration)) in files.iter().zip(MIGRATIONS).enumerate() {
            let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
            assert!(name.starts_with(&format!("{:03}_", index + 1)), "{name}");
            let text = std::fs::read_to_string(path).expect("the file");
            assert_eq!(text, format!("{migration}\n"), "{name}");
        }
    }
}
