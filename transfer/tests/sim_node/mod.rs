//! What the simulated worlds have in common: an agent with one pool, and rows of seeds.

#![allow(
    unreachable_pub,
    reason = "this module belongs to several test programs"
)]

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvgate_transfer::{Agent, Memory, MemoryRegion, PoolGeometry, sim::SimNet, sync::Arc};

/// Bytes of a slot.
pub const SLOT_BYTES: usize = 64;

/// An agent, and the one pool that it has registered.
pub struct Node {
    pub agent: Agent,
    pub region: MemoryRegion,
    memory: Arc<Memory>,
    slot_count: u32,
}

impl Node {
    pub fn new(net: &SimNet, name: &str, slot_count: u32) -> Self {
        let agent = net.agent(name).build().unwrap();
        let memory = Arc::new(Memory::host(SLOT_BYTES as u64 * u64::from(slot_count)).unwrap());
        let pool = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: SLOT_BYTES as u64,
            slot_bytes: SLOT_BYTES as u64,
            slot_count,
        };
        let region = agent.register(memory.clone(), &[pool]).unwrap();
        Self {
            agent,
            region,
            memory,
            slot_count,
        }
    }

    fn at(&self, slot: u32) -> *mut [u8; SLOT_BYTES] {
        assert!(slot < self.slot_count);
        let offset = slot as usize * SLOT_BYTES;
        self.memory.base_ptr().wrapping_add(offset).cast()
    }

    pub fn read(&self, slot: u32) -> [u8; SLOT_BYTES] {
        // SAFETY: I-16: a slot of the memory; one thread.
        unsafe { self.at(slot).read() }
    }

    pub fn fill(&self, slot: u32, bytes: [u8; SLOT_BYTES]) {
        // SAFETY: I-16: a slot of the memory; one thread.
        unsafe { self.at(slot).write(bytes) };
    }
}

/// A seed that broke something, with what.
pub type Violation = (u64, String);

/// What `world` shows with this seed, or the first thing that was wrong.
pub fn attempt<T>(seed: u64, world: impl FnOnce() -> T) -> Result<T, Violation> {
    catch_unwind(AssertUnwindSafe(world)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|t| (*t).to_owned()));
        (seed, text.unwrap_or_default())
    })
}

/// `KVGATE_SIM_SEEDS` seeds from `KVGATE_SIM_SEED` on, for `cargo xtask sim`.
pub fn run_asked_seeds(run: impl FnOnce(Range<u64>) -> Vec<Violation>) {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let count = number("KVGATE_SIM_SEEDS").unwrap_or(10);
    let first = number("KVGATE_SIM_SEED").unwrap_or(1_000);
    let violations = run(first..first + count);
    for (seed, what) in &violations {
        println!(
            "sim: violation seed={seed} {}",
            what.lines().next().unwrap_or_default()
        );
    }
    println!("sim: {count} seeds, {} violations", violations.len());
    assert!(violations.is_empty());
}
