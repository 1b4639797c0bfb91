//! The bare loop of a path, when it is not the plain copy: what the engine's figures are set beside.

use std::net::SocketAddr;

use super::bare_stream::BareStream;
use super::control::{Answer, Order, out_of_turn};
use super::layout::PageList;
use super::options::{Backend, Direction};
use super::pair::{Pair, Sides};
use crate::handoff::failure::Failure;

/// Moves lists without an engine.
pub enum BareLoop {
    /// Messages over a socket.
    Stream(BareStream),
    /// The kernel, from process to process.
    Kernel,
    /// Calls into a library, one for each page.
    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    Library(super::bare_library::Near),
}

impl BareLoop {
    /// The loop of the pair's path; `None` when that is the plain copy.
    pub fn open(pair: &mut Pair) -> Result<Option<Self>, Failure> {
        match pair.backend() {
            Backend::Tcp => Self::stream(pair).map(Some),
            Backend::Cma => Ok(Some(Self::Kernel)),
            #[cfg(any(feature = "ucx", feature = "libfabric"))]
            Backend::Ucx | Backend::Libfabric => {
                let near = super::bare_library::Near::connect(pair)?;
                Ok(Some(Self::Library(near)))
            }
            _ => Ok(None),
        }
    }

    /// The loop of a stream socket, whatever the path.
    pub fn stream(pair: &mut Pair) -> Result<Self, Failure> {
        match pair.control().ask(&Order::BareStream)? {
            Answer::BareStream { port, cookie } => {
                let address = SocketAddr::new(pair.ip(), port);
                let stream = BareStream::connect(address, &cookie, pair.deadline())?;
                Ok(Self::Stream(stream))
            }
            other => Err(out_of_turn(&other)),
        }
    }

    /// Its name in the rows.
    #[must_use]
    pub fn name(&self, direction: Direction) -> &'static str {
        match (self, direction) {
            (Self::Stream(_), _) => "writev/readv with acks",
            (Self::Kernel, Direction::Write) => "process_vm_writev",
            (Self::Kernel, Direction::Read) => "process_vm_readv",
            #[cfg(any(feature = "ucx", feature = "libfabric"))]
            (Self::Library(near), direction) => near.name(direction),
        }
    }

    /// Moves one list. Nothing of the engine may be in flight.
    pub fn transfer(
        &mut self,
        pair: &mut Pair,
        direction: Direction,
        (list, sides): (&PageList, &Sides),
    ) -> Result<(), Failure> {
        match self {
            Self::Stream(stream) => pair.stream(direction, list, sides, stream),
            Self::Kernel => pair.kernel_copy(direction, sides),
            #[cfg(any(feature = "ucx", feature = "libfabric"))]
            Self::Library(near) => near.transfer(pair, direction, sides),
        }
    }
}
