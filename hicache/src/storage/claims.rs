//! [`Claims`]: who brings which record, decided before a byte is read.
//!
//! **What is protected by what.** One mutex guards the table. **Lock order.** It is a leaf.

use std::collections::HashSet;

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Condvar, Mutex};

use crate::record::RecordId;

/// The records that fetches bring at this moment.
#[derive(Debug, Default)]
pub struct Claims {
    held: Mutex<HashSet<RecordId>>,
    /// Told when a claim ends.
    ended: Condvar,
}

/// The right to bring some records. It ends when it is dropped, whatever became of them.
#[derive(Debug)]
#[must_use = "dropping it lets others bring the records"]
pub struct Claim {
    claims: Arc<Claims>,
    ids: Vec<RecordId>,
}

impl Claims {
    /// Nobody brings anything.
    pub fn new() -> Claims {
        Claims::default()
    }

    /// Claims all of these records. `None`, and nothing claimed, while somebody else brings one of them.
    pub fn try_claim(claims: &Arc<Claims>, ids: &[RecordId]) -> Option<Claim> {
        let mut held = claims.held.lock();
        if ids.iter().any(|id| held.contains(id)) {
            return None;
        }
        held.extend(ids);
        drop(held);
        Some(Claim {
            claims: Arc::clone(claims),
            ids: ids.to_vec(),
        })
    }

    /// Blocks until nobody brings one of these records. `false` at the deadline, which changes nothing.
    pub fn wait(&self, ids: &[RecordId], deadline: Deadline) -> bool {
        let mut held = self.held.lock();
        while ids.iter().any(|id| held.contains(id)) {
            if deadline.has_passed() {
                return false;
            }
            self.ended.wait_until(&mut held, deadline.instant());
        }
        true
    }

    /// Records that somebody brings.
    pub fn count(&self) -> usize {
        self.held.lock().len()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut held = self.claims.held.lock();
        for id in &self.ids {
            held.remove(id);
        }
        self.claims.ended.notify_all();
    }
}
