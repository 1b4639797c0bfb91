//! A host in the small: processes with pools, connections between them, writers by rank, requests, and a
//! device stream with slow kernels. Everything in it is production code but the stream and the rows.
//!
//! [`Net::Sim`] is a network on a virtual clock: nothing happens outside `step` and `run`, so a test holds
//! a write back by not letting time pass. [`Net::Local`] and [`Net::Tcp`] have threads; there a test holds
//! things back with a [`stream::Gate`].
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

pub mod rows;
pub mod stream;

use std::ops::Range;

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::*;
use kvgate_transfer::sim::SimNet;
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, Cause, Deadline, DescriptorList, Epoch, Incarnation, Op,
    PeerId, PoolId, PostOptions, Side, SourceReady, TransferHandle, WriterRank,
};

use crate::common::schema_of;

/// Long enough for a busy machine; nothing waits for it to pass.
pub fn patience() -> Deadline {
    Deadline::after_ms(20_000)
}

/// The seeds of a scenario. `KVGATE_SEED=S` runs one of them alone.
pub fn seeds(count: u64) -> Vec<u64> {
    let given = std::env::var("KVGATE_SEED").ok();
    let one = given.and_then(|text| text.parse().ok());
    one.map_or_else(|| (1..=count).collect(), |seed| vec![seed])
}

pub fn cancelled() -> Cause {
    Cause::Aborted {
        by: Side::Local,
        reason: "cancelled".to_owned(),
    }
}

/// What the processes of a test have in common.
#[derive(Clone)]
pub struct Shape {
    /// Compression ratio of each layer.
    pub ratios: Vec<u32>,
    pub drafting: bool,
    pub pages: u32,
    pub windows: u32,
    pub requests: u32,
}

impl Shape {
    pub fn of(ratios: &[u32], pages: u32) -> Shape {
        Shape {
            ratios: ratios.to_vec(),
            drafting: false,
            pages,
            windows: 8,
            requests: 4,
        }
    }

    pub fn schema(&self) -> Arc<CacheSchema> {
        schema_of(self.ratios.clone(), self.drafting)
    }
}

/// One process. A clone is another handle of it.
#[derive(Clone)]
pub struct Node {
    pub agent: Agent,
    pub pools: PoolSet,
}

impl Node {
    pub fn new(net: &Net, name: &str, shape: &Shape) -> Node {
        let builder = match net {
            Net::Sim(sim) => sim.agent(name),
            Net::Local | Net::Tcp => Agent::builder(name),
        };
        let agent = builder.build().unwrap();
        let config = PoolConfig {
            pages: shape.pages,
            windows: shape.windows,
            requests: shape.requests,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(shape.schema(), config).unwrap();
        pools.register(&agent).unwrap();
        Node { agent, pools }
    }

    /// What this process knows of another one: its life and its pools.
    pub fn knows(&self, peer: PeerId) -> (Incarnation, Vec<PoolId>) {
        let info = self.agent.peer(peer).unwrap();
        let pools = info.pools.iter().map(|pool| pool.pool).collect();
        (info.incarnation, pools)
    }

    /// Waits for an event that `wanted` takes.
    pub fn event<T>(&self, wanted: impl Fn(&AgentEvent) -> Option<T>) -> T {
        let deadline = patience();
        loop {
            let event = self.agent.next_event(deadline).expect("the event comes");
            if let Some(found) = wanted(&event) {
                return found;
            }
        }
    }

    pub fn listen(&self, address: &Address) -> Address {
        self.agent.listen(address).unwrap()
    }
}

/// What carries the bytes.
pub enum Net {
    Sim(SimNet),
    Local,
    Tcp,
}

impl Net {
    /// Connects two processes: the number of `b` at `a`, and of `a` at `b`.
    pub fn connect(&self, a: &Node, b: &Node) -> (PeerId, PeerId) {
        match self {
            Net::Sim(sim) => sim.connect(&a.agent, &b.agent).unwrap(),
            Net::Local => Agent::connect_local(&a.agent, &b.agent).unwrap(),
            Net::Tcp => {
                let address = b.listen(&any_port());
                connect_to(a, &address, b)
            }
        }
    }

    /// Lets up to `count` things happen.
    pub fn steps(&self, count: u64) {
        if let Net::Sim(sim) = self {
            for _ in 0..count {
                sim.step();
            }
        }
    }

    /// Lets everything happen that is under way. Networks with threads are waited for by their handles.
    pub fn run(&self) {
        if let Net::Sim(sim) = self {
            sim.run_until_idle();
        }
    }

