//! The jobs that are left, and who gets which.

use std::collections::VecDeque;

use crate::tablesync::plan::Job;

/// Workers keep apart as long as there are several tables: those that fill one table share its
/// indexes, whose pages they have to pass to each other.
#[derive(Debug)]
pub(super) struct Queue {
    jobs: VecDeque<Job>,
    /// The table that each worker has copied of last.
    tables: Vec<Option<usize>>,
}

impl Queue {
    pub(super) fn new(jobs: VecDeque<Job>, workers: usize) -> Self {
        Self { jobs, tables: vec![None; workers] }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(super) fn push_front(&mut self, job: Job) {
        self.jobs.push_front(job);
    }

    pub(super) fn push_back(&mut self, job: Job) {
        self.jobs.push_back(job);
    }

    /// The job for a worker: more of its table, else the first that is no part of a table that
    /// another worker has, else the first.
    pub(super) fn take(&mut self, worker: usize) -> Option<Job> {
        let own = self.tables[worker].take();
        let others = &self.tables;
        let of_own = |job: &Job| matches!(job, Job::Part(table, _) if own == Some(*table));
        let of_nobody = |job: &Job| match job {
            Job::Part(table, _) => !others.contains(&Some(*table)),
            Job::Batch(_) | Job::Table(_) | Job::Analyze(_) => true,
        };
        let place = self
            .jobs
            .iter()
            .position(of_own)
            .or_else(|| self.jobs.iter().position(of_nobody))
            .unwrap_or(0);
        let job = self.jobs.remove(place)?;
        if let Job::Part(table, _) = &job {
            self.tables[worker] = Some(*table);
        }
        Some(job)
    }

    /// A worker takes nothing any more, or nothing for now.
    pub(super) fn leave(&mut self, worker: usize) {
        self.tables[worker] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(jobs: &[Job], workers: usize) -> Queue {
        Queue::new(jobs.iter().cloned().collect(), workers)
    }

    #[test]
    fn workers_keep_apart_and_then_help() {
        use Job::{Batch, Part, Table};
        let jobs =
            [Part(0, 0), Part(0, 1), Part(0, 2), Part(1, 0), Part(1, 1), Table(2), Batch(vec![3])];
        let mut queue = queue(&jobs, 3);
        assert_eq!(queue.take(0), Some(Part(0, 0)));
        assert_eq!(queue.take(1), Some(Part(1, 0)));
        assert_eq!(queue.take(2), Some(Table(2)));
        assert_eq!(queue.take(0), Some(Part(0, 1)));
        assert_eq!(queue.take(1), Some(Part(1, 1)));
        assert_eq!(queue.take(1), Some(Batch(vec![3])));
        // Nothing else is left.
        assert_eq!(queue.take(2), Some(Part(0, 2)));
        assert!(queue.is_empty());
        assert_eq!(queue.take(0), None);
    }

    #[test]
    fn the_table_of_a_worker_that_left_is_for_others() {
        use Job::{Part, Table};
        let mut queue = queue(&[Part(0, 0), Part(0, 1), Table(1)], 2);
        assert_eq!(queue.take(0), Some(Part(0, 0)));
        queue.leave(0);
        assert_eq!(queue.take(1), Some(Part(0, 1)));
    }
}
