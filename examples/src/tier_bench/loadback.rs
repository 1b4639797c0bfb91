//! Loading a prefix of Flash pages from the host tier back into the device pool.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvgate_hicache::cache::Origin;
use kvgate_hicache::host::{HostConfig, host_side};
use kvgate_hicache::policy::Lru;
use kvgate_hicache::record::crc::copy_crc32c;
use kvgate_hicache::{Hicache, Side as TierSide};
use kvgate_kvcache::canary::provenance_of;
use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{
    BlockTable, CacheSchema, Formats, LayerId, MemoryKind, PoolConfig, PoolSet, PrefixTree, Room,
    TransferPlan, V4Geometry, WriteLease, WriterLayers,
};
use kvgate_transfer::{Agent, WriterRank};

use super::bare::{Side, alternate, median};
use super::measure::{COPY_CRC, failed, soon};
use super::row::Row;
use super::{Args, Verify};
use crate::bench::copy::Copy;
use crate::handoff::failure::Failure;
use crate::handoff::model::cache_failure;

/// Longest prefix that is loaded.
const TOKENS_LIMIT: u32 = 16_384;
/// Window slots beyond what the one checkpoint takes.
const SPARE_WINDOWS: u32 = 4;

/// A device pool and a host tier that hold one prefix.
struct World {
    cache: Hicache,
    schema: Arc<CacheSchema>,
    prompt: Vec<u32>,
    plan: TransferPlan,
    /// Where the prefix was when it was computed.
    first_table: BlockTable,
    /// Checksums of its pages, layer by layer.
    checksums: Vec<Vec<u32>>,
}

/// Loads of a prefix, whole, beside plain copies of the same pages, or copies with a checksum when every page is
/// compared with its checksum before its layer counts as readable.
pub(super) fn run(args: &Args, verify: Verify) -> Result<Row, Failure> {
    let world = World::new(args)?;
    let shares = Cell::new(Vec::new());
    let bad = Cell::new(0);
    let load = |_: u64, times: &mut Vec<Duration>| {
        let (first, all, wrong) = world.load(verify)?;
        times.push(all);
        bad.set(bad.get() + wrong);
        let mut seen = shares.take();
        seen.push(first.as_secs_f64() / all.as_secs_f64());
        shares.set(seen);
        Ok(())
    };
    let new_copy = || {
        let table = &world.first_table;
        Copy::new(&world.schema, &world.plan, table, table, 0)
    };
    let mut copy = new_copy();
    let bytes = copy.bytes();
    let mut plain = new_copy();
    let with_crc = |_: u64, _: &mut Vec<Duration>| {
        copy.run_with(|to, from| {
            std::hint::black_box(copy_crc32c(to, from));
        });
        Ok(())
    };
    let without = |_: u64, _: &mut Vec<Duration>| {
        plain.run();
        Ok(())
    };
    let mut bares = vec![
        Side::new("memcpy", 1, without),
        Side::new(COPY_CRC, 1, with_crc),
    ];
    if verify == Verify::On {
        bares.reverse();
    }
    let tier = Side::new("", 1, load).before(|| make_cold(&world.cache, world.tokens()));
    let figures = alternate(bytes, args.time(), tier, bares)?;
    let mut row = Row::new(args, "host", "loadback", &figures);
    row.block_bytes = bytes / u64::from(world.tokens() / PAGE_TOKENS);
    row.tokens = Some(world.tokens());
    row.verify = verify.id();
    row.first_layer_share = Some(median(&mut shares.take()));
    row.bad_blocks = bad.get() + world.count_bad()?;
    Ok(row)
}

