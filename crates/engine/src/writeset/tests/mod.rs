//! Each rule alone, and random histories against a naive model.

mod bed;
mod foreign_keys;
mod limits;
mod model;
mod order;
mod random;
mod rules;
