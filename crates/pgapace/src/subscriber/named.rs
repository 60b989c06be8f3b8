//! The condition on a relation of `pg_class` that is given by schema and name.

/// SQL: `$class` is the relation with this schema and name.
///
/// With a join of `pg_namespace`, the planner looks for the name alone, which it takes for nearly unique, and for the
/// schema of each relation that it finds. Where each of many schemas has the same tables, the time for all of them grows
/// with the square of their number. A scalar subquery leaves it no choice: both columns of the index have a value.
macro_rules! named {
    ($class:literal, $schema:literal, $name:literal) => {
        concat!(
            "(",
            $class,
            ".relname = ",
            $name,
            " AND ",
            $class,
            ".relnamespace = (SELECT of.oid FROM pg_catalog.pg_namespace of WHERE of.nspname = ",
            $schema,
            "))"
        )
    };
}
pub(crate) use named;
