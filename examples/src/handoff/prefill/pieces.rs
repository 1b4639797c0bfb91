//! One page of a post apart from the others: a planted fault damages one page and no other.

use kvgate_kvcache::PageMove;
use kvgate_kvcache::canary::Provenance;
use kvgate_transfer::Arrival;

/// Takes one destination out of the moves of a pool.
pub(super) fn split_moves(moves: &[PageMove], page: u32) -> (Vec<PageMove>, Vec<PageMove>) {
    let part = |moved: &PageMove, is_chosen: bool| {
        let pairs = moved
            .from
            .iter()
            .zip(&moved.to)
            .filter(|(_, to)| (**to == page) == is_chosen);
        let (from, to) = pairs.unzip();
        PageMove {
            from,
            to,
            ..moved.clone()
        }
    };
    let parts = |is_chosen| {
        moves
            .iter()
            .map(move |moved| part(moved, is_chosen))
            .filter(|moved| !moved.to.is_empty())
    };
    (parts(true).collect(), parts(false).collect())
}

/// What is said about one page, with the tickets, and about the other pages, without.
pub(super) fn split_note(arrival: &Arrival, page: u32) -> (Arrival, Arrival) {
    let records = Provenance::decode(&arrival.note).unwrap_or_default();
    let (chosen, others): (Vec<_>, Vec<_>) =
        records.into_iter().partition(|record| record.page == page);
    let about = |records: &[Provenance], tickets| Arrival {
        epoch: arrival.epoch,
        tickets,
        note: Provenance::encode(records),
    };
    (
        about(&chosen, arrival.tickets.clone()),
        about(&others, Vec::new()),
    )
}
