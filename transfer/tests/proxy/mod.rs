//! A proxy in front of a listening socket that goes wrong on demand: it cuts, stops, closes one direction,
//! injects bytes or hands them on one by one. Faults fall after a given number of bytes, and a test waits
//! for them, so that nothing here depends on time.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};

/// Longest time that a test waits for a fault to fall.
const PATIENCE: Duration = Duration::from_secs(20);

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToListener,
    ToConnector,
}

pub(crate) const WAYS: [Way; 2] = [Way::ToListener, Way::ToConnector];

/// What happens when the bytes of its budget have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Both sockets are closed in both directions.
    Cut,
    /// The receiver of this way reads the end; the other way goes on.
    HalfClose,
    /// Nothing is handed on until [`Proxy::release`]; the sockets stay.
    Stop,
    /// The connector reads the end; the listener's socket stays as it is, and hears nothing any more.
    Abandon,
}

#[derive(Default)]
struct Lane {
    /// Bytes that still pass before the fault.
    armed: Option<(usize, Fault)>,
    has_fallen: bool,
    is_stopped: bool,
    /// Where this way of the current connection ends; written under the lock of the proxy only.
    sink: Option<TcpStream>,
    passed_bytes: u64,
}

#[derive(Default)]
struct State {
    lanes: [Lane; 2],
    is_bytewise: bool,
    is_closing: bool,
    /// Connections so far; faults fall on the last one.
    connection_count: u64,
    /// So many connections are closed as soon as they come.
    turned_away: u64,
    /// Listeners' ends of connections that were abandoned.
    abandoned: Vec<TcpStream>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Stands between one connector and one listener.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Waits for one connection and carries it to `target`.
    pub(crate) fn new(target: SocketAddr) -> Self {
        Self::with(target, 1)
    }

    /// Carries one connection after the other.
    pub(crate) fn lasting(target: SocketAddr) -> Self {
        Self::with(target, u64::MAX)
    }

    fn with(target: SocketAddr, most: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let carrier = shared.clone();
        let acceptor = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            for _ in 0..most {
                let (connector, _) = listener.accept().unwrap();
                {
                    let mut state = carrier.state.lock().unwrap();
                    if state.is_closing {
                        break;
                    }
                    if state.turned_away > 0 {
                        state.turned_away -= 1;
                        continue;
                    }
                }
                let Ok(listener) = TcpStream::connect(target) else {
                    continue;
                };
                pumps.extend(Shared::carry(&carrier, connector, listener));
            }
            drop(listener);
            pumps.into_iter().for_each(|pump| pump.join().unwrap());
        });
        Self {
            address,
            shared,
            acceptor: Some(acceptor),
        }
    }

    /// The next `count` connections are closed as soon as they come.
    pub(crate) fn turn_away(&self, count: u64) {
        self.shared.state.lock().unwrap().turned_away = count;
    }

    /// Connections that were carried so far.
    pub(crate) fn connection_count(&self) -> u64 {
        self.shared.state.lock().unwrap().connection_count
    }

    /// From here on every byte is a segment of its own.
    pub(crate) fn bytewise(&self) {
        self.shared.state.lock().unwrap().is_bytewise = true;
    }

    /// The fault falls when `after_bytes` more bytes have gone this way; with 0, before the next one.
    pub(crate) fn arm(&self, way: Way, after_bytes: usize, fault: Fault) {
        let mut state = self.shared.state.lock().unwrap();
        let lane = &mut state.lanes[way as usize];
        lane.armed = Some((after_bytes, fault));
        lane.has_fallen = false;
        lane.passed_bytes = 0;
    }

    /// Blocks until the armed fault of this way has fallen.
    pub(crate) fn await_fault(&self, way: Way) {
        self.await_lane(way, "the fault", |lane| lane.has_fallen);
    }

    /// Bytes that have gone this way since it was armed last.
    pub(crate) fn passed_bytes(&self, way: Way) -> u64 {
        self.shared.state.lock().unwrap().lanes[way as usize].passed_bytes
    }

    /// Lets a stopped way go on.
    pub(crate) fn release(&self, way: Way) {
        self.shared.state.lock().unwrap().lanes[way as usize].is_stopped = false;
        self.shared.changed.notify_all();
    }

    /// Hands on bytes that nobody sent.
    pub(crate) fn inject(&self, way: Way, bytes: &[u8]) {
        let mut state = self.shared.state.lock().unwrap();
        let sink = state.lanes[way as usize].sink.as_mut().unwrap();
        sink.write_all(bytes).unwrap();
    }

    /// What is going on now ends now, in both directions.
    pub(crate) fn cut(&self) {
        self.shared.state.lock().unwrap().cut();
        self.shared.changed.notify_all();
    }

    fn await_lane(&self, way: Way, what: &str, is_there: impl Fn(&Lane) -> bool) {
        let state = self.shared.state.lock().unwrap();
        let waiting = |state: &mut State| !is_there(&state.lanes[way as usize]);
        let (_state, result) = self
            .shared
            .changed
            .wait_timeout_while(state, PATIENCE, waiting)
            .unwrap();
        assert!(!result.timed_out(), "{what} did not come ({way:?})");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.lock().unwrap();
            state.is_closing = true;
            state.cut();
        }
        self.shared.changed.notify_all();
        // Wakes an acceptor that nobody has connected to.
        let _ = TcpStream::connect(self.address);
        let ended = self.acceptor.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

