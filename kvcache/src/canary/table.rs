//! The receiver's side: what arrived, and what should have.
//!
//! **What is protected by what.** One mutex guards the records; it is a leaf. Memory is read without it.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use kvgate_transfer::sync::{AtomicU64, Mutex, Ordering};
use kvgate_transfer::{Arrival, ArrivalSink, PeerId};

use super::{LiveRows, Provenance, page_checksum};
use crate::block_table::BlockTable;
use crate::ids::{LayerId, Room};
use crate::pool::PoolSet;
use crate::schema::{Component, ComponentRow, LivePage, PoolIndex};

/// How much is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyMode {
    /// Identity and checksum of every page.
    Canary,
    /// The checksum of every page.
    Checksum,
    /// Nothing.
    Off,
}

/// What is wrong with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViolationKind {
    /// No record: nobody has said that this page was written.
    NotArrived,
    /// The record is for another tenancy of the slot.
    Generation,
    /// The record is for another request.
    Request,
    /// The record covers other entries.
    Entries,
    /// The bytes in memory are not those that the sender had.
    Checksum,
}

impl ViolationKind {
    /// Name in every output.
    pub fn id(self) -> &'static str {
        match self {
            ViolationKind::NotArrived => "not_arrived",
            ViolationKind::Generation => "generation",
            ViolationKind::Request => "request",
            ViolationKind::Entries => "entries",
            ViolationKind::Checksum => "checksum",
        }
    }
}

/// A page that is not what its reader was about to take it for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The component.
    pub component: Component,
    /// The layer.
    pub layer: LayerId,
    /// Physical page in the pool of this process.
    pub page: u32,
    /// The tenancy of its slot.
    pub generation: u32,
    /// The request that reads it.
    pub room: Room,
    /// What is wrong.
    pub kind: ViolationKind,
    /// What the reader expects.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation {
            component,
            layer,
            page,
            generation,
            room,
            kind,
            expected,
            found,
        } = self;
        write!(
            f,
            "{component} of layer {layer}, page {page} (generation {generation}, request {room}): \
             {}: expected {expected}, found {found}",
            kind.id()
        )
    }
}

/// The records that arrived for one request. Register it as the sink of the flight.
#[derive(Debug)]
pub struct ProvenanceTable {
    room: Room,
    records: Mutex<HashMap<(PoolIndex, u32), Provenance>>,
    malformed: AtomicU64,
    checked: AtomicU64,
}

impl ProvenanceTable {
    /// An empty table: every page is a violation until its record arrives.
    pub fn new(room: Room) -> ProvenanceTable {
        ProvenanceTable {
            room,
            records: Mutex::new(HashMap::new()),
            malformed: AtomicU64::new(0),
            checked: AtomicU64::new(0),
        }
    }

    /// Pages that were checked so far.
    pub fn checked_count(&self) -> u64 {
        self.checked.load(Ordering::Relaxed)
    }

    /// Notes that were not records.
    pub fn malformed_count(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    /// Checks every page of a layer that is live after `prompt_tokens` tokens. Call it when the gate of
    /// the layer has opened and before the first row is read or written.
    pub fn verify_layer(
        &self,
        pools: &PoolSet,
        table: &BlockTable,
        prompt_tokens: u32,
        layer: LayerId,
        mode: VerifyMode,
    ) -> Vec<Violation> {
        self.verify_rows(
            pools,
            table,
            prompt_tokens,
            pools.schema().rows_of(layer),
            mode,
        )
    }

    /// Checks the pages of a layer whose prompt rows never change, those of compressed entries. Call it
    /// at any time between the gate and the end of the lease: a write that came late is found too.
    pub fn verify_unchanging(
        &self,
        pools: &PoolSet,
        table: &BlockTable,
        prompt_tokens: u32,
        layer: LayerId,
        mode: VerifyMode,
    ) -> Vec<Violation> {
        let rows = pools.schema().rows_of(layer);
        let unchanging = rows
            .iter()
            .filter(|row| row.space == crate::schema::Space::Page);
        self.verify_rows(pools, table, prompt_tokens, unchanging, mode)
    }

    fn verify_rows<'r>(
        &self,
        pools: &PoolSet,
        table: &BlockTable,
        prompt_tokens: u32,
        rows: impl IntoIterator<Item = &'r ComponentRow>,
        mode: VerifyMode,
    ) -> Vec<Violation> {
        if mode == VerifyMode::Off {
            return Vec::new();
        }
        let mut violations = Vec::new();
        let mut bytes = LiveRows::default();
        for row in rows {
            for live in pools.schema().live_pages(row, prompt_tokens) {
                self.checked.fetch_add(1, Ordering::Relaxed);
                let page = Page {
                    pools,
                    table,
                    prompt_tokens,
                    row,
                    live,
                };
                violations.extend(self.violation_of(&page, mode, &mut bytes));
            }
        }
        violations
    }

    fn violation_of(
        &self,
        page: &Page<'_>,
        mode: VerifyMode,
        bytes: &mut LiveRows,
    ) -> Option<Violation> {
        let (number, generation) = (page.number(), page.generation());
        let violation = |kind, expected: String, found: String| Violation {
            component: page.row.component,
            layer: page.row.layer,
            page: number,
            generation,
            room: self.room,
            kind,
            expected,
            found,
        };
        let record = self.records.lock().get(&(page.row.pool, number)).cloned();
        let Some(record) = record else {
            let (kind, entries) = (ViolationKind::NotArrived, range(&page.live.entries));
            return Some(violation(
                kind,
                format!("a record of entries {entries}"),
                "none".to_owned(),
            ));
        };
        if mode == VerifyMode::Canary {
            if record.room != self.room {
                let (ours, theirs) = (self.room.to_string(), record.room.to_string());
                return Some(violation(ViolationKind::Request, ours, theirs));
            }
            if record.generation != generation {
                let (ours, theirs) = (generation.to_string(), record.generation.to_string());
                return Some(violation(ViolationKind::Generation, ours, theirs));
            }
            if record.entries != page.live.entries {
                let (ours, theirs) = (range(&page.live.entries), range(&record.entries));
                return Some(violation(ViolationKind::Entries, ours, theirs));
            }
        }
        let checksum = page_checksum(
            page.pools,
            page.row,
            page.table,
            page.prompt_tokens,
            &page.live,
            bytes,
        );
        (checksum != record.checksum).then(|| {
            let hex = |crc: u32| format!("{crc:08x}");
            violation(ViolationKind::Checksum, hex(record.checksum), hex(checksum))
        })
    }
}

impl ArrivalSink for ProvenanceTable {
    fn arrived(&self, _peer: PeerId, arrival: &Arrival) {
        match Provenance::decode(&arrival.note) {
            Ok(records) => {
                let mut known = self.records.lock();
                known.extend(
                    records
                        .into_iter()
                        .map(|record| ((record.pool, record.page), record)),
                );
            }
            Err(_) => {
                self.malformed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

struct Page<'a> {
    pools: &'a PoolSet,
    table: &'a BlockTable,
    prompt_tokens: u32,
    row: &'a ComponentRow,
    live: LivePage,
}

impl Page<'_> {
    fn number(&self) -> u32 {
        self.table.physical_page(self.row, self.live.page_ordinal)
    }

    fn generation(&self) -> u32 {
        self.table
            .slot_of(self.row, self.live.page_ordinal)
            .generation
    }
}

fn range(entries: &Range<u32>) -> String {
    format!("{}..{}", entries.start, entries.end)
}
