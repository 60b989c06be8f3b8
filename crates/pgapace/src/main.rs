//! pgapace
fn main() {}
