//! The registration of pools with one agent: whose names their memory has, and its end.
//!
//! **What is protected by what.** One mutex guards all of it and is held across no wait: while a thread waits
//! for the end of the region, the phase says so, and nobody takes the pools for unregistered meanwhile.
//! **Lock order.** Before the table of registrations of the agent. No region is dropped with it held.

use std::mem;

use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Agent, Deadline, Incarnation, Memory, MemoryRegion, PoolGeometry, PoolId};

use crate::error::{Error, ErrorKind};
use crate::schema::PoolIndex;

/// `None` before the registration and after its end.
#[derive(Default)]
pub(super) struct Registration(Mutex<Option<Known>>);

struct Known {
    /// The agent that knows the region.
    agent: Incarnation,
    pools: Vec<PoolId>,
    phase: Phase,
}

enum Phase {
    Open(MemoryRegion),
    /// A thread waits for the end of the region.
    Closing,
    /// Nobody waits: the time of a close ran out. Nothing new begins, and it can be closed again.
    Revoked(MemoryRegion),
}

type Closed = Result<(), (MemoryRegion, kvgate_transfer::Error)>;

impl Registration {
    pub(super) fn begin(
        &self,
        agent: &Agent,
        memory: Arc<Memory>,
        pools: &[PoolGeometry],
    ) -> Result<(), Error> {
        let mut known = self.0.lock();
        if known.is_some() {
            return Err(ErrorKind::AlreadyRegistered.into());
        }
        let region = agent.register(memory, pools)?;
        *known = Some(Known {
            agent: agent.incarnation(),
            pools: region.pools().to_vec(),
            phase: Phase::Open(region),
        });
        Ok(())
    }

    pub(super) fn end(&self, deadline: Deadline) -> Result<(), Error> {
        self.end_by(|region| region.close(deadline))
    }

    fn end_by(&self, close: impl FnOnce(MemoryRegion) -> Closed) -> Result<(), Error> {
        let Some(region) = self.take()? else {
            return Ok(());
        };
        let closed = close(region);
        let mut known = self.0.lock();
        match closed {
            Ok(()) => {
                *known = None;
                Ok(())
            }
            Err((region, error)) => {
                let known = known.as_mut().expect("only who closes it ends it");
                known.phase = Phase::Revoked(region);
                Err(error.into())
            }
        }
    }

    /// The region, for the one thread that closes it; `None` when there is none.
    fn take(&self) -> Result<Option<MemoryRegion>, Error> {
        let mut known = self.0.lock();
        let Some(known) = known.as_mut() else {
            return Ok(None);
        };
        match mem::replace(&mut known.phase, Phase::Closing) {
            Phase::Open(region) | Phase::Revoked(region) => Ok(Some(region)),
            Phase::Closing => Err(ErrorKind::Unregistering.into()),
        }
    }

    /// The names of the pools, whoever gave them, until they mean nothing any more.
    pub(super) fn pools(&self) -> Option<Vec<PoolId>> {
        self.0.lock().as_ref().map(|known| known.pools.clone())
    }

    /// One of [`Registration::pools`].
    pub(super) fn pool(&self, pool: PoolIndex) -> Option<PoolId> {
        self.0.lock().as_ref()?.pools.get(pool.index()).copied()
    }

    /// Looks at the names that `agent` gave them, for something that begins now (I-14).
    pub(super) fn with_pools_of<T>(
        &self,
        agent: Incarnation,
        look: impl FnOnce(&[PoolId]) -> T,
    ) -> Result<T, Error> {
        match &*self.0.lock() {
            None => Err(ErrorKind::NotRegistered.into()),
            Some(known) if known.agent != agent => Err(ErrorKind::OtherAgent {
                registered: known.agent,
                found: agent,
            }
            .into()),
            Some(known) => match known.phase {
                Phase::Open(_) => Ok(look(&known.pools)),
                Phase::Closing | Phase::Revoked(_) => Err(ErrorKind::Unregistering.into()),
            },
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const POOL: PoolGeometry = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 64,
        slot_bytes: 64,
        slot_count: 4,
    };

    fn agent(name: &str) -> Agent {
        Agent::builder(name).build().unwrap()
    }

    fn begin(registration: &Registration, agent: &Agent) -> Result<(), ErrorKind> {
        let memory = Arc::new(Memory::host(256).unwrap());
        let begun = registration.begin(agent, memory, &[POOL]);
        begun.map_err(|error| error.kind().clone())
    }

    fn end(registration: &Registration) -> Result<(), ErrorKind> {
        let ended = registration.end(Deadline::after_ms(5_000));
        ended.map_err(|error| error.kind().clone())
    }

    fn pools_of(registration: &Registration, agent: &Agent) -> Result<Vec<PoolId>, ErrorKind> {
        let pools = registration.with_pools_of(agent.incarnation(), <[PoolId]>::to_vec);
        pools.map_err(|error| error.kind().clone())
    }

    /// What a second thread finds while the first one waits in its close, which then runs out of time.
    #[test]
    fn pools_are_registered_until_their_close_has_succeeded() {
        let (owner, other) = (agent("owner"), agent("other"));
        let registration = Registration::default();
        assert_eq!(end(&registration), Ok(()), "there is nothing to end");
        begin(&registration, &owner).unwrap();
        let pools = pools_of(&registration, &owner).unwrap();
        let refused = registration.end_by(|region| {
            std::thread::scope(|scope| {
                let second = || {
                    assert_eq!(end(&registration), Err(ErrorKind::Unregistering));
                    for agent in [&owner, &other] {
                        let begun = begin(&registration, agent);
                        assert_eq!(begun, Err(ErrorKind::AlreadyRegistered));
                    }
                    let begun = pools_of(&registration, &owner);
                    assert_eq!(begun, Err(ErrorKind::Unregistering));
                    assert_eq!(registration.pools(), Some(pools.clone()));
                };
                scope.spawn(second).join().unwrap();
            });
            Err((region, kvgate_transfer::ErrorKind::Closed.into()))
        });
        assert_eq!(*refused.unwrap_err().kind(), ErrorKind::Transfer);
        let begun = pools_of(&registration, &owner);
        assert_eq!(
            begun,
            Err(ErrorKind::Unregistering),
            "the region is revoked"
        );
        let begun = begin(&registration, &other);
        assert_eq!(begun, Err(ErrorKind::AlreadyRegistered));
        assert_eq!(end(&registration), Ok(()), "once more, with success");
        assert_eq!(registration.pools(), None);
        begin(&registration, &other).unwrap();
        assert_eq!(
            registration.pool(PoolIndex(0)),
            registration.pools().unwrap().pop()
        );
        assert_eq!(end(&registration), Ok(()));
    }
}
