//! What the bare loop over a library takes from slots.

use super::{AwaySlots, Mapped, Slots, View, have_one_shape};
use crate::mem::Memory;
use crate::sync::Arc;

impl View {
    /// Its own memory.
    pub(crate) fn memory(&self) -> Option<Arc<Memory>> {
        match &*self.mapped {
            Mapped::Own(memory) => Some(memory.clone()),
            Mapped::Peer { .. } => None,
        }
    }
}

impl Slots {
    /// Start and length of every slot, and the address of its partner. What is done with them counts as use
    /// of the view.
    ///
    /// # Panics
    /// When the two do not have the same shape, or the view is not theirs.
    pub(crate) fn pairs<'a>(
        &'a self,
        view: &'a mut View,
        away: &'a AwaySlots,
    ) -> impl Iterator<Item = (*mut u8, usize, u64)> + 'a {
        self.check_owner(view);
        assert!(
            have_one_shape(&self.groups, &away.groups),
            "slots of another shape"
        );
        let groups = self.groups.iter().zip(&away.groups);
        groups.flat_map(|(here, there)| {
            let slots = here.slots.iter().zip(&there.slots);
            slots.map(|(&near, &far)| {
                let address = there.at(far).addr() as u64;
                (here.at(near), here.slot_bytes, address)
            })
        })
    }
}
