//! `pgapace verify`: compares the published tables of both servers at one LSN.

#![expect(dead_code, reason = "the verb comes with the next commits")]

pub(crate) mod pair;
