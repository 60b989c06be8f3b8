//! The value of `synchronous_standby_names`: names, and how many of them must answer a commit
//! (<https://www.postgresql.org/docs/current/runtime-config-replication.html>).

/// How many standbys must answer a commit by this setting: `FIRST 2 (a, b)`, `ANY 2 (a, b)`, `2 (a, b)`; or a list
/// of names, of which one must.
pub(crate) fn answers(setting: &str) -> u64 {
    let number = setting.split_once('(').and_then(|(method, _)| method.split_whitespace().last());
    number.and_then(|number| number.parse().ok()).unwrap_or(1)
}

/// Whether this setting has a name.
pub(crate) fn names(setting: &str, name: &str) -> bool {
    // Names match without regard to case (`SyncRepGetStandbyPriority` in `syncrep.c`).
    listed(setting).iter().any(|one| *one == "*" || one.eq_ignore_ascii_case(name))
}

/// The names in a value of `synchronous_standby_names`. One with a comma in it is taken for two.
pub(crate) fn listed(setting: &str) -> Vec<&str> {
    let list = setting.split_once('(').map_or(setting, |(_, list)| list);
    let list = list.split([',', ')']);
    let names = list.map(|name| name.trim().trim_matches('"'));
    names.filter(|name| !name.is_empty()).collect()
}

/// Whether a commit may wait for the standby of this name although others are listed: they are not enough to answer.
pub(crate) fn may_be_awaited(setting: &str, name: &str) -> bool {
    let listed = listed(setting);
    let Some(place) = listed.iter().position(|one| one.eq_ignore_ascii_case(name)) else {
        return false;
    };
    let is_any = setting.trim_start().get(..3).is_some_and(|word| word.eq_ignore_ascii_case("any"));
    let others = if is_any { listed.len() - 1 } else { place };
    listed.len() > 1 && (others as u64) < answers(setting)
}

#[cfg(test)]
mod tests {
    use super::{answers, listed, may_be_awaited, names};

    #[test]
    fn the_number_of_standbys_that_answer_stands_before_the_list() {
        for (setting, number) in [
            ("sub", 1),
            ("a, b", 1),
            ("ANY 2 (a, \"sub\")", 2),
            ("FIRST 3(*)", 3),
            ("2 (x,sub)", 2),
        ] {
            assert_eq!(answers(setting), number, "{setting}");
        }
        assert_eq!(answers("\"odd (name\""), 1);
    }

    #[test]
    fn a_subscription_is_named_alone_in_a_list_or_by_a_star() {
        for setting in ["sub", "ANY 1 (a, \"sub\")", "FIRST 2 (SUB, b)", "*", "2 (x,sub)"] {
            assert!(names(setting, "sub"), "{setting}");
        }
        for setting in ["", "subs", "ANY 1 (a, b)"] {
            assert!(!names(setting, "sub"), "{setting}");
        }
        assert!(names("any", "any") && !names("ANY 1 (a)", "any") && !names("FIRST 2 (a, b)", "2"));
    }

    #[test]
    fn a_flush_waits_for_the_opposite_subscription_only_beside_others() {
        let awaited = |setting| may_be_awaited(setting, "back");
        for setting in
            ["back, other", "FIRST 2 (other, back)", "ANY 2 (other, back)", "2 (BACK, x)"]
        {
            assert!(awaited(setting), "{setting}");
        }
        for setting in ["", "back", "FIRST 1 (other, back)", "ANY 1 (back, other)", "other", "*"] {
            assert!(!awaited(setting), "{setting}");
        }
    }

    #[test]
    fn the_names_of_a_setting_stand_behind_its_method() {
        for setting in ["a, b", "FIRST 2 (a, \"b\")", "ANY 1(a,b)", "2 ( a , b )"] {
            assert_eq!(listed(setting), ["a", "b"], "{setting}");
        }
        assert_eq!(listed("sub"), ["sub"]);
        assert_eq!(listed("*"), ["*"]);
        assert!(listed("").is_empty());
    }
}
