//! A network of several machines, each a network namespace of this one. Only root can make it.
//!
//! All are ports of one bridge, whose address in the first namespace is where servers listen. A port
//! that is unplugged passes no packet in either direction, and closes no connection.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Context, Error, Result};
use crate::program::Program;

/// The network. Dropping it removes it.
#[derive(Debug)]
pub struct Network {
    /// The prefix of the names of its devices.
    name: String,
    /// The first three numbers of its addresses.
    subnet: String,
    machines: usize,
}

impl Network {
    /// Creates a network of so many machines. None if this user may not.
    pub fn create(machines: usize) -> Result<Option<Self>> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() || Command::new("ip").arg("-V").output().is_err() {
            return Ok(None);
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed) + std::process::id() * 8;
        let name = format!("pgt{:x}", number % 0x000f_ffff);
        let subnet = format!("10.{}.{}", 128 + number / 250 % 100, 1 + number % 250);
        if run(&["netns", "add", &format!("{name}m0")]).is_err() {
            // A container without the privilege.
            return Ok(None);
        }
        let network = Self { name, subnet, machines };
        network.wire()?;
        Ok(Some(network))
    }

    fn wire(&self) -> Result<()> {
        let bridge = &self.name;
        run(&["link", "add", bridge, "type", "bridge"])?;
        run(&["addr", "add", &format!("{}.1/24", self.subnet), "dev", bridge])?;
        run(&["link", "set", bridge, "up"])?;
        for number in 0..self.machines {
            let (machine, port, inside) =
                (self.machine(number), self.port(number), format!("{}i{number}", self.name));
            if number > 0 {
                run(&["netns", "add", &machine])?;
            }
            run(&["link", "add", &port, "type", "veth", "peer", "name", &inside])?;
            run(&["link", "set", &inside, "netns", &machine])?;
            run(&["link", "set", &port, "master", bridge])?;
            run(&["link", "set", &port, "up"])?;
            let address = format!("{}.{}/24", self.subnet, 10 + number);
            run(&["-n", &machine, "addr", "add", &address, "dev", &inside])?;
            run(&["-n", &machine, "link", "set", &inside, "up"])?;
            run(&["-n", &machine, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    fn machine(&self, number: usize) -> String {
        format!("{}m{number}", self.name)
    }

    fn port(&self, number: usize) -> String {
        format!("{}p{number}", self.name)
    }

    /// Where servers of this machine are reached from the others.
    #[must_use]
    pub fn server_address(&self) -> String {
        format!("{}.1", self.subnet)
    }

    /// A line of `pg_hba.conf` that trusts all machines.
    #[must_use]
    pub fn hba(&self) -> String {
        format!("host all all {}.0/24 trust", self.subnet)
    }

    /// The program as it runs on a machine.
    #[must_use]
    pub fn on(&self, machine: usize, program: &Program) -> Program {
        program.clone().in_namespace(&self.machine(machine))
    }

    /// Cuts a machine off: packets are lost, and neither end gets an error.
    pub fn unplug(&self, machine: usize) -> Result<()> {
        run(&["link", "set", &self.port(machine), "down"])
    }

    /// Connects a machine again.
    pub fn plug(&self, machine: usize) -> Result<()> {
        run(&["link", "set", &self.port(machine), "up"])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for number in 0..self.machines {
            // The pair of devices goes with its port.
            let _ = run(&["link", "del", &self.port(number)]);
            let _ = run(&["netns", "del", &self.machine(number)]);
        }
        let _ = run(&["link", "del", &self.name]);
    }
}

fn run(args: &[&str]) -> Result<()> {
    let output = Command::new("ip")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context(|| format!("run ip {}", args.join(" ")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::other(format!("ip {}: {}", args.join(" "), said.trim())))
}
