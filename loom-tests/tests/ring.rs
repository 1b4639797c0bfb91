//! I-2, I-6: a frame that lies in the ring of a peer comes whole and behind the bytes it speaks of, and its
//! reader does not sleep beside it, nor beside a question whether it lives.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, model};
use kvgate_transfer::attend::Sleeper;
use kvgate_transfer::ring_model::ring;
use kvgate_transfer::sync::{Arc, Condvar, Mutex, thread};

/// Two chunks through a ring that has room for one; each speaks of a slot that was written before.
#[test]
fn a_chunk_comes_whole_and_behind_what_was_written_before_it() {
    model(
        "a_chunk_comes_whole_and_behind_what_was_written_before_it",
        || {
            let (mut writer, mut reader) = ring(4);
            let slots = Arc::new([Cell::new(), Cell::new()]);
            let sender = {
                let slots = slots.clone();
                thread::spawn(move || {
                    for number in 0..2 {
                        slots[number].write(7);
                        while !writer.put(&[number as u8 + 1; 9]).0 {
                            thread::yield_now();
                        }
                    }
                })
            };
            for number in 0..2 {
                let chunk = loop {
                    match reader.take() {
                        Some(chunk) => break chunk,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(chunk, [number as u8 + 1; 9]);
                assert_eq!(slots[number].read(), 7);
            }
            sender.join().unwrap();
        },
    );
}

/// The reader looks, finds nothing and goes to sleep, while the writer puts a chunk.
#[test]
fn nobody_sleeps_beside_a_chunk() {
    model("nobody_sleeps_beside_a_chunk", || {
        let (mut writer, mut reader) = ring(4);
        let bell = Arc::new((Mutex::new(false), Condvar::new()));
        let sender = {
            let bell = bell.clone();
            thread::spawn(move || {
                let (is_in, must_wake) = writer.put(b"chunk");
                assert!(is_in);
                if must_wake.is_some() {
                    let mut rung = bell.0.lock();
                    *rung = true;
                    bell.1.notify_all();
                }
            })
        };
        while reader.take().is_none() {
            if reader.park(Sleeper::Owner) {
                let mut rung = bell.0.lock();
                while !*rung {
                    bell.1.wait(&mut rung);
                }
            }
        }
        sender.join().unwrap();
    });
}

/// The reader looks, finds nothing and goes to sleep, while somebody asks for a sign of life beside the writer.
#[test]
fn nobody_sleeps_beside_a_question() {
    model("nobody_sleeps_beside_a_question", || {
        let (writer, mut reader) = ring(4);
        let mut asker = writer.asker();
        let bell = Arc::new((Mutex::new(false), Condvar::new()));
        let looks = {
            let bell = bell.clone();
            thread::spawn(move || {
                // Awake until it has looked twice and may sleep: then the bell is the only way on.
                for _ in 0..2 {
                    assert!(reader.take().is_none());
                    if reader.park(Sleeper::Owner) {
                        let mut rung = bell.0.lock();
                        while !*rung {
                            bell.1.wait(&mut rung);
                        }
                        reader.unpark();
                        break;
                    }
                }
                assert!(reader.take().is_none());
            })
        };
        asker.ask();
        let must_wake = writer.must_wake();
        if must_wake.is_none() {
            // It was awake: it answers without a bell, however soon it wants to sleep.
            while !asker.is_answered() {
                thread::yield_now();
            }
        }
        *bell.0.lock() = true;
        bell.1.notify_all();
        looks.join().unwrap();
        assert!(asker.is_answered());
    });
}

/// The writer wakes the reader before it puts the chunk, and after it once more if the reader sleeps again.
#[test]
fn an_early_wake_leaves_nobody_asleep_beside_a_chunk() {
    model("an_early_wake_leaves_nobody_asleep_beside_a_chunk", || {
        let (mut writer, mut reader) = ring(4);
        let bell = Arc::new((Mutex::new(false), Condvar::new()));
        let sender = {
            let bell = bell.clone();
            thread::spawn(move || {
                let wake = |must_wake: Option<Sleeper>| {
                    if must_wake.is_some() {
                        *bell.0.lock() = true;
                        bell.1.notify_all();
                    }
                };
                wake(writer.must_wake());
                let (is_in, must_wake) = writer.put(b"chunk");
                assert!(is_in);
                wake(must_wake);
            })
        };
        while reader.take().is_none() {
            if reader.park(Sleeper::Owner) {
                let mut rung = bell.0.lock();
                while !*rung {
                    bell.1.wait(&mut rung);
                }
                *rung = false;
                drop(rung);
                reader.unpark();
            }
        }
        sender.join().unwrap();
    });
}
