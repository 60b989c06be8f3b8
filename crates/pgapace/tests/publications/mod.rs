//! Changed publications: pgapace detects every interval in which a table was not published.

mod dropped;
mod gaps;
mod gaps_while_copying;
mod gaps_while_starting;
mod no_gap;
mod not_visible;
mod other_names;
mod other_tables;
mod own_schema;
mod random;
mod seen_in_stream;
