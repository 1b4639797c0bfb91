//! A ring of words in memory that two processes share: one side puts chunks of bytes in, the other takes them
//! out.
//!
//! Neither side believes the other: each keeps the count that it owns to itself, compares the count of the
//! other with what is possible, and copies before it looks. Whatever the other process writes, this one reads
//! and writes inside the ring only, and the answer is [`Corrupt`] or wrong bytes, which the check sums of the
//! frames find.
//!
//! A chunk is a word with its length and the bytes, in words. A word without bytes, [`MARK`], is a mark: what
//! it means is the business of the caller. There is always room for one mark behind the chunks.
//!
//! **Order.** `tail` is stored with release behind the words of a chunk and read with acquire before them: who
//! takes a chunk sees everything that was written before it was put, in other memory too (I-2). `head` is
//! stored with release behind the reads, so a chunk is not overwritten while it is read.
//! **Sleeping (I-6).** The reader says that it parks, and looks once more; the writer puts, and looks whether
//! the reader is parked. A sequentially consistent fence stands between the two steps on either side, so one
//! of the two sees the other. Whoever takes the word back wakes: once for each sleep. The word also says who
//! sleeps ([`Sleeper`]), and so how it is woken.
//! **Heartbeat.** Beside the writer an [`Asker`] raises a number, and the reader copies it whenever it looks into
//! the ring: who attends to the ring is alive, however slow it is. A reader that parks looks for the number as
//! it looks for a chunk, so that no question is slept through. Nobody asks an idle ring, and nothing beats by
//! itself.

use crate::attend::Sleeper;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// What [`Words::parked`] holds, beside 0 for a reader that is awake.
const OWNER: u64 = 1;
const ATTENDANT: u64 = 2;

/// The word of a mark, where a chunk has its length.
const MARK: u64 = u64::MAX;

/// The words of a ring.
pub(crate) trait Words: Send {
    /// Counts the words that were put. Written by the writer.
    fn tail(&self) -> &AtomicU64;
    /// Counts the words that were taken. Written by the reader.
    fn head(&self) -> &AtomicU64;
    /// Who sleeps, or is about to.
    fn parked(&self) -> &AtomicU64;
    /// Changes when an attendant is woken.
    fn bell(&self) -> &AtomicU32;
    /// How often a sign of life was asked for. Written beside the writer.
    fn asked(&self) -> &AtomicU64;
    /// The last of these numbers that the reader has seen. Written by the reader.
    fn answered(&self) -> &AtomicU64;
    /// How many words chunks have, a power of two.
    fn capacity(&self) -> u64;
    /// The word with this number; numbers go round.
    fn word(&self, number: u64) -> &AtomicU64;
}

/// The other side has written what no honest one writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// What [`Reader::take`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Nothing,
    /// So many bytes.
    Chunk(usize),
    Mark,
}

/// The side that puts.
pub(crate) struct Writer<W> {
    words: W,
    tail: u64,
    /// As it was seen last.
    head: u64,
}

/// The side that takes.
pub(crate) struct Reader<W> {
    words: W,
    head: u64,
    answered: u64,
}

/// Asks the reader for a sign of life, whatever the writer does meanwhile.
pub(crate) struct Asker<W> {
    words: W,
    asked: u64,
}

impl<W: Words> Asker<W> {
    /// The one asker of a fresh ring.
    pub(crate) fn new(words: W) -> Self {
        Self { words, asked: 0 }
    }

    /// Asks. The caller looks next whether the reader has to be woken.
    pub(crate) fn ask(&mut self) {
        self.asked = self.asked.wrapping_add(1);
        self.words.asked().store(self.asked, Ordering::Release);
    }

    /// Whether the reader has looked since [`Asker::ask`], or was never asked.
    pub(crate) fn is_answered(&self) -> bool {
        self.words.answered().load(Ordering::Acquire) == self.asked
    }

    /// Whether the reader has said that it sleeps and was not woken since.
    #[cfg(not(kv_loom))]
    pub(crate) fn is_reader_parked(&self) -> bool {
        fence(Ordering::SeqCst);
        self.words.parked().load(Ordering::Relaxed) != 0
    }
}

impl<W: Words> Writer<W> {
    /// The writer of a fresh ring.
    pub(crate) fn new(words: W) -> Self {
        Self {
            words,
            tail: 0,
            head: 0,
        }
    }

