//! One idea: a layer is read through its gate, and the gate opens when every component of the layer has
//! landed, not before.
//!
//! The writer sends layer after layer, the last one only when the reader has used the others. The reader
//! asks for each layer and gets a proof; without it there is no address.

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{
    BlockTable, CacheSchema, Component, Formats, LayerId, MemoryKind, PoolConfig, PoolSet,
    PostTarget, Room, TransferPlan, V4Geometry, WriterLayers,
};
use kvgate_transfer::{Agent, Deadline, Epoch, Op, PeerId, PostOptions, WriterRank};

const TOKENS: u32 = 300;
const EPOCH: Epoch = Epoch(1);
const ROOM: Room = Room(1);

fn main() -> Result<(), Box<dyn Error>> {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128],
        ..V4Geometry::flash()
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &Formats::default())?);
    let config = PoolConfig {
        pages: 4,
        windows: 4,
        requests: 2,
        memory: MemoryKind::Host,
    };
    let (source, target) = (
        PoolSet::new(Arc::clone(&schema), config)?,
        PoolSet::new(Arc::clone(&schema), config)?,
    );
    let (writer, reader) = (
        Agent::builder("writer").build()?,
        Agent::builder("reader").build()?,
    );
    source.register(&writer)?;
    target.register(&reader)?;
    let (to_reader, from_writer) = Agent::connect_local(&writer, &reader)?;

    let rank = WriterRank(0);
    let layers = WriterLayers {
        rank,
        layers: 0..schema.layer_count(),
    };
    let plan = TransferPlan::compile(Arc::clone(&schema), TOKENS, vec![TOKENS], vec![layers])?;
    let slots = target.reserve(TOKENS, ROOM)?;
    let mut flight = slots
        .into_inflight(&plan, EPOCH, &[(from_writer, rank)])
        .map_err(|refused| refused.1)?;
    flight.arm(&reader, None)?;
    let lease = flight.lease()?;
    let table = flight.block_table().clone();

    let closed = lease
        .layer(LayerId(0), Deadline::after_ms(1))
        .err()
        .ok_or("nothing was sent yet")?;
    println!("before the first byte: {closed}");

    // The reader says which layer it has used; the writer does not run ahead by more than one layer.
    let (used, was_used) = mpsc::channel::<LayerId>();
    let sender = thread::spawn(move || send(&writer, to_reader, &source, &plan, &table, &was_used));
    for layer in schema.layers() {
        let ready = lease.layer(layer, Deadline::after_ms(5_000))?;
        let window = ready
            .view()
            .component(Component::SwaLatent)
            .ok_or("every layer has a window")?;
        let mut row = vec![0; window.row_image_bytes()];
        window.read_row(TOKENS - 1, &mut row);
        assert!(row.iter().all(|&byte| u16::from(byte) == layer.0 + 1));
        println!(
            "layer {layer} is ready, its last window row holds {}",
            layer.0 + 1
        );
        let next = LayerId(layer.0 + 1);
        if next.0 < schema.layer_count() {
            assert!(
                lease.layer(next, Deadline::after_ms(1)).is_err(),
                "layer {next} was not sent yet"
            );
        }
        used.send(layer)?;
    }
    sender.join().map_err(|_| "the writer has panicked")??;
    drop(lease);
    flight
        .close()
        .wait(Deadline::after_ms(5_000))
        .map_err(|_| "somebody may still write")?;
    assert_eq!(target.stats().pages.free, config.pages);
    Ok(())
}

/// Writes and sends one layer, then waits until it has been used.
fn send(
    writer: &Agent,
    peer: PeerId,
    source: &PoolSet,
    plan: &TransferPlan,
    table: &BlockTable,
    was_used: &mpsc::Receiver<LayerId>,
) -> Result<(), String> {
    let mut lease = source
        .reserve(TOKENS, ROOM)
        .map_err(|error| error.to_string())?;
    let info = writer.peer(peer).ok_or("the reader is gone")?;
    let pools: Vec<_> = info.pools.iter().map(|pool| pool.pool).collect();
    for layer in source.schema().layers() {
        let view = lease.layer_mut(layer).map_err(|error| error.to_string())?;
        let mut window = view
            .component(Component::SwaLatent)
            .ok_or("every layer has a window")?;
        let image = vec![layer.0 as u8 + 1; window.row_image_bytes()];
        window
            .write_row(TOKENS - 1, &image)
            .map_err(|error| error.to_string())?;
        // The witness: without it there is no post.
        let written = lease
            .commit_layer(layer, 0..TOKENS)
            .map_err(|error| error.to_string())?;
        let target = PostTarget {
            incarnation: info.incarnation,
            pools: &pools,
            table,
            epoch: EPOCH,
            room: ROOM,
            verify: VerifyMode::Canary,
        };
        let post = plan
            .post(source, 0, &written, &target)
            .map_err(|error| error.to_string())?;
        let (here, there) = post.descriptors();
        let transfer = writer
            .prepare(Op::Write, &here, &there, peer)
            .map_err(|error| error.to_string())?;
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(lease.ledger().clone()),
            ..PostOptions::default()
        };
        let _handle = writer
            .post(&transfer, post.source, options)
            .map_err(|refused| refused.error.to_string())?;
        was_used.recv().map_err(|error| error.to_string())?;
    }
    Ok(())
}
