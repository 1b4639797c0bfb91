//! Blocks that say which they are: eight bytes at every 4 KiB and at the end.

fn places(bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes - 8).step_by(4096).chain([bytes - 8])
}

fn mark(number: usize, at: usize) -> [u8; 8] {
    let mixed = (number as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ at as u64;
    mixed.to_le_bytes()
}

/// Makes it block `number`.
pub fn stamp(block: &mut [u8], number: usize) {
    for at in places(block.len()) {
        block[at..at + 8].copy_from_slice(&mark(number, at));
    }
}

/// Whether it is block `number`, as far as its marks go.
pub fn is_block(block: &[u8], number: usize) -> bool {
    places(block.len()).all(|at| block[at..at + 8] == mark(number, at))
}

/// Every number below `count` once, in no order that a cache could guess.
pub fn order(count: usize) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    let mut state = 1_u64;
    for at in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        numbers.swap(at, (state >> 33) as usize % (at + 1));
    }
    numbers
}
