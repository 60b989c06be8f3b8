//! The queue of copy jobs, and their assignment to workers.

use std::collections::{BTreeSet, VecDeque};

use crate::tablesync::plan::Job;

/// Assigns different tables to different workers as long as possible. Workers that fill the same
/// table compete for pages of its indexes.
#[derive(Debug)]
pub(super) struct Queue {
    jobs: VecDeque<Job>,
    /// For each worker, the table whose part it copied last.
    tables: Vec<Option<usize>>,
    /// Whether each worker may still take a job.
    alive: Vec<bool>,
    /// Whether each worker executes one.
    working: Vec<bool>,
}

impl Queue {
    pub(super) fn new(jobs: VecDeque<Job>, workers: usize) -> Self {
        Self {
            jobs,
            tables: vec![None; workers],
            alive: vec![true; workers],
            working: vec![false; workers],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// The tables that are not copied to their end.
    pub(super) fn tables(&self) -> BTreeSet<usize> {
        let tables = self.jobs.iter().flat_map(|job| match job {
            Job::Batch(tables) => tables.as_slice(),
            Job::Table(table) | Job::Part(table, _) => std::slice::from_ref(table),
            Job::Analyze(_) => &[],
        });
        tables.copied().collect()
    }

    pub(super) fn push_front(&mut self, job: Job) {
        self.jobs.push_front(job);
    }

    pub(super) fn push_back(&mut self, job: Job) {
        self.jobs.push_back(job);
    }

    /// Takes a job for a worker: another part of its table, otherwise the first job that is not
    /// part of another worker's table, otherwise the first job. One whose table `waits` for others is left, and there may be
    /// none then; unless no worker copies anything for which it could wait.
    pub(super) fn take(&mut self, worker: usize, waits: &dyn Fn(usize) -> bool) -> Option<Job> {
        self.working[worker] = false;
        let own = self.tables[worker].take();
        let others = &self.tables;
        let is_ready = |job: &Job| match job {
            Job::Table(table) | Job::Part(table, _) => !waits(*table),
            Job::Batch(_) | Job::Analyze(_) => true,
        };
        let of_own = |job: &Job| matches!(job, Job::Part(table, _) if own == Some(*table));
        let of_no_other = |job: &Job| match job {
            Job::Part(table, _) => !others.contains(&Some(*table)),
            Job::Batch(_) | Job::Table(_) | Job::Analyze(_) => true,
        };
        let place = self
            .jobs
            .iter()
            .position(of_own)
            .or_else(|| self.jobs.iter().position(|job| of_no_other(job) && is_ready(job)))
            .or_else(|| self.jobs.iter().position(is_ready))
            .or_else(|| (!self.working.contains(&true)).then_some(0))?;
        let job = self.jobs.remove(place)?;
        self.working[worker] = true;
        if let Job::Part(table, _) = &job {
            self.tables[worker] = Some(*table);
        }
        Some(job)
    }

    /// The worker takes no more jobs, at least for now.
    pub(super) fn leave(&mut self, worker: usize) {
        self.tables[worker] = None;
        self.working[worker] = false;
    }

    /// The worker takes no more jobs.
    pub(super) fn exit(&mut self, worker: usize) {
        self.leave(worker);
        self.alive[worker] = false;
    }

    /// Whether a worker leaves the jobs to others: to those with a number below `allowed`, as long as one of them can
    /// take them. They exit when the queue is empty, and then another worker may add a job.
    pub(super) fn leaves_jobs_to_others(&self, worker: usize, allowed: usize) -> bool {
        worker >= allowed && self.alive.iter().take(allowed).any(|alive| *alive)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: &dyn Fn(usize) -> bool = &|_| false;

    fn queue(jobs: &[Job], workers: usize) -> Queue {
        Queue::new(jobs.iter().cloned().collect(), workers)
    }

    #[test]
    fn workers_take_different_tables_first() {
        use Job::{Batch, Part, Table};
        let jobs =
            [Part(0, 0), Part(0, 1), Part(0, 2), Part(1, 0), Part(1, 1), Table(2), Batch(vec![3])];
        let mut queue = queue(&jobs, 3);
        assert_eq!(queue.take(0, FREE), Some(Part(0, 0)));
        assert_eq!(queue.take(1, FREE), Some(Part(1, 0)));
        assert_eq!(queue.take(2, FREE), Some(Table(2)));
        assert_eq!(queue.take(0, FREE), Some(Part(0, 1)));
        assert_eq!(queue.take(1, FREE), Some(Part(1, 1)));
        assert_eq!(queue.take(1, FREE), Some(Batch(vec![3])));
        // Only parts of another worker's table are left.
        assert_eq!(queue.take(2, FREE), Some(Part(0, 2)));
        assert!(queue.is_empty());
        assert_eq!(queue.take(0, FREE), None);
    }

    #[test]
    fn tables_that_are_left_are_named_once() {
        use Job::{Analyze, Batch, Part, Table};
        let jobs = [Part(4, 0), Part(4, 1), Table(2), Batch(vec![3, 5]), Analyze(vec![1])];
        assert_eq!(queue(&jobs, 1).tables().into_iter().collect::<Vec<_>>(), [2, 3, 4, 5]);
    }

    #[test]
    fn other_workers_take_the_table_of_a_worker_that_left() {
        use Job::{Part, Table};
        let mut queue = queue(&[Part(0, 0), Part(0, 1), Table(1)], 2);
        assert_eq!(queue.take(0, FREE), Some(Part(0, 0)));
        queue.leave(0);
        assert_eq!(queue.take(1, FREE), Some(Part(0, 1)));
    }

    /// The allowed workers have found the queue empty, and the last part of another one adds an ANALYZE.
    #[test]
    fn a_worker_takes_jobs_if_no_allowed_one_is_left() {
        let mut queue = queue(&[], 3);
        assert!(!queue.leaves_jobs_to_others(1, 2));
        queue.exit(0);
        assert!(queue.leaves_jobs_to_others(2, 2));
        queue.exit(1);
        assert!(!queue.leaves_jobs_to_others(2, 2));
    }

    #[test]
    fn a_table_that_waits_for_another_is_left_while_that_is_copied() {
        use Job::Table;
        let mut queue = queue(&[Table(0), Table(1), Table(2)], 3);
        let waits: &dyn Fn(usize) -> bool = &|table| table != 1;
        assert_eq!(queue.take(0, waits), Some(Table(1)));
        assert_eq!(queue.take(1, waits), None);
        assert_eq!(queue.take(0, FREE), Some(Table(0)));
        assert_eq!(queue.take(1, waits), None);
        // Two that wait for each other.
        queue.exit(0);
        assert_eq!(queue.take(1, waits), Some(Table(2)));
    }
}
