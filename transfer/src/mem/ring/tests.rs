use super::*;
use crate::mem::PeerMapping;
use crate::sync::Arc;

fn pair() -> (Outbox, Inbox) {
    let memory = Arc::new(memory().unwrap());
    let file = memory.file().unwrap().try_clone_to_owned().unwrap();
    let there = PeerMapping::map(&file, memory.len_bytes()).unwrap();
    (outbox(there).unwrap(), inbox(memory).unwrap())
}

#[test]
fn chunks_come_whole_and_in_order_however_often_the_ring_goes_round() {
    let (mut writer, mut reader) = pair();
    let mut into = vec![0; 4096];
    let mut expected = std::collections::VecDeque::new();
    for number in 0..20_000_usize {
        let chunk: Vec<u8> = (0..1 + number * 7 % 3000)
            .map(|at| (at * 31 + number) as u8)
            .collect();
        while !writer.put(&chunk).unwrap() {
            let oldest: Vec<u8> = expected.pop_front().unwrap();
            assert_eq!(reader.take(&mut into), Ok(Taken::Chunk(oldest.len())));
            assert_eq!(into[..oldest.len()], oldest);
        }
        expected.push_back(chunk);
    }
    for oldest in expected {
        assert_eq!(reader.take(&mut into), Ok(Taken::Chunk(oldest.len())));
        assert_eq!(into[..oldest.len()], oldest);
    }
    assert_eq!(reader.take(&mut into), Ok(Taken::Nothing));
}

#[test]
fn a_full_ring_has_room_for_a_mark_and_is_half_free_when_half_was_taken() {
    let (mut writer, mut reader) = pair();
    let mut into = [0; 1024];
    let mut count = 0;
    while writer.put(&[7; 1024]).unwrap() {
        count += 1;
    }
    writer.mark().unwrap();
    assert!(!writer.is_half_free().unwrap());
    for _ in 0..count {
        assert_eq!(reader.take(&mut into), Ok(Taken::Chunk(1024)));
    }
    assert!(writer.is_half_free().unwrap());
    assert_eq!(reader.take(&mut into), Ok(Taken::Mark));
    assert_eq!(reader.take(&mut into), Ok(Taken::Nothing));
}

#[test]
fn a_sleeper_is_woken_once_and_does_not_sleep_beside_a_chunk() {
    let (mut writer, mut reader) = pair();
    assert!(writer.put(b"awake").unwrap() && writer.must_wake().is_none());
    assert!(!reader.park(Sleeper::Owner), "a chunk is there");
    assert_eq!(reader.take(&mut [0; 8]), Ok(Taken::Chunk(5)));
    for sleeper in [Sleeper::Owner, Sleeper::Attendant] {
        assert!(reader.park(sleeper));
        assert!(writer.put(b"asleep").unwrap());
        assert_eq!(writer.must_wake(), Some(sleeper));
        assert!(writer.put(b"once").unwrap() && writer.must_wake().is_none());
        reader.unpark();
        while reader.take(&mut [0; 8]) != Ok(Taken::Nothing) {}
    }
    assert_eq!(reader.bell().load(Ordering::Relaxed), 1);
}

/// I-16: numbers that no honest peer writes.
#[test]
fn impossible_numbers_are_corrupt_and_nothing_outside_is_touched() {
    let lengths = [0, 9, u64::MAX - 1, 1 << 63, 8 * 1024 * 8];
    for (length, tail) in lengths.into_iter().flat_map(|len| [(len, 1), (len, 2)]) {
        let (writer, mut reader) = pair();
        writer.words.word(0).store(length, Ordering::Relaxed);
        writer.words.tail().store(tail, Ordering::Release);
        assert_eq!(reader.take(&mut [0; 64]), Err(Corrupt), "{length} {tail}");
    }
    for tail in [u64::MAX, 8 * 1024 + 1, 1 << 63] {
        let (writer, mut reader) = pair();
        writer.words.word(0).store(1, Ordering::Relaxed);
        writer.words.tail().store(tail, Ordering::Release);
        assert_eq!(reader.take(&mut [0; 64]), Err(Corrupt), "{tail}");
    }
    for head in [u64::MAX, 1 << 63, 1 << 20] {
        let (mut writer, reader) = pair();
        while writer.head == 0 && writer.tail < 8 * 1024 - 200 {
            assert!(writer.put(&[1; 1024]).unwrap());
        }
        reader.words.head().store(head, Ordering::Release);
        assert_eq!(writer.put(&[1; 4096]), Err(Corrupt), "{head}");
    }
}

/// For the tests of the connections.
impl Outbox {
    pub(crate) fn spoil(&self) {
        self.words.tail().store(u64::MAX, Ordering::Release);
    }
}

#[test]
fn memory_that_is_too_short_is_no_ring() {
    let memory = Arc::new(crate::mem::Memory::shared("short", 4096).unwrap());
    assert!(inbox(memory).is_none());
}

/// Beats when it looks, whatever it finds, and does not sleep beside a question.
#[test]
fn a_reader_beats_when_it_is_asked_and_looks() {
    let (mut writer, mut reader) = pair();
    let mut questions = writer.questions();
    assert!(questions.is_answered(), "nobody has asked");
    assert!(reader.park(Sleeper::Owner));
    for _ in 0..3 {
        questions.ask();
        assert!(!questions.is_answered());
        assert_eq!(
            writer.must_wake(),
            Some(Sleeper::Owner),
            "as behind a chunk"
        );
        assert!(!questions.is_answered(), "nobody has looked");
        assert!(!reader.park(Sleeper::Owner), "a question is there");
        assert_eq!(reader.take(&mut [0; 8]), Ok(Taken::Nothing));
        assert!(questions.is_answered());
        assert!(reader.park(Sleeper::Owner));
    }
    // Also one that has much to take.
    assert!(writer.put(b"first").unwrap() && writer.put(b"second").unwrap());
    questions.ask();
    assert_eq!(reader.take(&mut [0; 8]), Ok(Taken::Chunk(5)));
    assert!(questions.is_answered());
}
