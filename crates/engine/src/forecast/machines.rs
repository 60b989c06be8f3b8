//! Processors that several tasks share.

/// Number of processors of each machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machines {
    /// Of the subscriber. Every session has its own if there are more than sessions.
    pub subscriber: usize,
    /// Of the machine of pgapace.
    pub program: usize,
    /// Both are one machine, which has `subscriber` processors.
    pub shared: bool,
}

/// The thread or session that uses a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Leader,
    Encoder(usize),
    Session(usize),
}

/// Tasks that are running, each with the seconds of a processor that it still needs.
#[derive(Debug)]
pub(super) struct Running {
    machines: Machines,
    /// See [`super::Costs::contention`].
    contention: f64,
    tasks: Vec<(Task, f64)>,
}

impl Running {
    pub(super) fn new(machines: Machines, contention: f64) -> Self {
        Self { machines, contention, tasks: Vec::new() }
    }

    pub(super) fn start(&mut self, task: Task, seconds: f64) {
        debug_assert!(
            !self.tasks.iter().any(|(running, _)| *running == task),
            "one thing at a time"
        );
        self.tasks.push((task, seconds));
    }

    fn is_of_subscriber(task: Task) -> bool {
        matches!(task, Task::Session(_))
    }

    /// Seconds of work that a task of each machine does in a second: of the program's, and of the subscriber's.
    fn speeds(&self) -> [f64; 2] {
        let [program, subscriber] = self.shares();
        let sessions = self.tasks.iter().filter(|(task, _)| Self::is_of_subscriber(*task)).count();
        // A session that waits for a processor slows no other down.
        let others = (sessions as f64 * subscriber - 1.0).max(0.0);
        [program, subscriber / (1.0 + self.contention * others)]
    }

    /// The part of a processor that each task of a machine has: of the program's, and of the subscriber's.
    fn shares(&self) -> [f64; 2] {
        let of_subscriber = self.tasks.iter().filter(|(task, _)| Self::is_of_subscriber(*task));
        let of_subscriber = of_subscriber.count();
        let of_program = self.tasks.len() - of_subscriber;
        let share =
            |processors: usize, tasks: usize| (processors as f64 / tasks.max(1) as f64).min(1.0);
        let Machines { subscriber, program, shared } = self.machines;
        if shared {
            return [share(subscriber, self.tasks.len()); 2];
        }
        [share(program, of_program), share(subscriber, of_subscriber)]
    }

    /// How long until the first of them is done, and which; `None` if nothing runs.
    pub(super) fn next(&self) -> Option<(f64, Task)> {
        let speeds = self.speeds();
        let times = self
            .tasks
            .iter()
            .map(|(task, left)| (left / speeds[usize::from(Self::is_of_subscriber(*task))], *task));
        times.min_by(|(one, _), (other, _)| one.total_cmp(other))
    }

    /// So many seconds pass.
    pub(super) fn pass(&mut self, seconds: f64) {
        let speeds = self.speeds();
        for (task, left) in &mut self.tasks {
            *left -= seconds * speeds[usize::from(Self::is_of_subscriber(*task))];
        }
    }

    pub(super) fn done(&mut self, task: Task) {
        self.tasks.retain(|(running, _)| *running != task);
    }
}
