//! The reading side's part of a planted fault. The detectors know nothing of it.

use kvgate_kvcache::{
    AppendLease, BlockTable, CacheSchema, Error, LayerId, LayerMut, PageLease, TransferPlan,
};
use kvgate_transfer::StageId;
use kvgate_transfer::fault::Switch;

use super::place::{self, Place, Scope};
use super::spec::FaultKind;
use crate::handoff::failure::Failure;
use crate::handoff::plan::RunPlan;
use crate::handoff::report::{Counters, PlantedFault};

/// The fault of a run, as the decode side sees it.
#[derive(Clone, Debug)]
pub struct Watched {
    kind: FaultKind,
    place: Place,
}

/// The reading side's part for one request.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    /// The layer of this place is read as soon as everything but the place's own chunk is here.
    ungated: Option<(Place, TransferPlan)>,
    /// The prefill side waits until this layer has been read.
    awaited: Option<LayerId>,
}

/// Draws the same place as the prefill side, and sets the switches of this process.
pub fn watch(plan: &RunPlan, schema: &CacheSchema) -> Result<Option<Watched>, Failure> {
    let Some(fault) = &plan.fault else {
        return Ok(None);
    };
    let place = place::draw(fault, schema, Scope::of(plan))?;
    set_switches(fault.kind);
    Ok(Some(Watched {
        kind: fault.kind,
        place,
    }))
}

/// Switches off the check that would stop the fault, in this process.
pub fn set_switches(kind: FaultKind) {
    let switch = match kind {
        FaultKind::LateWrite => Switch::NoQuiesceCheck,
        FaultKind::StaleEpoch => Switch::NoEpochCheck,
        FaultKind::EarlyDone => Switch::NoLevelCheck,
        FaultKind::Duplicate => Switch::DuplicateArrivals,
        _ => return,
    };
    kvgate_transfer::fault::set(switch, true);
}

impl Watched {
    /// The place in the slots of a request, if it is this one.
    #[must_use]
    pub fn place_in(
        &self,
        request: u32,
        schema: &CacheSchema,
        table: &BlockTable,
    ) -> Option<PlantedFault> {
        let Place {
            component,
            layer,
            page,
            request: planted,
        } = &self.place;
        let row = schema
            .row(*layer, *component)
            .filter(|_| *planted == request)?;
        Some(PlantedFault {
            kind: self.kind.id().to_owned(),
            component: component.id().to_owned(),
            layer: layer.0,
            page: table.physical_page(row, page.page_ordinal),
            request,
        })
    }

    /// The reading side's part for a request.
    #[must_use]
    pub fn reader(&self, request: u32, transfer: &TransferPlan) -> Reader {
        if self.place.request != request {
            return Reader::default();
        }
        let layer = self.place.layer;
        let is_ungated = self.kind == FaultKind::UngatedIndexK;
        let awaits = matches!(
            self.kind,
            FaultKind::UngatedIndexK | FaultKind::EarlyDone | FaultKind::StaleEpoch
        );
        Reader {
            ungated: is_ungated.then(|| (self.place.clone(), transfer.clone())),
            awaited: awaits.then_some(layer),
        }
    }

    /// Why a run with this fault shows nothing, if it does: a fault that changed no bit, or a check that
    /// was never asked.
    #[must_use]
    pub fn proves_nothing(&self, is_clean: bool, counters: &Counters) -> Option<String> {
        let count = match self.kind {
            FaultKind::LateWriteChecked => counters.quarantined_pages,
            FaultKind::StaleEpochChecked => counters.stale,
            FaultKind::EarlyDoneChecked => counters.unknown,
            FaultKind::Duplicate => counters.duplicate,
            _ => u64::from(!is_clean),
        };
        (count == 0).then(|| format!("the fault {} had nothing to act on", self.kind.id()))
    }

    /// Other requests had to wait for the one with the fault, so fewer may have been in flight.
    #[must_use]
    pub fn serialises(&self) -> bool {
        self.kind.is_stale_epoch()
    }
}

impl Reader {
    /// Whether a layer is read without its gate.
    #[must_use]
    pub fn is_ungated(&self, layer: LayerId) -> bool {
        self.ungated
            .as_ref()
            .is_some_and(|(place, _)| place.layer == layer)
    }

    /// Whether everything of the layer is here but the chunk that comes too late.
    #[must_use]
    pub fn has_all_but_the_place(
        &self,
        lease: &PageLease,
        schema: &CacheSchema,
        layer: LayerId,
    ) -> bool {
        let Some((place, plan)) = &self.ungated else {
            return false;
        };
        let landed = lease.barrier().landed(StageId(layer.0));
        let Some(late) = schema.row(layer, place.component) else {
            return false;
        };
        plan.chunks(layer).iter().all(|planned| {
            let is_late =
                planned.pool == late.pool && planned.ordinals.contains(&place.page.page_ordinal);
            let (word, bit) = (usize::from(planned.chunk.0 / 64), planned.chunk.0 % 64);
            is_late || landed.get(word).is_some_and(|word| (word >> bit) & 1 == 1)
        })
    }

    /// The layer, without asking its gate.
    pub fn layer<'a>(
        &self,
        append: &'a mut AppendLease,
        layer: LayerId,
    ) -> Result<LayerMut<'a>, Error> {
        append.layer_ungated(layer)
    }

    /// Whether the prefill side waits until this layer has been read.
    #[must_use]
    pub fn is_awaited(&self, layer: LayerId) -> bool {
        self.awaited == Some(layer)
    }
}