impl World {
    fn new(args: &Args) -> Result<World, Failure> {
        let schema = CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default())
            .map_err(|error| cache_failure(&error))?;
        let schema = Arc::new(schema);
        let page_bytes = schema.slot_bytes(kvgate_kvcache::Space::Page);
        let pages = (args.working_set / 4 / page_bytes).max(1) as u32;
        let tokens = (pages * PAGE_TOKENS).min(TOKENS_LIMIT);
        let cache = connect(&schema, tokens).map_err(|error| cache_failure(&error))?;
        let writers = vec![WriterLayers {
            rank: WriterRank(0),
            layers: 0..schema.layer_count(),
        }];
        let plan = TransferPlan::compile_from(schema.clone(), 0, tokens, vec![tokens], writers)
            .map_err(|error| cache_failure(&error))?;
        let prompt: Vec<u32> = (0..tokens).collect();
        let first_table = compute(&cache, &prompt)?;
        let mut world = World {
            checksums: Vec::new(),
            cache,
            schema,
            prompt,
            plan,
            first_table,
        };
        let pools = world.cache.device().pools();
        let layers = world.schema.layers();
        let sums = layers.map(|layer| world.checksums(pools, &world.first_table, layer));
        world.checksums = sums.collect();
        world
            .cache
            .backup(&world.prompt)
            .map_err(|error| cache_failure(&error))?;
        match world.cache.wait(soon()) {
            true => Ok(world),
            false => Err(failed("backup", &"it does not end")),
        }
    }

    fn tokens(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// Checksums of the live rows of every page of a layer, as the prefix has them there.
    fn checksums(&self, pools: &PoolSet, table: &BlockTable, layer: LayerId) -> Vec<u32> {
        let mut sums = Vec::new();
        for planned in self.plan.chunks(layer) {
            let Some(row) = self.schema.rows().get(planned.pool.index()) else {
                continue;
            };
            let ordinals = planned.ordinals;
            let notes = provenance_of(pools, row, table, table, Room(0), self.tokens(), ordinals);
            sums.extend(notes.iter().map(|note| note.checksum));
        }
        sums
    }

    /// One load: until the first layer can be read, until all can, and pages that are wrong.
    fn load(&self, verify: Verify) -> Result<(Duration, Duration, u64), Failure> {
        // A request has a token behind the prefix.
        let mut asked = self.prompt.clone();
        asked.push(0);
        let begun = Instant::now();
        let found = self.cache.lookup(&asked);
        let found = found.filter(|found| found.tokens == self.tokens());
        let found = found.ok_or_else(|| {
            let text = format!(
                "the prefix is not in the host tier: {:?}",
                self.cache.counts()
            );
            failed("lookup", &text)
        })?;
        if found.origin != Origin::Host {
            return Err(failed("lookup", &"the device pool had it still"));
        }
        let (mut first, mut bad) = (None, 0);
        for layer in self.schema.layers() {
            let ready = found.lease.layer(layer, soon());
            let _can_be_read = ready.map_err(|error| cache_failure(&error))?;
            if verify == Verify::On {
                bad += self.wrong_pages(found.lease.block_table(), layer);
            }
            first.get_or_insert_with(|| begun.elapsed());
        }
        let all = begun.elapsed();
        drop(found);
        match self.cache.wait(soon()) {
            true => Ok((first.unwrap_or(all), all, bad)),
            false => Err(failed("load", &"it does not end")),
        }
    }

    fn wrong_pages(&self, table: &BlockTable, layer: LayerId) -> u64 {
        let found = self.checksums(self.cache.device().pools(), table, layer);
        let expected = &self.checksums[layer.index()];
        if found.len() != expected.len() {
            return expected.len() as u64;
        }
        found.iter().zip(expected).filter(|(a, b)| a != b).count() as u64
    }

    /// Pages of one more load that are not what was computed.
    fn count_bad(&self) -> Result<u64, Failure> {
        make_cold(&self.cache, self.tokens())?;
        Ok(self.load(Verify::On)?.2)
    }
}

