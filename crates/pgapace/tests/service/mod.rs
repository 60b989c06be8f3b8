//! pgapace as a service: secrets, SIGHUP, systemd.

mod notify;
mod reload;
mod secrets;
mod service_file;
mod unit;