    pub fn sim(&self) -> &SimNet {
        match self {
            Net::Sim(sim) => sim,
            Net::Local | Net::Tcp => panic!("this network has no clock of its own"),
        }
    }
}

pub fn any_port() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

/// Connects `a` to `b`, which listens there.
pub fn connect_to(a: &Node, address: &Address, b: &Node) -> (PeerId, PeerId) {
    let to_b = a.agent.connect(address, patience()).unwrap();
    let to_a = b.event(|event| match event {
        AgentEvent::PeerUp { peer } => Some(*peer),
        _ => None,
    });
    (to_b, to_a)
}

/// One try of one request. `content` tells its rows from those of every other one.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub room: Room,
    pub tokens: u32,
    pub content: u32,
}

impl Request {
    pub fn new(number: u32, tokens: u32) -> Request {
        Request {
            room: Room(number.into()),
            tokens,
            content: number,
        }
    }
}

/// Where the rows of a flight go.
pub struct Target {
    pub table: BlockTable,
    pub epoch: Epoch,
    pub room: Room,
}

impl Target {
    pub fn of(flight: &InFlight) -> Target {
        Target {
            table: flight.block_table().clone(),
            epoch: flight.barrier().epoch(),
            room: flight.room(),
        }
    }
}

/// One operation that has not been posted.
pub struct Piece {
    pub layer: LayerId,
    /// The first of its components.
    pub component: Component,
    local: DescriptorList,
    remote: DescriptorList,
    source: SourceReady,
    arrival: Arrival,
    keepalive: SourceLease,
}

/// A sending process: its rank, its layers, and the connection between it and the receiver.
pub struct Writer {
    pub node: Node,
    pub rank: WriterRank,
    pub layers: Range<u16>,
    pub to_receiver: PeerId,
    pub at_receiver: PeerId,
}

impl Writer {
    pub fn new(net: &Net, shape: &Shape, receiver: &Node, rank: u16, layers: Range<u16>) -> Writer {
        let node = Node::new(net, &format!("prefill-{rank}"), shape);
        let (to_receiver, at_receiver) = net.connect(&node, receiver);
        Writer {
            node,
            rank: WriterRank(rank),
            layers,
            to_receiver,
            at_receiver,
        }
    }

    fn post(
        &self,
        plan: &TransferPlan,
        segment: u32,
        written: &WrittenLayer,
        to: &Target,
    ) -> Result<KvPost, Error> {
        let (incarnation, pools) = self.node.knows(self.to_receiver);
        let target = PostTarget {
            incarnation,
            pools: &pools,
            table: &to.table,
            epoch: to.epoch,
            room: to.room,
            verify: VerifyMode::Off,
        };
        plan.post(&self.node.pools, segment, written, &target)
    }

    /// What one segment adds to a layer, as one operation. `None` when that is nothing.
    pub fn whole(
        &self,
        plan: &TransferPlan,
        segment: u32,
        written: &WrittenLayer,
        to: &Target,
    ) -> Result<Option<Piece>, Error> {
        let post = self.post(plan, segment, written, to)?;
        let (local, remote) = post.descriptors();
        let first = post.moves.first();
        let component = first.map(|first| self.component_of(first.pool));
        Ok(component.map(|component| Piece {
            layer: written.layer(),
            component,
            local,
            remote,
            source: post.source,
            arrival: post.arrival,
            keepalive: post.keepalive,
        }))
    }

    /// The same as one operation per component, each with a completion of its own.
    pub fn pieces(
        &self,
        plan: &TransferPlan,
        segment: u32,
        written: &WrittenLayer,
        to: &Target,
    ) -> Vec<Piece> {
        let (incarnation, theirs) = self.node.knows(self.to_receiver);
        let ours = self.node.pools.pool_ids().unwrap();
        let count = self.post(plan, segment, written, to).unwrap().moves.len();
        let piece = |index: usize| {
            // A witness is for one operation, so each comes from a post of its own.
            let post = self.post(plan, segment, written, to).unwrap();
            let pages = &post.moves[index];
            let mut local = DescriptorList::new();
            let mut remote = DescriptorList::remote(incarnation);
            local.push(ours[pages.pool.index()], &pages.from);
            remote.push(theirs[pages.pool.index()], &pages.to);
            Piece {
                layer: written.layer(),
                component: self.component_of(pages.pool),
                local,
                remote,
                source: post.source,
                arrival: Arrival {
                    tickets: vec![post.arrival.tickets[index]],
                    ..post.arrival
                },
                keepalive: post.keepalive,
            }
        };
        (0..count).map(piece).collect()
    }

