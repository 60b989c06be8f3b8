//! Each rule alone, and random histories against a naive model.

mod bed;
mod limits;
mod model;
mod order;
mod random;
mod rules;
