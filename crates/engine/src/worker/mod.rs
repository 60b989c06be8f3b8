//! What a worker is handed, and when it may begin.

mod group;

pub use group::{Contended, Group, Mode, Task};
