//! Control frames of the engine, and the way of an arrival to its barrier.
//!
//! An arrival is evidence. It is weighed against the flight that waits for its epoch: the peer must be a
//! writer of that flight, each chunk must be one that this peer writes, the level must be
//! [`Visibility::RemoteVisible`]. What fails is counted and has no effect (I-2, I-5, I-14).

use bytes::{Buf, Bytes};

use crate::{
    Arrival,
    barrier::{BarrierError, Redeemed},
    engine::{Engine, flight::Flight},
    fault,
    ids::{ChunkId, Epoch, PeerId, RegionId, StageId, TicketId},
    obs::{Event, add},
    sync::Arc,
    visibility::Visibility,
};

const MESSAGE: u8 = 0;
const REVOKE: u8 = 1;
const REVOKE_ACK: u8 = 2;

/// A parsed control frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Control {
    Message(Bytes),
    Revoke(RegionId),
    RevokeAck(RegionId),
}

pub(crate) fn encode_message(bytes: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(bytes.len() + 1);
    frame.push(MESSAGE);
    frame.extend_from_slice(bytes);
    frame
}

pub(crate) fn encode_revoke(region: RegionId) -> Vec<u8> {
    region_frame(REVOKE, region)
}

pub(crate) fn encode_revoke_ack(region: RegionId) -> Vec<u8> {
    region_frame(REVOKE_ACK, region)
}

fn region_frame(kind: u8, region: RegionId) -> Vec<u8> {
    let mut frame = vec![kind];
    frame.extend_from_slice(&region.0.to_le_bytes());
    frame
}

/// `None` for bytes that are no control frame of this version.
pub(crate) fn decode(mut frame: Bytes) -> Option<Control> {
    let kind = frame.try_get_u8().ok()?;
    if kind == MESSAGE {
        return Some(Control::Message(frame));
    }
    let region = RegionId(frame.try_get_u32_le().ok()?);
    match kind {
        _ if frame.has_remaining() => None,
        REVOKE => Some(Control::Revoke(region)),
        REVOKE_ACK => Some(Control::RevokeAck(region)),
        _ => None,
    }
}

impl Engine {
    /// Weighs one arrival.
    pub(crate) fn dispatch(&self, peer: PeerId, arrival: &Arrival, level: Visibility) {
        self.record(|| Event::Arrived {
            peer,
            epoch: arrival.epoch,
            ticket_count: arrival.tickets.len() as u64,
        });
        let Some(flight) = self.flight_for(peer, arrival.epoch) else {
            add(&self.counters.stale, 1);
            return self.record(|| Event::Stale {
                peer,
                epoch: arrival.epoch,
            });
        };
        if !flight.ledger.begin_dispatch() {
            add(&self.counters.late_after_close, 1);
            return self.record(|| Event::LateAfterClose {
                peer,
                epoch: arrival.epoch,
            });
        }
        self.dispatch_to(&flight, peer, arrival, level);
        flight.ledger.end_dispatch();
        self.settle(&flight);
    }

    /// The flight of this epoch.
    fn flight_for(&self, peer: PeerId, epoch: Epoch) -> Option<Arc<Flight>> {
        let flights = self.flights.lock();
        let found = flights.get(&epoch).cloned();
        if found.is_none() && fault::no_epoch_check() {
            return flights.values().rev().find(|f| f.is_writer(peer)).cloned();
        }
        found
    }

    fn dispatch_to(&self, flight: &Flight, peer: PeerId, arrival: &Arrival, level: Visibility) {
        let epoch = arrival.epoch;
        if flight.ledger.is_closed() {
            add(&self.counters.late_after_close, 1);
            self.record(|| Event::LateAfterClose { peer, epoch });
        }
        // All tickets are weighed before the sink hears of one.
        let is_expected = |&(stage, chunk): &(StageId, ChunkId)| {
            let ticket = TicketId {
                epoch,
                stage,
                chunk,
            };
            flight
                .barrier
                .admit(ticket, level)
                .is_ok_and(|rank| flight.writes(peer, rank))
        };
        if !arrival.tickets.iter().all(is_expected) {
            add(&self.counters.unknown, arrival.tickets.len().max(1) as u64);
            return self.record(|| Event::Unknown { peer, epoch, level });
        }
        if let Some(sink) = &flight.sink {
            sink.arrived(peer, arrival);
        }
        for &(stage, chunk) in &arrival.tickets {
            self.redeem(
                flight,
                peer,
                TicketId {
                    epoch,
                    stage,
                    chunk,
                },
                level,
            );
        }
    }

    fn redeem(&self, flight: &Flight, peer: PeerId, ticket: TicketId, level: Visibility) {
        let TicketId {
            epoch,
            stage,
            chunk,
        } = ticket;
        match flight.barrier.redeem(ticket, level) {
            Ok(Redeemed::First | Redeemed::Last) => {
                add(&self.counters.landed, 1);
                self.record(|| Event::Landed {
                    epoch,
                    stage,
                    chunk,
                });
                if let Some(rank) = flight.barrier.writer_of(stage, chunk)
                    && flight.barrier.writer_landed(rank)
                {
                    flight.ledger.writer_quiet(rank);
                }
            }
            Ok(Redeemed::Duplicate) => {
                add(&self.counters.duplicate, 1);
                self.record(|| Event::Duplicate {
                    peer,
                    epoch,
                    stage,
                    chunk,
                });
            }
            Err(BarrierError::Stale { .. }) => {
                add(&self.counters.stale, 1);
                self.record(|| Event::Stale { peer, epoch });
            }
            Err(_) => {
                add(&self.counters.unknown, 1);
                self.record(|| Event::Unknown { peer, epoch, level });
            }
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn control_frames_round_trip_and_others_are_refused() {
        let message = decode(encode_message(b"hello").into());
        assert_eq!(
            message,
            Some(Control::Message(Bytes::from_static(b"hello")))
        );
        let region = RegionId(0x0102_0304);
        assert_eq!(
            decode(encode_revoke(region).into()),
            Some(Control::Revoke(region))
        );
        assert_eq!(
            decode(encode_revoke_ack(region).into()),
            Some(Control::RevokeAck(region))
        );
        for bad in [&b""[..], &[1, 0, 0], &[1, 0, 0, 0, 0, 0], &[9, 0, 0, 0, 0]] {
            assert_eq!(decode(Bytes::copy_from_slice(bad)), None, "{bad:?}");
        }
    }
}
