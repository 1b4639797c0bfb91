//! The loop that a benchmark puts beside the engine over a library: one put or get for each page, all of them
//! over, a flush. No channel, no arrival, no registration that ends.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, poll};

use super::requests::Request;
use super::{Fabric, Failure};
use crate::agent::Agent;
use crate::backend::BackendKind;
use crate::backend::socket::timespec;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::ids::RegionId;
use crate::mem::Memory;
use crate::mem::bare::{AwaySlots, Slots, View};
use crate::sync::{Arc, thread};

/// Requests under way at once: as many as the engine has.
const WINDOW: usize = 512;

/// How the other side reaches the memory of a [`BareLibrary`].
#[derive(Clone, Debug)]
pub struct BareCard {
    /// The endpoint.
    pub address: Vec<u8>,
    /// Remote address of the memory's first byte.
    pub base: u64,
    /// Lets the other side reach it.
    pub key: Vec<u8>,
}

/// One side of the loop. Everything of it stays in the thread that made it.
pub struct BareLibrary {
    side: Box<dyn Side>,
    card: BareCard,
    /// The other side's.
    base: u64,
}

impl BareLibrary {
    /// Opens the library as connections of `agent` do, and makes the memory of `view` known to it.
    ///
    /// # Errors
    /// [`ErrorKind::BackendUnavailable`], [`ErrorKind::Provider`]; [`ErrorKind::InvalidArgument`] for the memory
    /// of a peer.
    pub fn open(
        agent: &Agent,
        kind: BackendKind,
        local: IpAddr,
        view: &View,
    ) -> Result<Self, Error> {
        let memory = view.memory().ok_or_else(|| ErrorKind::InvalidArgument {
            what: "owner of the memory",
            value: "the peer".to_owned(),
        })?;
        let config = agent.engine().one_sided.clone();
        let (side, card) = match kind {
            #[cfg(feature = "ucx")]
            BackendKind::Ucx => Half::boxed(
                crate::backend::ucx::Endpoint::open(&config.ucx, local)?,
                memory,
            )?,
            #[cfg(feature = "libfabric")]
            BackendKind::Libfabric => {
                let open = crate::backend::libfabric::Endpoint::open;
                Half::boxed(open(&config.libfabric, local)?, memory)?
            }
            backend => {
                let tried = vec![format!("this build, which was made without {backend}")];
                return Err(ErrorKind::BackendUnavailable { backend, tried }.into());
            }
        };
        Ok(Self {
            side,
            card,
            base: 0,
        })
    }

    /// For the other side.
    #[must_use]
    pub fn card(&self) -> &BareCard {
        &self.card
    }

    /// Makes the other side known, which works meanwhile, and waits until it has answered.
    ///
    /// # Errors
    /// [`ErrorKind::Provider`], [`ErrorKind::DeadlineExceeded`].
    pub fn connect(&mut self, card: &BareCard, deadline: Deadline) -> Result<(), Error> {
        self.base = card.base;
        self.side.connect(card)?;
        self.settle(deadline)
    }

    /// Moves every slot of `here` to its partner, or from it. `away` are numbered from `there_address`. The
    /// bytes are where they belong when this returns.
    ///
    /// # Errors
    /// As [`BareLibrary::connect`].
    ///
    /// # Panics
    /// When the two do not have the same shape, or the view is not theirs.
    pub fn transfer(
        &mut self,
        is_read: bool,
        (view, here): (&mut View, &Slots),
        (there_address, away): (u64, &AwaySlots),
        deadline: Deadline,
    ) -> Result<(), Error> {
        for (local, bytes, address) in here.pairs(view, away) {
            let request = Request {
                is_read,
                region: RegionId(0),
                local,
                bytes,
                remote: self.base + (address - there_address),
                key: 0,
            };
            while self.side.pending() >= WINDOW || !self.side.post(&request)? {
                self.turn(deadline)?;
            }
        }
        self.settle(deadline)?;
        if !is_read {
            self.side.flush()?;
        }
        self.settle(deadline)
    }

