//! Posting a move layer by layer, the first one at once and the others behind the back of whoever asked.

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{BlockTable, LayerId, PoolSet, PostTarget, PrefixLease, Room, TransferPlan};
use kvgate_transfer::sync::Arc;
#[cfg(not(kv_loom))]
use kvgate_transfer::sync::thread;
use kvgate_transfer::{
    Agent, Barrier, Cause, Deadline, Incarnation, Op, PeerId, PoolId, PostOptions, Priority,
    StageSel, TransferHandle,
};

use super::posts::Posts;
#[cfg(not(kv_loom))]
use crate::storage::{Queue, contained};

/// The layers of a move that are to be posted.
pub(super) struct PostJob {
    pub(super) agent: Agent,
    pub(super) pools: PoolSet,
    pub(super) plan: TransferPlan,
    /// The source stays while this lives, and each operation has a pin of its own.
    pub(super) pin: Arc<PrefixLease>,
    pub(super) to: PeerId,
    pub(super) incarnation: Incarnation,
    pub(super) remote_pools: Vec<PoolId>,
    pub(super) table: BlockTable,
    pub(super) barrier: Arc<Barrier>,
    pub(super) room: Room,
    pub(super) priority: Priority,
    pub(super) posts: Arc<Posts<TransferHandle>>,
    pub(super) next: LayerId,
}

impl PostJob {
    /// Posts the next layer, if there is one and somebody wants it. Answers whether there is another one.
    ///
    /// # Errors
    /// The cache or the engine refused.
    pub(super) fn step(&mut self) -> Result<bool, kvgate_kvcache::Error> {
        let layer = self.next;
        if layer.0 >= self.pools.schema().layer_count() || !self.posts.is_wanted() {
            return Ok(false);
        }
        let target = PostTarget {
            incarnation: self.incarnation,
            pools: &self.remote_pools,
            table: &self.table,
            epoch: self.barrier.epoch(),
            room: self.room,
            verify: VerifyMode::Off,
        };
        let (pools, pin) = (&self.pools, &self.pin);
        // The source is ready; its gate is asked all the same, it is what gives the witness.
        let piece = self
            .plan
            .post_prefix(pools, pin, layer, Deadline::after_ms(0), &target)?;
        let (here, there) = piece.descriptors();
        let transfer = self.agent.prepare(Op::Write, &here, &there, self.to)?;
        let options = PostOptions {
            arrival: Some(piece.arrival),
            // The pin moves into the operation and ends when that is terminal (I-13).
            keepalive: Some(Box::new(piece.keepalive)),
            priority: self.priority,
            ..PostOptions::default()
        };
        let posted = self.agent.post(&transfer, piece.source, options);
        let handle = Arc::new(posted.map_err(|refused| refused.error)?);
        if !self.posts.push(&handle) {
            handle.cancel();
        }
        self.next = LayerId(layer.0 + 1);
        Ok(true)
    }

    /// Posts what is left, in order. What cannot be posted fails the gates of the move: whoever waits for a layer learns
    /// it at once.
    pub(super) fn run(mut self) {
        loop {
            match self.step() {
                Ok(true) => {}
                Ok(false) => return self.end(Ok(())),
                Err(error) => return self.give_up(Cause::Transfer(error.to_string())),
            }
        }
    }

    /// Posts nothing more.
    pub(super) fn give_up(self, cause: Cause) {
        self.barrier.fail(StageSel::All, cause.clone());
        self.end(Err(cause));
    }

    /// The pin first: whoever sees that it is over finds the source as free as it is.
    fn end(self, end: Result<(), Cause>) {
        let posts = Arc::clone(&self.posts);
        drop(self);
        posts.finish(end);
    }
}

/// Moves whose first layer was posted, and that may wait for the thread that posts the others.
#[cfg(not(kv_loom))]
const WAITING_LIMIT: usize = 64;

/// The thread that posts the layers of moves behind the first one. Dropped, it ends; what it has not begun is given up.
#[cfg(not(kv_loom))]
pub(crate) struct Poster {
    queue: Arc<Queue<PostJob>>,
    /// `None` where no thread could be had: whoever begins a move posts all of it.
    worker: Option<thread::JoinHandle<()>>,
}

#[cfg(not(kv_loom))]
impl Poster {
    pub(crate) fn start() -> Poster {
        let queue = Arc::new(Queue::<PostJob>::new(WAITING_LIMIT));
        let jobs = Arc::clone(&queue);
        let work = move || {
            while let Some((job, running)) = jobs.pop() {
                let (barrier, posts) = (Arc::clone(&job.barrier), Arc::clone(&job.posts));
                // Its pin has ended by then, as on any way out; who waits for the move must not wait for nobody.
                if contained(|| job.run()).is_none() {
                    let cause = Cause::Transfer("the thread that posts has panicked".to_owned());
                    barrier.fail(StageSel::All, cause.clone());
                    posts.finish(Err(cause));
                }
                drop(running);
            }
        };
        let worker = thread::Builder::new().name("kvgate post".to_owned());
        Poster {
            queue,
            worker: worker.spawn(work).ok(),
        }
    }

    /// Has the rest of a move posted. Never waits.
    pub(super) fn post(&self, job: PostJob) {
        let refused = match &self.worker {
            Some(_) => self.queue.push(job).err(),
            None => Some(job),
        };
        if let Some(job) = refused {
            job.run();
        }
    }
}

#[cfg(not(kv_loom))]
impl Drop for Poster {
    fn drop(&mut self) {
        for job in self.queue.close() {
            job.give_up(Cause::Shutdown);
        }
        // It waits for nothing but the queue.
        let _has_ended = self.worker.take().map(thread::JoinHandle::join);
    }
}

#[cfg(not(kv_loom))]
impl std::fmt::Debug for Poster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poster")
            .field("counts", &self.queue.counts())
            .finish()
    }
}

/// In a model whoever begins a move posts all of it.
#[cfg(kv_loom)]
#[derive(Debug)]
pub(crate) struct Poster;

#[cfg(kv_loom)]
impl Poster {
    pub(crate) fn start() -> Poster {
        Poster
    }

    pub(super) fn post(&self, job: PostJob) {
        job.run();
    }
}
