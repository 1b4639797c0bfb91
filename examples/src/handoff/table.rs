//! The table per layer and the totals, for people.

use std::fmt::Write;

use super::report::{Conversations, Report};

/// The component ids, in the order of the columns.
const COLUMNS: [&str; 8] = [
    "swa_latent",
    "c4_latent",
    "index_k",
    "c128_latent",
    "c4_state",
    "index_state",
    "c128_state",
    "mtp_latent",
];

/// Renders the table; no line ends with blanks, and there is no newline at the end.
#[must_use]
pub fn render(report: &Report) -> String {
    let columns: Vec<&str> = COLUMNS
        .into_iter()
        .filter(|id| report.bytes.by_component.contains_key(*id))
        .collect();
    let mut rows = vec![header(&columns)];
    rows.extend(report.layers.iter().map(|layer| {
        let mut row = vec![layer.layer.to_string(), layer.kind.clone()];
        row.extend(columns.iter().map(|id| {
            layer
                .bytes
                .get(*id)
                .map_or("-".to_owned(), |bytes| grouped(*bytes))
        }));
        row.push(grouped(layer.landed_us));
        row.push(grouped(layer.gate_wait_us));
        row
    }));
    let mut text = aligned(&rows);
    for line in totals(report) {
        text.push('\n');
        text.push_str(&line);
    }
    if let Some(conversations) = &report.conversations {
        text.push('\n');
        text.push_str(&aligned(&tiers(conversations)));
        text.push('\n');
        text.push_str(&moves(conversations));
        if let Some(storage) = &conversations.work.storage {
            text.push('\n');
            text.push_str(&storage.text());
        }
    }
    text
}

fn header(columns: &[&str]) -> Vec<String> {
    let mut row = vec!["layer".to_owned(), "kind".to_owned()];
    row.extend(columns.iter().map(|id| (*id).to_owned()));
    row.extend(["landed at us".to_owned(), "waited us".to_owned()]);
    row
}

fn aligned(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len))
        .map(|column| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(String::len)
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            // Writing into a String cannot fail.
            let _ = write!(text, "{gap}{cell:>width$}");
        }
    }
    text
}

/// What was found where.
fn tiers(conversations: &Conversations) -> Vec<Vec<String>> {
    let header = ["tier", "hits", "hit tokens", "bytes", "load ms"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(conversations.work.tiers.iter().map(|tier| {
        vec![
            tier.tier.clone(),
            grouped(tier.hits),
            grouped(tier.hit_tokens),
            grouped(tier.bytes),
            format!("{:.1}", tier.load_ms),
        ]
    }));
    rows
}

fn moves(conversations: &Conversations) -> String {
    let work = &conversations.work;
    format!(
        "turns: {} x {}, {} without a hit, {} tokens computed; pages: device {}, host {}; \
         backups {} ({} no room), loads {} ({} failed)\n\
         decode side: {} turns over pages of its own, {} tokens, {} bytes that did not cross",
        conversations.sessions,
        conversations.turns,
        work.misses,
        grouped(work.computed_tokens),
        work.device_pages,
        work.host_pages,
        work.backups.landed,
        work.backups.no_room,
        work.loads.landed,
        work.loads.failed,
        conversations.decode_reuse.hits,
        grouped(conversations.decode_reuse.hit_tokens),
        grouped(conversations.decode_reuse.bytes),
    )
}

fn totals(report: &Report) -> Vec<String> {
    let requests = &report.requests;
    let logits = &report.logits;
    vec![
        format!(
            "requests: {} asked, {} finished, {} cancelled, {} failed, {} in flight at the most",
            requests.asked,
            requests.finished,
            requests.cancelled,
            requests.failed,
            report.peak_in_flight,
        ),
        format!(
            "moved: {} bytes in {} transfers ({} bytes of rows), {:.3} GB/s, {:.1} % hidden behind the prefill",
            grouped(report.bytes.total),
            grouped(report.transfers),
            grouped(report.bytes.row_total),
            report.transfer_gbps,
            report.hidden_share * 100.0,
        ),
        format!(
            "pages: {} per side, {} changes of owner, {} quarantined",
            report.pages, report.page_reuses, report.counters.quarantined_pages,
        ),
        format!(
            "compared: {} logits ({} differ), {} cache rows ({} differ); canary ({}): {} checks, {} violations",
            grouped(logits.compared),
            logits.differing,
            grouped(report.cache.compared_rows),
            report.cache.differing,
            report.canary.mode,
            report.canary.checked,
            report.canary.violations.len(),
        ),
        format!(
            "cpu: prefill {} ms, decode {} ms ({})",
            report.prefill.cpu_ms, report.decode.cpu_ms, report.isa
        ),
    ]
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
    }
}