    /// Puts a chunk of at least one byte; `false` when there is no room for it and a mark.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<bool, Corrupt> {
        if !self.has_room(bytes.len())? {
            return Ok(false);
        }
        self.push(bytes.len() as u64);
        let (whole, rest) = bytes.as_chunks::<8>();
        for word in whole {
            self.push(u64::from_le_bytes(*word));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.push(u64::from_le_bytes(last));
        }
        self.publish();
        Ok(true)
    }

    /// Puts a mark. The caller puts nothing else before half of the ring is free again.
    pub(crate) fn mark(&mut self) -> Result<(), Corrupt> {
        if self.free(1)? < 1 {
            return Err(Corrupt);
        }
        self.push(MARK);
        self.publish();
        Ok(())
    }

    /// Whether a chunk of so many bytes can be put now.
    pub(crate) fn has_room(&mut self, len_bytes: usize) -> Result<bool, Corrupt> {
        let needed = words_of(len_bytes as u64) + 1;
        Ok(self.free(needed)? >= needed)
    }

    /// Whether half of the ring can be written.
    pub(crate) fn is_half_free(&mut self) -> Result<bool, Corrupt> {
        let half = self.words.capacity() / 2;
        Ok(self.free(half)? >= half)
    }

    /// Who sleeps: then the caller has to wake it, and nobody else will. Asked after each chunk and question.
    pub(crate) fn must_wake(&self) -> Option<Sleeper> {
        fence(Ordering::SeqCst);
        let parked = self.words.parked();
        if parked.load(Ordering::Relaxed) == 0 {
            return None;
        }
        match parked.swap(0, Ordering::Relaxed) {
            0 => None,
            ATTENDANT => {
                self.words.bell().fetch_add(1, Ordering::Release);
                Some(Sleeper::Attendant)
            }
            _ => Some(Sleeper::Owner),
        }
    }

    /// Whether the reader may sleep: a look that nothing depends on, and that waits for nothing.
    #[cfg(not(kv_loom))]
    pub(crate) fn may_sleep(&self) -> bool {
        self.words.parked().load(Ordering::Relaxed) != 0
    }

    /// Words that can be written; asks the reader only if fewer than `wanted` are known.
    fn free(&mut self, wanted: u64) -> Result<u64, Corrupt> {
        let capacity = self.words.capacity();
        let used = self.tail.wrapping_sub(self.head);
        if capacity - used >= wanted {
            return Ok(capacity - used);
        }
        let head = self.words.head().load(Ordering::Acquire);
        // It goes from where it was to the tail, never back.
        let still_used = self.tail.wrapping_sub(head);
        if still_used > used {
            return Err(Corrupt);
        }
        self.head = head;
        Ok(capacity - still_used)
    }

    fn push(&mut self, word: u64) {
        self.words.word(self.tail).store(word, Ordering::Relaxed);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        self.words.tail().store(self.tail, Ordering::Release);
    }
}

impl<W: Words> Reader<W> {
    /// The reader of a fresh ring.
    pub(crate) fn new(words: W) -> Self {
        Self {
            words,
            head: 0,
            answered: 0,
        }
    }

