//! Publications that change: whatever was not published for a while is noticed.

mod gaps;
mod gone;
