//! The limit of a library: one put or get for each page, all of them over, and the flush that makes a write
//! visible (UCX), or delivery as the level of completion (libfabric): what the engine asks for, too.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kvgate_transfer::bare::View;
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Agent, BackendKind, BareCard, BareLibrary, Deadline};

use super::control::{Answer, LibraryCard, Order, out_of_turn};
use super::options::Direction;
use super::pair::{Pair, Sides};
use super::route::kind_of;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// The serving side looks so often whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// The measuring side.
pub struct Near {
    caller: BareLibrary,
    kind: BackendKind,
    deadline: Duration,
}

impl Near {
    /// Connects to a loop that the peer serves from now on.
    pub fn connect(pair: &mut Pair) -> Result<Self, Failure> {
        let kind = kind_of(pair.backend()).ok_or_else(|| Failure::internal("no path"))?;
        let card = match pair.control().ask(&Order::BareLibrary)? {
            Answer::BareLibrary(card) => card,
            other => return Err(out_of_turn(&other)),
        };
        let deadline = pair.deadline();
        let mut caller = pair.open_library(kind)?;
        let theirs = BareCard {
            address: card.address,
            base: card.base,
            key: card.key,
        };
        caller
            .connect(&theirs, Deadline::after(deadline))
            .map_err(|error| transfer_failure(&error))?;
        Ok(Self {
            caller,
            kind,
            deadline,
        })
    }

    /// Its name in the rows.
    #[must_use]
    pub fn name(&self, direction: Direction) -> &'static str {
        match (self.kind, direction) {
            (BackendKind::Libfabric, Direction::Write) => "fi_writemsg, delivery complete",
            (BackendKind::Libfabric, Direction::Read) => "fi_readmsg",
            (_, Direction::Write) => "ucp_put_nbx and ucp_ep_flush_nbx",
            (_, Direction::Read) => "ucp_get_nbx",
        }
    }

    /// Moves one list.
    pub fn transfer(
        &mut self,
        pair: &mut Pair,
        direction: Direction,
        sides: &Sides,
    ) -> Result<(), Failure> {
        let deadline = Deadline::after(self.deadline);
        pair.transfer_by_library(&mut self.caller, direction, sides, deadline)
    }
}

/// The serving side: a thread that works for the other one until this is dropped.
#[derive(Debug)]
pub struct Server {
    is_over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    /// Opens the library over the memory of `view`; the card lets the measuring side in.
    pub fn start(
        agent: &Agent,
        kind: BackendKind,
        local: IpAddr,
        view: &Arc<Mutex<View>>,
    ) -> Result<(Self, LibraryCard), Failure> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (told, card) = mpsc::channel();
        let (agent, view, until) = (agent.clone(), view.clone(), is_over.clone());
        let body = move || {
            let opened = BareLibrary::open(&agent, kind, local, &view.lock());
            let mut library = match opened {
                Ok(library) => library,
                Err(error) => return drop(told.send(Err(transfer_failure(&error)))),
            };
            // Nobody waits for it only when the run is over.
            let _ = told.send(Ok(library.card().clone()));
            // An error says that the other side is gone.
            while !until.load(Ordering::Acquire) && library.serve(LOOK).is_ok() {}
        };
        let spawned = thread::Builder::new()
            .name("bare-library".to_owned())
            .spawn(body);
        let thread = spawned.map_err(|error| Failure::internal(format!("thread: {error}")))?;
        let server = Self {
            is_over,
            thread: Some(thread),
        };
        let card = card.recv().map_err(|_| {
            Failure::new(
                FailureKind::PeerLost,
                "the thread of the bare loop has ended",
            )
        })??;
        let card = LibraryCard {
            address: card.address,
            base: card.base,
            key: card.key,
        };
        Ok((server, card))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by its own hook.
            let _ = thread.join();
        }
    }
}
