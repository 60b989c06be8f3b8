//! Segments on real servers, an old and a new one, in text and in binary.

mod bed;
mod keyed;
mod plans;
mod types;
mod whole;

const MAJORS: [u16; 2] = [15, 18];