impl State {
    fn cut(&mut self) {
        for lane in &mut self.lanes {
            lane.is_stopped = false;
            if let Some(sink) = &lane.sink {
                let _ = sink.shutdown(Shutdown::Both);
            }
        }
        for listener in self.abandoned.drain(..) {
            let _ = listener.shutdown(Shutdown::Both);
        }
    }

    fn abandon(&mut self) {
        let [to_listener, to_connector] = &mut self.lanes;
        if let Some(connector) = &to_connector.sink {
            let _ = connector.shutdown(Shutdown::Both);
        }
        self.abandoned.extend(to_listener.sink.take());
    }
}

impl Shared {
    fn carry(this: &Arc<Self>, connector: TcpStream, listener: TcpStream) -> [JoinHandle<()>; 2] {
        for stream in [&connector, &listener] {
            stream.set_nodelay(true).unwrap();
        }
        let number = {
            let mut state = this.state.lock().unwrap();
            state.lanes[Way::ToListener as usize].sink = Some(listener.try_clone().unwrap());
            state.lanes[Way::ToConnector as usize].sink = Some(connector.try_clone().unwrap());
            if state.is_closing {
                state.cut();
            }
            state.connection_count += 1;
            state.connection_count
        };
        [(Way::ToListener, connector), (Way::ToConnector, listener)].map(|(way, from)| {
            let shared = this.clone();
            std::thread::spawn(move || shared.pump(way, from, number))
        })
    }

    /// Carries bytes until one end closes; the end is handed on too.
    fn pump(&self, way: Way, mut from: TcpStream, number: u64) {
        let mut buffer = [0; 4096];
        loop {
            let read_bytes = match from.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(read_bytes) => read_bytes,
            };
            let mut rest = &buffer[..read_bytes];
            while !rest.is_empty() {
                match self.hand_on(way, rest, number) {
                    Some(count) => rest = &rest[count..],
                    None => return,
                }
            }
        }
        let mut state = self.state.lock().unwrap();
        if state.connection_count == number {
            state.lanes[way as usize].close();
        }
    }

    /// Hands on a part of `rest`, at least a byte, unless this way has ended.
    fn hand_on(&self, way: Way, rest: &[u8], number: u64) -> Option<usize> {
        let mut state = self.lane_to_go(way);
        if state.connection_count != number {
            return None;
        }
        let most = if state.is_bytewise { 1 } else { rest.len() };
        let lane = &mut state.lanes[way as usize];
        let count = most.min(lane.armed.map_or(most, |(left, _)| left));
        let sent = lane.sink.as_mut()?.write_all(&rest[..count]);
        lane.passed_bytes += count as u64;
        let Some((left, fault)) = &mut lane.armed else {
            return sent.is_ok().then_some(count);
        };
        *left -= count;
        if *left > 0 {
            return sent.is_ok().then_some(count);
        }
        let fault = *fault;
        lane.armed = None;
        lane.has_fallen = true;
        match fault {
            Fault::Stop => lane.is_stopped = true,
            Fault::HalfClose => lane.close(),
            Fault::Cut => state.cut(),
            Fault::Abandon => state.abandon(),
        }
        self.changed.notify_all();
        (fault == Fault::Stop && sent.is_ok()).then_some(count)
    }

    /// The lock, once this way is not stopped.
    fn lane_to_go(&self, way: Way) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap();
        let stopped = |state: &mut State| state.lanes[way as usize].is_stopped;
        self.changed.wait_while(state, stopped).unwrap()
    }
}

impl Lane {
    fn close(&mut self) {
        if let Some(sink) = &self.sink {
            let _ = sink.shutdown(Shutdown::Write);
        }
    }
}
