//! A device stream: kernels that run in order on a thread of their own, while the host that has queued
//! them is already somewhere else.

use std::sync::mpsc;
use std::thread::JoinHandle;

use kvgate_kvcache::{Component, LayerId};
use kvgate_transfer::sync::{Arc, Condvar, Mutex};

use super::patience;

/// Closed until the test opens it or is over: what stands for "takes six seconds".
#[derive(Default)]
pub struct Gate(Arc<Door>);

#[derive(Default)]
struct Door {
    is_open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.0.is_open.lock() = true;
        self.0.changed.notify_all();
    }
}

/// A test that fails lets its stream go on, so that it can be joined.
impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

impl Door {
    fn pass(&self) {
        let mut is_open = self.is_open.lock();
        let deadline = patience();
        while !*is_open {
            assert!(!deadline.has_passed(), "nobody opens the gate");
            self.changed.wait_until(&mut is_open, deadline.instant());
        }
    }
}

/// How long each copy and each kernel takes, by layer and component. No clock: a number of turns that
/// other threads get first.
#[derive(Clone, Copy)]
pub struct Delays {
    seed: u64,
}

impl Delays {
    pub fn new(seed: u64) -> Delays {
        Delays { seed }
    }

    pub fn pause(self, layer: LayerId, component: Component) {
        let place = u64::from(layer.0) * 64 + component.index() as u64;
        let mixed = (self.seed ^ place.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..(mixed >> 61) {
            std::thread::yield_now();
        }
    }
}

type Kernel = Box<dyn FnOnce() + Send>;

/// The queue and its thread. Dropped, it runs what is queued to the end.
pub struct Stream {
    queue: Option<mpsc::Sender<Kernel>>,
    thread: Option<JoinHandle<()>>,
}

/// What a kernel answers, once it has run.
pub struct Answer<T>(mpsc::Receiver<T>);

impl<T> Answer<T> {
    /// Waits for the kernel and takes what it says.
    pub fn wait(self) -> T {
        let left = patience().remaining();
        self.0.recv_timeout(left).expect("the kernel runs")
    }
}

impl Stream {
    pub fn new() -> Stream {
        let (queue, kernels) = mpsc::channel::<Kernel>();
        let thread = std::thread::spawn(move || kernels.into_iter().for_each(|kernel| kernel()));
        Stream {
            queue: Some(queue),
            thread: Some(thread),
        }
    }

    /// Queues a kernel. The caller goes on at once.
    pub fn launch<T: Send + 'static>(
        &self,
        kernel: impl FnOnce() -> T + Send + 'static,
    ) -> Answer<T> {
        let (tell, answer) = mpsc::channel();
        let kernel = move || drop(tell.send(kernel()));
        let queue = self.queue.as_ref().unwrap();
        queue.send(Box::new(kernel)).expect("the stream runs");
        Answer(answer)
    }

    /// Everything queued from now on runs behind the gate.
    pub fn hold(&self, gate: &Gate) {
        let door = gate.0.clone();
        drop(self.launch(move || door.pass()));
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a kernel has failed");
        }
    }
}