    /// Works for the other side for at most `limit`, and sleeps while there is nothing to do.
    ///
    /// # Errors
    /// [`ErrorKind::Provider`]: the other side has ended, too.
    pub fn serve(&mut self, limit: Duration) -> Result<(), Error> {
        if !self.side.progress()? {
            self.side.sleep(limit)?;
        }
        Ok(())
    }

    fn settle(&mut self, deadline: Deadline) -> Result<(), Error> {
        while self.side.pending() > 0 {
            self.turn(deadline)?;
        }
        Ok(())
    }

    /// The measuring side looks all the time: the bare loop is the fastest one.
    fn turn(&mut self, deadline: Deadline) -> Result<(), Error> {
        if self.side.progress()? {
            return Ok(());
        }
        if deadline.has_passed() {
            let (what, deadline_ms) = ("bare loop over a library", deadline.allowed_ms());
            return Err(ErrorKind::DeadlineExceeded { what, deadline_ms }.into());
        }
        thread::yield_now();
        Ok(())
    }
}

/// A [`Fabric`] with one memory, whichever library it is.
trait Side {
    fn connect(&mut self, card: &BareCard) -> Result<(), Failure>;
    fn post(&mut self, request: &Request) -> Result<bool, Failure>;
    fn flush(&mut self) -> Result<(), Failure>;
    fn pending(&self) -> usize;
    fn progress(&mut self) -> Result<bool, Failure>;
    fn sleep(&mut self, limit: Duration) -> Result<(), Failure>;
}

struct Half<F: Fabric> {
    /// There until the end.
    fabric: Option<F>,
    handle: usize,
    memory: Option<Arc<Memory>>,
}

impl<F: Fabric + 'static> Half<F> {
    fn boxed(mut fabric: F, memory: Arc<Memory>) -> Result<(Box<dyn Side>, BareCard), Error> {
        let address = fabric.address()?;
        let handle = fabric.register(&memory)?;
        // From here on the end of the half takes care of both.
        let mut half = Self {
            fabric: Some(fabric),
            handle,
            memory: Some(memory.clone()),
        };
        let key = half.live()?.key(handle, &memory)?;
        let card = BareCard {
            address: address.to_vec(),
            base: key.base,
            key: key.key.to_vec(),
        };
        Ok((Box::new(half), card))
    }

    fn live(&mut self) -> Result<&mut F, Failure> {
        let ended = || Failure::inside(F::KIND, "the library has ended");
        self.fabric.as_mut().ok_or_else(ended)
    }
}

impl<F: Fabric + 'static> Side for Half<F> {
    fn connect(&mut self, card: &BareCard) -> Result<(), Failure> {
        let keys = [Bytes::copy_from_slice(&card.key)];
        self.live()?.connect(&card.address, &keys)
    }

    fn post(&mut self, request: &Request) -> Result<bool, Failure> {
        let handle = self.handle;
        self.live()?.post(request, handle)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.live()?.flush()
    }

    fn pending(&self) -> usize {
        self.fabric.as_ref().map_or(0, Fabric::pending)
    }

    fn progress(&mut self) -> Result<bool, Failure> {
        self.live()?.progress()
    }

    fn sleep(&mut self, limit: Duration) -> Result<(), Failure> {
        let fabric = self.live()?;
        if !fabric.arm()? {
            return Ok(());
        }
        let event = fabric.event_fd();
        // However it ends, the caller looks again.
        let _ = poll(
            &mut [PollFd::new(&event, PollFlags::IN)],
            Some(&timespec(limit)),
        );
        Ok(())
    }
}

impl<F: Fabric> Drop for Half<F> {
    fn drop(&mut self) {
        let is_gone = self.fabric.take().is_none_or(Fabric::end);
        if !is_gone {
            // The library may still touch it.
            std::mem::forget(self.memory.take());
        }
    }
}
