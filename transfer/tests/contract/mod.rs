//! What every backend must keep, written once over "make a connected pair".

pub(crate) mod ends;
pub(crate) mod moves;
pub(crate) mod reads;

use std::{
    io::Write,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use kvgate_transfer::{sync::Arc, *};

/// A way to connect agents.
pub(crate) trait Backend {
    fn new() -> Self;
    /// Whether what it needs is installed; otherwise it has said what is not.
    fn is_there() -> bool {
        true
    }
    fn agent(&self, name: &str, config: TransferConfig) -> Agent;
    fn memory(&self, len_bytes: u64) -> Memory;
    /// Connects two agents: the number of `b` at `a`, and of `a` at `b`.
    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId);
    /// Lets time pass until nothing is left to happen; for backends without threads.
    fn run(&self) {}
}

pub(crate) const SLOT_BYTES: u64 = 96;
pub(crate) const SLOT_COUNT: u32 = 16;
pub(crate) const STAGE: StageId = StageId(0);
pub(crate) const WRITER: WriterRank = WriterRank(0);

/// Long enough for a busy machine; nothing below waits for it to pass.
pub(crate) fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// An agent with one registered pool. Slots are `SLOT_BYTES` of a stride of 128.
pub(crate) struct Node {
    pub(crate) agent: Agent,
    pub(crate) memory: Arc<Memory>,
    pub(crate) region: Option<MemoryRegion>,
    pub(crate) pool: PoolId,
}

impl Node {
    pub(crate) fn new(backend: &impl Backend, name: &str) -> Self {
        Self::with(backend, name, TransferConfig::default())
    }

    pub(crate) fn with(backend: &impl Backend, name: &str, config: TransferConfig) -> Self {
        Self::of(backend, backend.agent(name, config))
    }

    pub(crate) fn of(backend: &impl Backend, agent: Agent) -> Self {
        let pool = PoolGeometry {
            offset_bytes: 64,
            stride_bytes: 128,
            slot_bytes: SLOT_BYTES,
            slot_count: SLOT_COUNT,
        };
        let memory = Arc::new(backend.memory(64 + 128 * u64::from(SLOT_COUNT)));
        let region = agent.register(memory.clone(), &[pool]).unwrap();
        let pool = region.pools()[0];
        Self {
            agent,
            memory,
            region: Some(region),
            pool,
        }
    }

    fn slot_ptr(&self, slot: u32) -> *mut u8 {
        assert!(slot < SLOT_COUNT);
        self.memory
            .base_ptr()
            .wrapping_add(64 + 128 * slot as usize)
    }

    /// Fills a slot that no operation uses.
    pub(crate) fn fill(&self, slot: u32, value: u8) {
        // SAFETY: I-16: the slot lies in the memory; the test posts nothing from it meanwhile.
        unsafe { self.slot_ptr(slot).write_bytes(value, SLOT_BYTES as usize) };
    }

    /// The bytes of a slot that no operation writes.
    pub(crate) fn read(&self, slot: u32) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES as usize];
        // SAFETY: I-16: the slot lies in the memory; the test reads it behind a gate or a witness.
        unsafe {
            self.slot_ptr(slot)
                .copy_to(bytes.as_mut_ptr(), SLOT_BYTES as usize)
        };
        bytes
    }

    pub(crate) fn holds(&self, slot: u32, value: u8) -> bool {
        self.read(slot).iter().all(|byte| *byte == value)
    }

    /// A transfer of `from[i]` of this node into `to[i]` of the peer.
    pub(crate) fn prepare(
        &self,
        peer: PeerId,
        from: &[u32],
        to: &[u32],
    ) -> Result<PreparedTransfer, Error> {
        let info = self.agent.peer(peer).unwrap();
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        local.push(self.pool, from);
        remote.push(info.pools[0].pool, to);
        self.agent.prepare(Op::Write, &local, &remote, peer)
    }

    /// Posts one slot as one chunk of a flight.
    pub(crate) fn send(
        &self,
        peer: PeerId,
        from: u32,
        to: u32,
        arrival: Arrival,
    ) -> TransferHandle {
        let transfer = self.prepare(peer, &[from], &[to]).unwrap();
        let options = PostOptions {
            arrival: Some(arrival),
            ..PostOptions::default()
        };
        self.agent
            .post(&transfer, SourceReady::host_written(), options)
            .unwrap()
    }
}

pub(crate) fn arrival(epoch: u64, stage: u16, chunk: u16) -> Arrival {
    let tickets = vec![(StageId(stage), ChunkId(chunk))];
    Arrival {
        epoch: Epoch(epoch),
        tickets,
        note: Default::default(),
    }
}