    /// Takes what is next. A chunk goes to the beginning of `into`; one that is longer is corrupt.
    pub(crate) fn take(&mut self, into: &mut [u8]) -> Result<Taken, Corrupt> {
        self.beat();
        let ready = self.ready();
        if ready == 0 {
            return Ok(Taken::Nothing);
        }
        let first = self.words.word(self.head).load(Ordering::Relaxed);
        if ready > self.words.capacity() {
            return Err(Corrupt);
        }
        if first == MARK {
            self.pass(1);
            return Ok(Taken::Mark);
        }
        let bytes = usize::try_from(first)
            .ok()
            .filter(|len| *len > 0)
            .and_then(|len| into.get_mut(..len))
            .ok_or(Corrupt)?;
        if words_of(first) > ready {
            return Err(Corrupt);
        }
        for (number, piece) in (1..).zip(bytes.chunks_mut(8)) {
            let word = self.words.word(self.head.wrapping_add(number));
            let word = word.load(Ordering::Relaxed).to_le_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
        self.pass(words_of(first));
        Ok(Taken::Chunk(bytes.len()))
    }

    /// Whether something was put that was not taken.
    pub(crate) fn has_some(&self) -> bool {
        self.ready() != 0
    }

    /// Gives a sign of life, if one was asked for.
    pub(crate) fn beat(&mut self) {
        // Not believed and not used: a number that no asker has written is a heartbeat that nobody hears.
        let asked = self.words.asked().load(Ordering::Acquire);
        if asked != self.answered {
            self.answered = asked;
            self.words.answered().store(asked, Ordering::Release);
        }
    }

    /// Says who is about to sleep until it is woken; `false` when there is something to take, or to answer.
    pub(crate) fn park(&self, sleeper: Sleeper) -> bool {
        let parked = self.words.parked();
        let word = match sleeper {
            Sleeper::Owner => OWNER,
            Sleeper::Attendant => ATTENDANT,
        };
        // Read-modify-writes here and below, so that they have one order with the swaps of the writer: the model
        // checker does not order plain stores of two sides.
        parked.swap(word, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.has_some() || self.is_asked() {
            parked.swap(0, Ordering::Relaxed);
            return false;
        }
        true
    }

    fn is_asked(&self) -> bool {
        self.words.asked().load(Ordering::Acquire) != self.answered
    }

    /// This side is awake.
    pub(crate) fn unpark(&self) {
        self.words.parked().swap(0, Ordering::Relaxed);
    }

    /// What the writer changes when it wakes an attendant.
    pub(crate) fn bell(&self) -> &AtomicU32 {
        self.words.bell()
    }

    fn ready(&self) -> u64 {
        let tail = self.words.tail().load(Ordering::Acquire);
        tail.wrapping_sub(self.head)
    }

    fn pass(&mut self, words: u64) {
        self.head = self.head.wrapping_add(words);
        self.words.head().store(self.head, Ordering::Release);
    }
}

/// Words of a chunk, its length included.
fn words_of(len_bytes: u64) -> u64 {
    1 + len_bytes.div_ceil(8)
}

#[cfg(not(kv_loom))]
pub(crate) use mapped::{Inbox, Outbox, Questions, RING_BYTES, inbox, memory, outbox};

#[cfg(not(kv_loom))]
mod mapped {
    use std::ptr::NonNull;

    use super::{Asker, Reader, Words, Writer};
    use crate::error::Error;
    use crate::mem::{Memory, PeerMapping};
    use crate::sync::{Arc, AtomicU32, AtomicU64};

    /// Length of the memory of a ring.
    pub(crate) const RING_BYTES: u64 = 4096 + 8 * CAPACITY;
    /// Words for chunks.
    const CAPACITY: u64 = 8 * 1024;
    /// Where they begin, counted in words.
    const FIRST: usize = 512;
    /// The counts, each on a cache line of its own.
    const TAIL: usize = 0;
    const HEAD: usize = 16;
    const PARKED: usize = 32;
    const BELL: usize = 48;
    /// Each beside the count that the same side writes.
    const ASKED: usize = TAIL + 1;
    const ANSWERED: usize = HEAD + 1;

    /// A ring that this side reads: its memory is its own.
    pub(crate) type Inbox = Reader<InMemory<Arc<Memory>>>;
    /// A ring that this side writes: it lies in memory of the peer.
    pub(crate) type Outbox = Writer<InMemory<Arc<PeerMapping>>>;
    /// What is asked of the reader of an [`Outbox`].
    pub(crate) type Questions = Asker<InMemory<Arc<PeerMapping>>>;

    /// Zeroed memory for a ring.
    pub(crate) fn memory() -> Result<Memory, Error> {
        Memory::shared("kvgate-ring", RING_BYTES)
    }

    /// The reader of the ring in `memory`, which [`memory`] made.
    pub(crate) fn inbox(memory: Arc<Memory>) -> Option<Inbox> {
        let (base, len_bytes) = (memory.base_ptr(), memory.len_bytes());
        InMemory::new(memory, base, len_bytes).map(Reader::new)
    }

    /// The writer of the ring in memory of a peer; `None` if it is not as long as a ring.
    pub(crate) fn outbox(mapping: PeerMapping) -> Option<Outbox> {
        let (base, len_bytes) = (mapping.base_ptr(), mapping.len_bytes());
        InMemory::new(Arc::new(mapping), base, len_bytes).map(Writer::new)
    }

    impl Outbox {
        /// For its reader. Called once.
        pub(crate) fn questions(&self) -> Questions {
            Asker::new(self.words.clone())
        }

        /// Wakes the attendant that [`Writer::must_wake`] has found.
        pub(crate) fn wake_attendant(&self) {
            // Fails for no word that is mapped.
            let _ = rustix::thread::futex::wake(
                self.words.bell(),
                rustix::thread::futex::Flags::empty(),
                1,
            );
        }
    }

    /// The words of a ring in a mapping.
    #[derive(Clone)]
    pub(crate) struct InMemory<O> {
        base: NonNull<AtomicU64>,
        /// Keeps the mapping.
        _owner: O,
    }

    // SAFETY: I-21: an address without thread affinity; the words behind it are atomics, and the owner, which
    // is Send, keeps them mapped.
    unsafe impl<O: Send> Send for InMemory<O> {}

    impl<O> InMemory<O> {
        fn new(owner: O, base: *mut u8, len_bytes: u64) -> Option<Self> {
            let base = NonNull::new(base.cast::<AtomicU64>()).filter(|base| base.is_aligned())?;
            (len_bytes >= RING_BYTES).then_some(Self {
                base,
                _owner: owner,
            })
        }

        /// `index` is one of the constants above, or lies behind `FIRST` within `CAPACITY`.
        fn at(&self, index: usize) -> &AtomicU64 {
            debug_assert!(index < FIRST + CAPACITY as usize);
            // SAFETY: I-16: the mapping is `RING_BYTES` long, which `new` has checked, and `index` lies in it;
            // I-21: the owner keeps it mapped as long as `self`. Both processes use these words as atomics
            // only, so that whatever the other one does to them is a value, not a data race.
            unsafe { &*self.base.as_ptr().add(index) }
        }
    }

    impl<O: Send> Words for InMemory<O> {
        fn tail(&self) -> &AtomicU64 {
            self.at(TAIL)
        }

        fn head(&self) -> &AtomicU64 {
            self.at(HEAD)
        }

        fn parked(&self) -> &AtomicU64 {
            self.at(PARKED)
        }

        fn bell(&self) -> &AtomicU32 {
            let word = std::ptr::from_ref(self.at(BELL));
            // SAFETY: I-16: half of the word at `BELL`, which nobody uses as a whole; I-21: as in `at`.
            unsafe { &*word.cast::<AtomicU32>() }
        }

        fn asked(&self) -> &AtomicU64 {
            self.at(ASKED)
        }

        fn answered(&self) -> &AtomicU64 {
            self.at(ANSWERED)
        }

        fn capacity(&self) -> u64 {
            CAPACITY
        }

        fn word(&self, number: u64) -> &AtomicU64 {
            self.at(FIRST + (number % CAPACITY) as usize)
        }
    }
}

/// A ring for the models.
#[cfg(kv_loom)]
pub mod model {
    use super::{Asker, Reader, Taken, Words, Writer};
    use crate::attend::Sleeper;
    use crate::sync::{Arc, AtomicU32, AtomicU64};

    struct Cells {
        tail: AtomicU64,
        head: AtomicU64,
        parked: AtomicU64,
        bell: AtomicU32,
        asked: AtomicU64,
        answered: AtomicU64,
        words: Vec<AtomicU64>,
    }

    impl Words for Arc<Cells> {
        fn tail(&self) -> &AtomicU64 {
            &self.tail
        }

        fn head(&self) -> &AtomicU64 {
            &self.head
        }

        fn parked(&self) -> &AtomicU64 {
            &self.parked
        }

        fn bell(&self) -> &AtomicU32 {
            &self.bell
        }

        fn asked(&self) -> &AtomicU64 {
            &self.asked
        }

        fn answered(&self) -> &AtomicU64 {
            &self.answered
        }

        fn capacity(&self) -> u64 {
            self.words.len() as u64
        }

        fn word(&self, number: u64) -> &AtomicU64 {
            &self.words[(number % self.capacity()) as usize]
        }
    }

    /// The side that puts.
    pub struct RingWriter(Writer<Arc<Cells>>);

    /// The side that takes.
    pub struct RingReader(Reader<Arc<Cells>>);

    /// A fresh ring of `capacity` words, a power of two.
    pub fn ring(capacity: usize) -> (RingWriter, RingReader) {
        let cells = Arc::new(Cells {
            tail: AtomicU64::new(0),
            head: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            bell: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            words: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
        });
        let reader = RingReader(Reader::new(cells.clone()));
        (RingWriter(Writer::new(cells)), reader)
    }

    impl RingWriter {
        /// Puts a chunk; `false` when there is no room. Who must be woken comes second; an attendant has been.
        pub fn put(&mut self, bytes: &[u8]) -> (bool, Option<Sleeper>) {
            let is_in = self.0.put(bytes).expect("an honest reader");
            let sleeper = match is_in {
                true => self.0.must_wake(),
                false => None,
            };
            (is_in, sleeper)
        }

        /// What asks the reader for a sign of life. Called once.
        pub fn asker(&self) -> RingAsker {
            RingAsker(Asker::new(self.0.words.clone()))
        }

        /// Who must be woken; an attendant has been.
        pub fn must_wake(&self) -> Option<Sleeper> {
            self.0.must_wake()
        }
    }

    /// What asks.
    pub struct RingAsker(Asker<Arc<Cells>>);

    impl RingAsker {
        /// Asks for a sign of life.
        pub fn ask(&mut self) {
            self.0.ask();
        }

        /// Whether the reader has given one since.
        pub fn is_answered(&self) -> bool {
            self.0.is_answered()
        }
    }

    impl RingReader {
        /// Takes a chunk, if there is one.
        pub fn take(&mut self) -> Option<Vec<u8>> {
            let mut bytes = [0; 16];
            match self.0.take(&mut bytes).expect("an honest writer") {
                Taken::Chunk(len) => Some(bytes[..len].to_vec()),
                Taken::Nothing | Taken::Mark => None,
            }
        }

        /// Whether it may sleep until it is woken.
        pub fn park(&self, sleeper: Sleeper) -> bool {
            self.0.park(sleeper)
        }

        /// It is awake.
        pub fn unpark(&self) {
            self.0.unpark();
        }

        /// What changes when an attendant is woken.
        pub fn bell(&self) -> &AtomicU32 {
            self.0.bell()
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests;