    pub fn send(&self, piece: Piece) -> TransferHandle {
        let agent = &self.node.agent;
        let transfer = agent
            .prepare(Op::Write, &piece.local, &piece.remote, self.to_receiver)
            .unwrap();
        let options = PostOptions {
            arrival: Some(piece.arrival),
            keepalive: Some(Box::new(piece.keepalive)),
            ..PostOptions::default()
        };
        agent.post(&transfer, piece.source, options).unwrap()
    }

    fn component_of(&self, pool: PoolIndex) -> Component {
        self.node.pools.schema().rows()[pool.index()].component
    }

    /// Computes every layer of this writer at once and sends it.
    pub fn deliver(
        &self,
        plan: &TransferPlan,
        request: Request,
        to: &Target,
    ) -> Vec<TransferHandle> {
        let (pools, tokens) = (&self.node.pools, request.tokens);
        let mut lease = pools.reserve(tokens, request.room).unwrap();
        let mut handles = Vec::new();
        for layer in self.layers.clone().map(LayerId) {
            rows::write(pools.schema(), &mut lease, layer, request, 0..tokens);
            let written = lease.commit_layer(layer, 0..tokens).unwrap();
            for segment in 0..plan.segment_ends().len() as u32 {
                let piece = self.whole(plan, segment, &written, to).unwrap();
                handles.extend(piece.map(|piece| self.send(piece)));
            }
        }
        handles
    }
}

/// A receiver and the writers that share the layers among them.
pub struct Host {
    pub net: Net,
    pub shape: Shape,
    pub receiver: Node,
    pub writers: Vec<Writer>,
}

impl Host {
    pub fn new(net: Net, shape: Shape, writer_count: u16) -> Host {
        let receiver = Node::new(&net, "decode", &shape);
        let layer_count = receiver.pools.schema().layer_count();
        let bound = |rank: u16| layer_count * rank / writer_count;
        // Writers have room for more, so that only the receiver is ever short of pages.
        let roomy = Shape {
            pages: shape.pages * 2,
            ..shape.clone()
        };
        let writer = |rank| {
            let layers = bound(rank)..bound(rank + 1);
            Writer::new(&net, &roomy, &receiver, rank, layers)
        };
        let writers = (0..writer_count).map(writer).collect();
        Host {
            net,
            shape,
            receiver,
            writers,
        }
    }

    pub fn layers(&self) -> Vec<LayerId> {
        self.receiver.pools.schema().layers().collect()
    }

    /// The plan of a prompt, in segments of a page.
    pub fn plan(&self, tokens: u32) -> TransferPlan {
        let ends = (1..).map(|page| page * 256);
        let mut ends: Vec<u32> = ends.take_while(|end| *end < tokens).collect();
        ends.push(tokens);
        let layers = |writer: &Writer| WriterLayers {
            rank: writer.rank,
            layers: writer.layers.clone(),
        };
        let writers = self.writers.iter().map(layers).collect();
        let schema = self.receiver.pools.schema().clone();
        TransferPlan::compile(schema, tokens, ends, writers).unwrap()
    }

    pub fn reserve(&self, request: Request) -> Result<WriteLease, Error> {
        self.receiver.pools.reserve(request.tokens, request.room)
    }

    /// Promises reserved slots to the writers and begins to count.
    pub fn arm(&self, lease: WriteLease, request: Request) -> InFlight {
        let epoch = lease.number();
        let writers: Vec<_> = self
            .writers
            .iter()
            .map(|writer| (writer.at_receiver, writer.rank))
            .collect();
        let flight = lease.into_inflight(&self.plan(request.tokens), epoch, &writers);
        let mut flight = flight.map_err(|refused| refused.1).unwrap();
        flight.arm(&self.receiver.agent, None).unwrap();
        flight
    }

    pub fn flight(&self, request: Request) -> InFlight {
        self.arm(self.reserve(request).unwrap(), request)
    }

    /// Every writer computes and posts its layers; nothing is waited for.
    pub fn post_all(&self, request: Request, flight: &InFlight) -> Vec<TransferHandle> {
        let (plan, to) = (self.plan(request.tokens), Target::of(flight));
        let deliver = |writer: &Writer| writer.deliver(&plan, request, &to);
        self.writers.iter().flat_map(deliver).collect()
    }

    /// A complete hand-off, read and compared.
    pub fn hand_over(&self, request: Request, flight: &InFlight) {
        let handles = self.post_all(request, flight);
        self.net.run();
        for handle in handles {
            let status = handle.wait(patience());
            assert!(
                matches!(status, kvgate_transfer::Status::Done(_)),
                "{status:?}"
            );
        }
        let lease = flight.lease().unwrap();
        for layer in self.layers() {
            let ready = lease.layer(layer, patience()).unwrap();
            let schema = self.receiver.pools.schema();
            assert_eq!(rows::foreign(schema, &ready.view(), request), None);
        }
    }
}