/// A barrier of one stage; chunk i is of the i-th writer rank in `writers`.
pub(crate) fn barrier(epoch: u64, writers: &[u16]) -> Arc<Barrier> {
    let chunk = |(chunk, rank): (usize, &u16)| ChunkSpec {
        stage: STAGE,
        chunk: ChunkId(chunk as u16),
        writer: WriterRank(*rank),
        descriptor_count: 1,
    };
    let chunks = writers.iter().enumerate().map(chunk).collect();
    Barrier::new(BarrierPlan::from_chunks(chunks).unwrap(), Epoch(epoch))
}

/// An armed barrier of `chunk_count` chunks of one writer, and its expectation.
pub(crate) fn expect(
    node: &Node,
    from: PeerId,
    epoch: u64,
    chunk_count: usize,
) -> (Arc<Barrier>, Expectation) {
    let barrier = barrier(epoch, &vec![0; chunk_count]);
    let flight = node
        .agent
        .expect(&barrier, &[(from, WRITER)], None)
        .unwrap();
    barrier.arm().unwrap();
    (barrier, flight)
}

pub(crate) fn done(backend: &impl Backend, handle: &TransferHandle) {
    backend.run();
    let status = handle.wait(patience());
    assert!(
        matches!(status, Status::Done(Visibility::RemoteVisible)),
        "{status:?}"
    );
}

/// The next event of `agent` that `pick` takes.
pub(crate) fn event<R>(
    backend: &impl Backend,
    agent: &Agent,
    mut pick: impl FnMut(AgentEvent) -> Option<R>,
) -> R {
    backend.run();
    let deadline = patience();
    loop {
        let event = agent.next_event(deadline).expect("an event in time");
        if let Some(picked) = pick(event) {
            return picked;
        }
    }
}

/// Waits until everything that `a` has posted to `to_b` was weighed at `b`.
pub(crate) fn fence(backend: &impl Backend, a: &Node, to_b: PeerId, b: &Node) {
    a.agent.send(to_b, "fence").unwrap();
    event(backend, &b.agent, |event| {
        matches!(event, AgentEvent::Message { .. }).then_some(())
    });
}

/// One test per claim and backend.
#[macro_export]
macro_rules! contract {
    ($module:ident, $backend:ty) => {
        mod $module {
            use super::*;
            $crate::contract_tests!($backend:
                moves::bytes_are_there_when_the_gate_opens,
                moves::one_sender_and_three_receivers,
                moves::three_senders_and_one_receiver,
                moves::sixty_four_flights_at_once,
                moves::a_prepared_transfer_is_posted_again,
                moves::messages_keep_their_place_behind_posts,
                moves::the_sink_sees_the_bytes_before_the_gate_opens,
                moves::stale_duplicate_and_unknown_arrivals_are_counted_and_open_nothing,
                moves::a_full_queue_is_back_pressure_and_nothing_fails,
                moves::bad_lists_are_refused_by_name,
                moves::progress_of_a_peer_is_seen,
                ends::cancelled_is_untouched_and_done_has_landed,
                ends::what_has_landed_is_known_slot_by_slot,
                ends::an_abort_waits_for_the_answer_of_the_writer,
                ends::a_lost_writer_fails_the_flight_at_once,
                ends::a_lost_receiver_fails_posts,
                ends::a_restarted_peer_is_another_one,
                ends::a_closed_region_refuses_and_is_quiet,
                ends::a_dropped_agent_ends_its_peers,
                reads::what_was_read_is_there_when_the_gate_opens,
                reads::slots_are_read_in_the_order_of_the_lists,
                reads::a_read_needs_the_word_of_its_own_peer,
                reads::reads_and_writes_cross,
                reads::a_cancelled_read_is_untouched_and_a_done_one_has_landed,
                reads::regions_are_closed_beside_reads,
                reads::a_lost_source_fails_reads_and_flights,
            );
        }
    };
}

/// The tests of one backend.
#[macro_export]
macro_rules! contract_tests {
    ($backend:ty: $($file:ident :: $name:ident,)*) => {
        const CASES: &[&str] = &[$(stringify!($name)),*];

        static COUNT: $crate::contract::Count = $crate::contract::Count::new();

        $(#[test]
        fn $name() {
            if <$backend as $crate::contract::Backend>::is_there() {
                $crate::contract::$file::$name(<$backend as $crate::contract::Backend>::new());
                COUNT.one_more(module_path!(), CASES.len());
            }
        })*
    };
}

/// The cases of one backend that have held.
pub(crate) struct Count(AtomicUsize);

impl Count {
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Says how many cases there are once every one has held, past the capture of the test harness.
    pub(crate) fn one_more(&self, module: &str, all: usize) {
        if self.0.fetch_add(1, Ordering::Relaxed) + 1 == all {
            let backend = module.rsplit("::").next().unwrap_or(module);
            let line = format!("contract {backend}: {all} cases\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    }
}