/// The device pool has nothing any more, and has room for a prefix of so many tokens: what was given up comes free when
/// nothing touches it any more.
pub(super) fn make_cold(cache: &Hicache, tokens: u32) -> Result<(), Failure> {
    let device = cache.device();
    let windows = device.pools().schema().boundary_windows(tokens).len() as u32;
    let deadline = soon();
    device.tree().evict(u32::MAX);
    while !device.make_room(tokens / PAGE_TOKENS, windows) {
        if deadline.has_passed() {
            let stats = device.pools().stats();
            return Err(failed("evict", &format!("no room: {stats:?}")));
        }
        device.pools().sweep();
        std::thread::yield_now();
    }
    match device.tree().page_counts() {
        (0, 0) => Ok(()),
        left => Err(failed("evict", &format!("pages are left: {left:?}"))),
    }
}

pub(super) fn connect(
    schema: &Arc<CacheSchema>,
    tokens: u32,
) -> Result<Hicache, kvgate_kvcache::Error> {
    let pages = tokens / PAGE_TOKENS;
    let request = schema.slots_for(tokens);
    let end = schema.boundary_windows(tokens).len() as u32;
    let namespace = Namespace::new(schema, PAGE_TOKENS, b"")?;
    let agent = Agent::builder("device").build()?;
    let config = PoolConfig {
        pages: pages + 1,
        windows: request.of(kvgate_kvcache::Space::Window) + end + SPARE_WINDOWS,
        requests: 1,
        memory: MemoryKind::Host,
    };
    let pools = PoolSet::new(schema.clone(), config)?;
    pools.register(&agent)?;
    let tree = PrefixTree::in_namespace(&pools, namespace.clone(), Box::<Lru>::default())?;
    let device = TierSide::new(&agent, &pools, tree)?;
    let host = HostConfig {
        pages: pages + 1,
        checkpoints: 2,
        memory: MemoryKind::Host,
        policy: None,
    };
    let host = host_side(schema, namespace, host)?;
    let (to_host, to_device) = Agent::connect_local(device.agent(), host.agent())?;
    Hicache::over(device, host, to_host, to_device)
}

/// Fills every row that lives at the end of the prompt, and publishes it. Answers where the prefix lies.
fn compute(cache: &Hicache, prompt: &[u32]) -> Result<BlockTable, Failure> {
    let pools = cache.device().pools();
    let end = prompt.len() as u32;
    let fill = || -> Result<(), kvgate_kvcache::Error> {
        let mut lease = pools.reserve(end, Room(0))?;
        let mut checkpoint = pools.reserve_checkpoint(end, Room(0))?;
        let mut written = Vec::new();
        for layer in pools.schema().layers() {
            fill_layer(&mut lease, pools.schema(), layer, end)?;
            written.push(lease.commit_layer(layer, 0..end)?);
            checkpoint.save_layer(layer, &lease)?;
        }
        let checkpoint = Some(checkpoint.finish()?);
        let tree = cache.device().tree();
        tree.publish(prompt, &mut lease, &written, checkpoint)?;
        Ok(())
    };
    fill().map_err(|error| cache_failure(&error))?;
    let mut asked = prompt.to_vec();
    asked.push(0);
    match cache.lookup(&asked) {
        Some(found) if found.tokens == end => Ok(found.lease.block_table().clone()),
        _ => Err(failed(
            "publish",
            &"the device pool does not have the prefix",
        )),
    }
}

fn fill_layer(
    lease: &mut WriteLease,
    schema: &CacheSchema,
    layer: LayerId,
    end: u32,
) -> Result<(), kvgate_kvcache::Error> {
    let view = lease.layer_mut(layer)?;
    for row in schema.rows_of(layer) {
        let Some(mut rows) = view.component(row.component) else {
            continue;
        };
        let mut image = vec![0; rows.row_image_bytes()];
        for entry in row.live_entries(end, schema.geometry().window_tokens) {
            let seed = entry.wrapping_mul(31).wrapping_add(u32::from(layer.0) * 7);
            for (byte, value) in image.iter_mut().zip(seed..) {
                *byte = value as u8;
            }
            rows.write_row(entry, &image)?;
        }
    }
    Ok(())
}
