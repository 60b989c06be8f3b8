//! Changed publications: pgapace detects every interval in which a table was not published.

mod dropped;
mod gaps;
mod other_tables;
mod random;
