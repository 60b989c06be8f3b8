//! Segments applied on an old and a new server, in text and in binary format.

mod bed;
mod keyed;
mod large_values;
mod moves;
mod moving;
mod plans;
mod too_long;
mod types;
mod varied;
mod whole;
mod whole_arrays;
mod whole_changed;
mod whole_missing;
mod whole_moving;
mod whole_rows;
mod whole_wide;

const MAJORS: [u16; 2] = [15, 18];
