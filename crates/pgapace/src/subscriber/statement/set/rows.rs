//! Single statements for changes that are too few, too large or too different for a set statement.

use engine::net::Row;
use pgoutput::Column;

use super::{Expected, SetError, Sought, SoughtIn, Subscriber};
use crate::subscriber::mapping::{Search, TableMap};
use crate::subscriber::statement::bind::{self, RowChange};
use crate::subscriber::statement::row::{Operation, PlanError, UpdatePlan, Values, plan_search};

/// The rows that a single statement finds.
#[derive(Debug, Clone, Copy)]
pub(super) enum Finds {
    /// So many.
    Rows(usize),
    /// This one of the segment, which may be missing.
    Sought(SoughtIn, u32),
}

/// Buffer for the shape of a statement.
#[derive(Debug, Default)]
pub(super) struct Rows {
    plan: UpdatePlan,
}

impl Rows {
    pub(super) fn insert<E: FnMut(Expected<'_>)>(
        &mut self,
        subscriber: &mut Subscriber<'_, E>,
        row: &Row<'_>,
    ) -> Result<(), SetError> {
        let new = values(subscriber.map, row)?;
        let Subscriber { session, statements, map, .. } = subscriber;
        let (operation, plan) = (Operation::Insert, &self.plan);
        let change = RowChange { operation, plan, new: &new, search: &new, counted: None };
        bind::queue_row(session, statements, map, &change)?;
        subscriber.expect_all(1);
        Ok(())
    }

    /// Deletes a row.
    pub(super) fn delete<E: FnMut(Expected<'_>)>(
        &mut self,
        subscriber: &mut Subscriber<'_, E>,
        row: &Row<'_>,
        finds: Finds,
    ) -> Result<(), SetError> {
        let old = values(subscriber.map, row)?;
        plan_search(subscriber.map, &old, &mut self.plan.nulls)?;
        self.queue(subscriber, Operation::Delete, &old, &old, finds)
    }

    /// Updates a row: all columns that were sent, except the key columns that find it.
    pub(super) fn update<E: FnMut(Expected<'_>)>(
        &mut self,
        subscriber: &mut Subscriber<'_, E>,
        old: Option<&Row<'_>>,
        row: &Row<'_>,
        finds: Finds,
    ) -> Result<(), SetError> {
        let map = subscriber.map;
        let new = values(map, row)?;
        let old = old.map(|old| values(map, old)).transpose()?;
        let search = old.as_ref().unwrap_or(&new);
        plan_search(map, search, &mut self.plan.nulls)?;
        self.plan.set.reset(new.len());
        let mut identity = false;
        for (index, value) in new.iter().enumerate() {
            let finds = old.is_none() && map.search_columns().iter().any(|c| c.remote == index);
            if !finds && !matches!(value, Column::Unchanged) {
                self.plan.set.insert(index);
                identity |= map.is_identity_always(index);
            }
        }
        let operation = if self.plan.set.is_empty() {
            Operation::Probe
        } else if identity {
            // UPDATE cannot set an identity column. If it has changed, this operation finds no row.
            Operation::UpdateSameIdentity
        } else {
            Operation::Update
        };
        // Such an update may find no row although it is there.
        let finds = if identity { Finds::Rows(1) } else { finds };
        self.queue(subscriber, operation, &new, search, finds)
    }

    fn queue<E: FnMut(Expected<'_>)>(
        &mut self,
        subscriber: &mut Subscriber<'_, E>,
        operation: Operation,
        new: &[Column<'_>],
        search: &[Column<'_>],
        finds: Finds,
    ) -> Result<(), SetError> {
        // The SQL of other operations has a WITH clause or a form that [`Statement::counted`] does
        // not handle.
        let can_count = matches!(subscriber.map.search, Search::Key(_))
            && matches!(operation, Operation::Update | Operation::Delete | Operation::Probe);
        let counted = match finds {
            Finds::Rows(rows) if subscriber.counted && can_count => Some(rows),
            _ => None,
        };
        let Subscriber { session, statements, map, .. } = subscriber;
        let change = RowChange { operation, plan: &self.plan, new, search, counted };
        bind::queue_row(session, statements, map, &change)?;
        match finds {
            Finds::Rows(rows) => subscriber.expect(rows, counted.is_some()),
            Finds::Sought(rows_of, row) => {
                subscriber.expect_sought(Sought { rows_of, rows: &[row], listed: false });
            }
        }
        Ok(())
    }
}

fn values<'a>(map: &TableMap, row: &Row<'a>) -> Result<Values<'a>, PlanError> {
    let values: Values<'a> = row.columns().collect();
    let (expected, found) = (map.remote.columns.len(), values.len());
    if found == expected { Ok(values) } else { Err(PlanError::ColumnCount { expected, found }) }
}
