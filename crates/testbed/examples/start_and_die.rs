//! Starts a cluster, prints its location and kills itself with SIGKILL, as the out-of-memory killer
//! would. The tests in `cluster.rs` run this example to check the guardian.

use testbed::{Cluster, servers};

fn main() -> testbed::Result<()> {
    let major = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(15);
    let cluster = Cluster::builder(&servers::find_or_fetch(major)?).start()?;
    println!("{}", cluster.postmaster_pid().unwrap_or_default());
    println!("{}", cluster.data_dir().display());
    println!("{}", cluster.socket_dir().display());
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::KILL)
        .map_err(|errno| testbed::Error::other(errno.to_string()))
}
