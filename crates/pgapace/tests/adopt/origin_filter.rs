//! The origin filter of a native subscription that is adopted, and of one that is handed back.

use super::{NativeSubscription, TABLES};
use crate::support::on_versions;

/// The opposite direction must not get its own changes back.
#[test]
fn the_origin_filter_is_kept() {
    on_versions(&[(18, 18)], |mut case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        {
            let native = NativeSubscription::ready(&case, "WITH (origin = none)");
            let adopted = native.adopt(&[]);
            assert!(adopted.stdout.contains("--origin none"), "{}", adopted.stdout);
            case.run().expect(3, &["origin = none"]);
            case.tool.finish("rebase", &[]).expect(3, &["origin = none"]);
            let rebasing = "SELECT rebasing FROM pgapace.subscription";
            assert_eq!(case.subscriber.value(rebasing), "f");
        }
        case.tool.args = vec!["--origin=none".to_owned()];
        case.run_until_current();
    });
}

/// Without the filter, the native subscription would get changes back that the opposite direction applied.
#[test]
fn the_origin_filter_of_pgapace_is_handed_back() {
    on_versions(&[(18, 15), (18, 18)], |mut case| {
        case.both(TABLES);
        case.publish("FOR ALL TABLES");
        let tool = case.tool.clone();
        case.tool.args = vec!["--origin=none".to_owned()];
        let native = NativeSubscription::ready(&case, "");
        tool.finish("adopt", &["--subscription", &native.name]).expect(0, &[]);
        case.run_until_current();
        if case.subscriber.major() < 16 {
            tool.finish("release", &[]).expect(3, &["from PostgreSQL 16 on"]);
            assert_eq!(native.state(), "f|∅");
            return;
        }
        let released = tool.finish("release", &[]);
        assert!(released.expect(0, &[]).stdout.contains("origin = none"), "{}", released.stdout);
        let origin =
            format!("SELECT suborigin FROM pg_subscription WHERE subname = '{}'", native.name);
        assert_eq!(case.subscriber.value(&origin), "none");
        assert_eq!(native.state(), native.running());
    });
}
