//! One attempt to send a request: whose turn it is, what was posted, and when its pages are free again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvgate_kvcache::{DrainingFlight, WriteLease};
use kvgate_transfer::{Status, TransferHandle};

use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::protocol::Offer;

/// Shared by the main thread and the compute thread.
pub(super) struct Flight {
    pub(super) prompt_ids: Vec<u32>,
    pub(super) offer: Offer,
    is_aborted: AtomicBool,
    handles: Mutex<Vec<TransferHandle>>,
    pages: Mutex<Pages>,
    /// Pages of a prefix that did not come, and those behind it; operations may still read them.
    former: Mutex<Vec<DrainingFlight>>,
}

/// The request's own pages on this side.
enum Pages {
    /// The compute thread has not come to it.
    Waiting,
    /// The compute thread has them.
    Computing,
    /// Written and posted; the decode side may still want them.
    Kept(WriteLease),
    /// Nobody wants them; operations may still read them.
    Draining(DrainingFlight),
    /// Free.
    Free,
}

impl Flight {
    pub(super) fn new(prompt_ids: Vec<u32>, offer: Offer) -> Arc<Self> {
        Arc::new(Self {
            prompt_ids,
            offer,
            is_aborted: AtomicBool::new(false),
            handles: Mutex::default(),
            pages: Mutex::new(Pages::Waiting),
            former: Mutex::default(),
        })
    }

    /// From 0.
    pub(super) fn request(&self) -> u32 {
        self.offer.id.request
    }

    /// Whether nothing more is to be posted.
    pub(super) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::Acquire)
    }

    /// Gives the flight up. The compute thread stops at its next layer.
    pub(super) fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
    }

    /// The compute thread takes the flight; `false` when it was given up.
    pub(super) fn begin(&self) -> bool {
        let mut pages = self.pages();
        let begins = !self.is_aborted();
        *pages = if begins {
            Pages::Computing
        } else {
            Pages::Free
        };
        begins
    }

    /// The compute thread is done with the pages.
    pub(super) fn keep(&self, lease: WriteLease) {
        *self.pages() = Pages::Kept(lease);
    }

    /// The compute thread goes on in other pages.
    pub(super) fn keep_former(&self, lease: WriteLease) {
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        former.push(lease.close());
    }

    /// The compute thread never got pages.
    pub(super) fn keep_nothing(&self) {
        *self.pages() = Pages::Free;
    }

    /// Keeps the handle of a post.
    pub(super) fn posted(&self, handle: TransferHandle) {
        self.handles
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(handle);
    }

    /// Gives the pages back as far as it is possible now. `true` when nothing of this flight is under
    /// way any more.
    pub(super) fn release(&self) -> bool {
        let mut pages = self.pages();
        let next = match std::mem::replace(&mut *pages, Pages::Free) {
            Pages::Waiting if !self.is_aborted() => Pages::Waiting,
            Pages::Waiting | Pages::Free => Pages::Free,
            Pages::Computing => Pages::Computing,
            Pages::Kept(lease) => drain(lease.close()),
            Pages::Draining(draining) => drain(draining),
        };
        let is_free = matches!(next, Pages::Free);
        *pages = next;
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        former.retain_mut(|draining| !draining.poll());
        is_free && former.is_empty()
    }

    /// A post that failed, of a flight that was not given up.
    pub(super) fn check_posts(&self) -> Result<(), Failure> {
        if self.is_aborted() {
            return Ok(());
        }
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let mut failed = None;
        handles.retain(|handle| {
            let status = handle.status();
            let is_open = matches!(status, Status::InFlight);
            match status {
                Status::InFlight | Status::Done(_) => {}
                Status::Failed(error) => {
                    failed.get_or_insert_with(|| transfer_failure(&error));
                }
                Status::Unknown(cause) => {
                    failed.get_or_insert_with(|| {
                        Failure::new(
                            FailureKind::PeerLost,
                            format!("the end of a transfer is unknown: {cause}"),
                        )
                    });
                }
            }
            is_open
        });
        failed.map_or(Ok(()), Err)
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn drain(mut draining: DrainingFlight) -> Pages {
    if draining.poll() {
        Pages::Free
    } else {
        Pages::Draining(draining)
    }
}
