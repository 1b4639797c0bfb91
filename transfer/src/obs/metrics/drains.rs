//! How long flights drain, from their end to the proof or to the loss of it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::ids::Epoch;

/// The flights that drain, or have lost a writer without a proof.
#[derive(Debug, Default)]
pub(super) struct Drains {
    open: BTreeMap<Epoch, Drain>,
}

#[derive(Debug, Default)]
struct Drain {
    began: Option<Instant>,
    is_quarantined: bool,
    is_told: bool,
}

/// What is known now, once per flight.
type Outcome = Option<(&'static str, Duration)>;

impl Drains {
    pub(super) fn began(&mut self, epoch: Epoch) -> Outcome {
        let drain = self.open.entry(epoch).or_default();
        drain.began.get_or_insert_with(Instant::now);
        drain.quarantine()
    }

    pub(super) fn quarantined(&mut self, epoch: Epoch) -> Outcome {
        let drain = self.open.entry(epoch).or_default();
        drain.is_quarantined = true;
        drain.quarantine()
    }

    pub(super) fn quiet(&mut self, epoch: Epoch) -> Outcome {
        let drain = self.open.remove(&epoch)?;
        let began = drain.began.filter(|_| !drain.is_told)?;
        Some(("quiet", began.elapsed()))
    }
}

impl Drain {
    fn quarantine(&mut self) -> Outcome {
        let began = self
            .began
            .filter(|_| self.is_quarantined && !self.is_told)?;
        self.is_told = true;
        Some(("quarantined", began.elapsed()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_flight_has_one_outcome_in_either_order() {
        let mut drains = Drains::default();
        assert!(drains.began(Epoch(1)).is_none());
        assert_eq!(drains.quiet(Epoch(1)).unwrap().0, "quiet");

        assert!(drains.began(Epoch(2)).is_none());
        assert_eq!(drains.quarantined(Epoch(2)).unwrap().0, "quarantined");
        assert!(drains.quarantined(Epoch(2)).is_none());
        assert!(drains.quiet(Epoch(2)).is_none());

        assert!(drains.quarantined(Epoch(3)).is_none());
        assert_eq!(drains.began(Epoch(3)).unwrap().0, "quarantined");
        assert!(drains.quiet(Epoch(3)).is_none());
        assert!(drains.open.is_empty());
    }
}
