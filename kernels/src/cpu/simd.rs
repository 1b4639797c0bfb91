//! The three inner loops that have vector paths: matrix product, attention scores, weighted key sum.
//!
//! One generic body per loop, instantiated for a 16-lane vector type per instruction set. A lane never
//! meets another lane before the final tree sum, multiplication and addition are separate
//! instructions, and the blocking only decides which independent sums advance together. So every
//! path gives the same bits, which `tests/isa_equal.rs` checks.

use crate::isa::Isa;
use crate::math::{LANES, sum_lanes};

/// Sixteen f32 lanes.
///
/// # Safety
/// An implementation may use instructions beyond the baseline; its methods may only run where the
/// processor has them. Pointers must be valid for 16 values.
trait Lanes: Copy {
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// self + a * b with two roundings.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
}

#[derive(Clone, Copy)]
struct Plain([f32; LANES]);

impl Lanes for Plain {
    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; LANES])
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: I-16: the caller gives 16 readable values.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: I-16: the caller gives 16 writable values.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for i in 0..LANES {
            self.0[i] += a.0[i] * b.0[i];
        }
        self
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub(super) struct V512(__m512);

    // SAFETY of every block below: I-16: pointers are valid by the trait's contract, and the
    // instructions exist because only the `target_feature` entry points instantiate these types.
    impl Lanes for V512 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_setzero_ps() })
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm512_add_ps(self.0, _mm512_mul_ps(a.0, b.0)) })
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct V256(__m256, __m256);

    impl Lanes for V256 {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_setzero_ps(), _mm256_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: see above.
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn add_product(self, a: Self, b: Self) -> Self {
            // SAFETY: see above.
            unsafe {
                Self(
                    _mm256_add_ps(self.0, _mm256_mul_ps(a.0, b.0)),
                    _mm256_add_ps(self.1, _mm256_mul_ps(a.1, b.1)),
                )
            }
        }
    }
}

/// y[t][o] = sum over k of x[t][k] * w[o][k], k ascending; the weights lie in panels of 16 outputs.
pub(crate) struct Gemm<'a> {
    pub(crate) isa: Isa,
    pub(crate) tokens: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) x: &'a [f32],
    pub(crate) x_stride: usize,
    /// [outputs/16 rounded up][inputs][16].
    pub(crate) panels: &'a [f32],
    pub(crate) y: &'a mut [f32],
    pub(crate) y_stride: usize,
}

pub(crate) fn gemm(g: &mut Gemm<'_>) {
    if g.tokens == 0 || g.outputs == 0 {
        return;
    }
    let last = g.tokens - 1;
    assert!(
        g.x.len() >= last * g.x_stride + g.inputs,
        "I-16: gemm reads inside x"
    );
    assert!(
        g.y.len() >= last * g.y_stride + g.outputs,
        "I-16: gemm writes inside y"
    );
    assert!(
        g.panels.len() >= g.outputs.div_ceil(LANES) * g.inputs * LANES,
        "I-16: gemm panels"
    );
    assert!(
        g.isa.is_usable(),
        "I-16: the processor has the instructions"
    );
    match g.isa {
        // SAFETY: I-16: lengths and processor were checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { gemm_avx512(g) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { gemm_avx2(g) },
        // SAFETY: as above.
        _ => unsafe { gemm_body::<Plain, 1, 2, 2>(g) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn gemm_avx512(g: &mut Gemm<'_>) {
    // SAFETY: I-16: forwarded from `gemm`.
    unsafe { gemm_body::<x86::V512, 4, 4, 8>(g) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn gemm_avx2(g: &mut Gemm<'_>) {
    // SAFETY: I-16: forwarded from `gemm`.
    unsafe { gemm_body::<x86::V256, 2, 2, 4>(g) }
}

/// Blocks of M tokens by P panels; left-over tokens one at a time by Q panels.
#[inline(always)]
unsafe fn gemm_body<L: Lanes, const M: usize, const P: usize, const Q: usize>(g: &mut Gemm<'_>) {
    let panel_count = g.outputs.div_ceil(LANES);
    let blocked = g.tokens / M * M;
    // SAFETY: I-16: `gemm` checked the lengths; every tile stays inside tokens x panels.
    unsafe {
        let mut panel = 0;
        while panel < panel_count && blocked > 0 {
            let wide = panel_count - panel >= P;
            for t in (0..blocked).step_by(M) {
                if wide {
                    tile::<L, M, P>(g, t, panel);
                } else {
                    tile::<L, M, 1>(g, t, panel);
                }
            }
            panel += if wide { P } else { 1 };
        }
        for t in blocked..g.tokens {
            let mut panel = 0;
            while panel < panel_count {
                if panel_count - panel >= Q {
                    tile::<L, 1, Q>(g, t, panel);
                    panel += Q;
                } else {
                    tile::<L, 1, 1>(g, t, panel);
                    panel += 1;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn tile<L: Lanes, const M: usize, const P: usize>(g: &mut Gemm<'_>, t: usize, panel: usize) {
    let panel_values = g.inputs * LANES;
    // SAFETY: I-16: `gemm` checked x, y and panels against tokens, inputs and outputs.
    unsafe {
        let mut sums = [[L::zero(); P]; M];
        let x = g.x.as_ptr().add(t * g.x_stride);
        let w = g.panels.as_ptr().add(panel * panel_values);
        for k in 0..g.inputs {
            let mut weights = [L::zero(); P];
            for (p, v) in weights.iter_mut().enumerate() {
                *v = L::load(w.add(p * panel_values + k * LANES));
            }
            for (m, row) in sums.iter_mut().enumerate() {
                let value = L::splat(*x.add(m * g.x_stride + k));
                for (s, v) in row.iter_mut().zip(&weights) {
                    *s = s.add_product(value, *v);
                }
            }
        }
        for (m, row) in sums.iter().enumerate() {
            for (p, s) in row.iter().enumerate() {
                let first = (panel + p) * LANES;
                let out = g.y.as_mut_ptr().add((t + m) * g.y_stride + first);
                if first + LANES <= g.outputs {
                    s.store(out);
                } else {
                    let mut tail = [0.0f32; LANES];
                    s.store(tail.as_mut_ptr());
                    out.copy_from_nonoverlapping(tail.as_ptr(), g.outputs - first);
                }
            }
        }
    }
}

/// Queries of one token against gathered key rows. `width` is a multiple of 16.
pub(crate) struct Gather<'a> {
    pub(crate) isa: Isa,
    pub(crate) heads: usize,
    pub(crate) width: usize,
    /// [rows][width].
    pub(crate) keys: &'a [f32],
    /// Rows to use, in order.
    pub(crate) picks: &'a [u32],
}

impl Gather<'_> {
    fn check(&self) {
        let rows = self.keys.len().checked_div(self.width).unwrap_or(0);
        assert!(self.width.is_multiple_of(LANES), "I-16: whole vectors");
        assert!(
            self.picks.iter().all(|p| (*p as usize) < rows),
            "I-16: picks inside the rows"
        );
        assert!(
            self.isa.is_usable(),
            "I-16: the processor has the instructions"
        );
    }

    #[inline(always)]
    unsafe fn key(&self, index: usize) -> *const f32 {
        // SAFETY: I-16: `check` proved the picks in range; callers stay below picks.len().
        unsafe {
            self.keys
                .as_ptr()
                .add(*self.picks.get_unchecked(index) as usize * self.width)
        }
    }
}

/// out[h][i] = q[h] . keys[picks[i]], in 16 lanes and the tree sum.
pub(crate) fn scores(g: &Gather<'_>, q: &[f32], out: &mut [f32]) {
    g.check();
    assert!(q.len() >= g.heads * g.width, "I-16: queries");
    assert!(out.len() >= g.heads * g.picks.len(), "I-16: scores");
    match g.isa {
        // SAFETY: I-16: lengths and processor were checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { scores_avx512(g, q, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { scores_avx2(g, q, out) },
        // SAFETY: as above.
        _ => unsafe { scores_body::<Plain, 1, 1>(g, q, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn scores_avx512(g: &Gather<'_>, q: &[f32], out: &mut [f32]) {
    // SAFETY: I-16: forwarded from `scores`.
    unsafe { scores_body::<x86::V512, 4, 4>(g, q, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn scores_avx2(g: &Gather<'_>, q: &[f32], out: &mut [f32]) {
    // SAFETY: I-16: forwarded from `scores`.
    unsafe { scores_body::<x86::V256, 2, 2>(g, q, out) }
}

#[inline(always)]
unsafe fn scores_body<L: Lanes, const H: usize, const K: usize>(
    g: &Gather<'_>,
    q: &[f32],
    out: &mut [f32],
) {
    let mut head = 0;
    while head < g.heads {
        let many = g.heads - head >= H;
        let mut key = 0;
        while key < g.picks.len() {
            let wide = g.picks.len() - key >= K;
            // SAFETY: I-16: head and key blocks stay inside heads x picks.
            unsafe {
                match (many, wide) {
                    (true, true) => score_tile::<L, H, K>(g, q, out, head, key),
                    (true, false) => score_tile::<L, H, 1>(g, q, out, head, key),
                    (false, true) => score_tile::<L, 1, K>(g, q, out, head, key),
                    (false, false) => score_tile::<L, 1, 1>(g, q, out, head, key),
                }
            }
            key += if wide { K } else { 1 };
        }
        head += if many { H } else { 1 };
    }
}

#[inline(always)]
unsafe fn score_tile<L: Lanes, const H: usize, const K: usize>(
    g: &Gather<'_>,
    q: &[f32],
    out: &mut [f32],
    head: usize,
    key: usize,
) {
    // SAFETY: I-16: `scores` checked q, keys and out against heads, width and picks.
    unsafe {
        let mut sums = [[L::zero(); K]; H];
        let mut rows = [std::ptr::null::<f32>(); K];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = g.key(key + i);
        }
        let queries = q.as_ptr().add(head * g.width);
        for c in (0..g.width).step_by(LANES) {
            let mut k = [L::zero(); K];
            for (v, row) in k.iter_mut().zip(&rows) {
                *v = L::load(row.add(c));
            }
            for (h, row) in sums.iter_mut().enumerate() {
                let value = L::load(queries.add(h * g.width + c));
                for (s, v) in row.iter_mut().zip(&k) {
                    *s = s.add_product(value, *v);
                }
            }
        }
        for (h, row) in sums.iter().enumerate() {
            for (i, s) in row.iter().enumerate() {
                let mut lanes = [0.0f32; LANES];
                s.store(lanes.as_mut_ptr());
                *out.get_unchecked_mut((head + h) * g.picks.len() + key + i) = sum_lanes(&lanes);
            }
        }
    }
}

/// out[h] = sum over i of p[h][i] * keys[picks[i]], i ascending.
pub(crate) fn weighted_sum(g: &Gather<'_>, p: &[f32], out: &mut [f32]) {
    g.check();
    assert!(p.len() >= g.heads * g.picks.len(), "I-16: weights");
    assert!(out.len() >= g.heads * g.width, "I-16: sums");
    match g.isa {
        // SAFETY: I-16: lengths and processor were checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { weighted_avx512(g, p, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { weighted_avx2(g, p, out) },
        // SAFETY: as above.
        _ => unsafe { weighted_body::<Plain, 1, 1>(g, p, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn weighted_avx512(g: &Gather<'_>, p: &[f32], out: &mut [f32]) {
    // SAFETY: I-16: forwarded from `weighted_sum`.
    unsafe { weighted_body::<x86::V512, 4, 4>(g, p, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn weighted_avx2(g: &Gather<'_>, p: &[f32], out: &mut [f32]) {
    // SAFETY: I-16: forwarded from `weighted_sum`.
    unsafe { weighted_body::<x86::V256, 2, 2>(g, p, out) }
}

#[inline(always)]
unsafe fn weighted_body<L: Lanes, const H: usize, const C: usize>(
    g: &Gather<'_>,
    p: &[f32],
    out: &mut [f32],
) {
    let mut head = 0;
    while head < g.heads {
        let many = g.heads - head >= H;
        let mut channel = 0;
        while channel < g.width {
            let wide = g.width - channel >= C * LANES;
            // SAFETY: I-16: head and channel blocks stay inside heads x width.
            unsafe {
                match (many, wide) {
                    (true, true) => weighted_tile::<L, H, C>(g, p, out, head, channel),
                    (true, false) => weighted_tile::<L, H, 1>(g, p, out, head, channel),
                    (false, true) => weighted_tile::<L, 1, C>(g, p, out, head, channel),
                    (false, false) => weighted_tile::<L, 1, 1>(g, p, out, head, channel),
                }
            }
            channel += if wide { C * LANES } else { LANES };
        }
        head += if many { H } else { 1 };
    }
}

#[inline(always)]
unsafe fn weighted_tile<L: Lanes, const H: usize, const C: usize>(
    g: &Gather<'_>,
    p: &[f32],
    out: &mut [f32],
    head: usize,
    channel: usize,
) {
    let count = g.picks.len();
    // SAFETY: I-16: `weighted_sum` checked p, keys and out against heads, width and picks.
    unsafe {
        let mut sums = [[L::zero(); C]; H];
        let weights = p.as_ptr().add(head * count);
        for i in 0..count {
            let row = g.key(i).add(channel);
            let mut k = [L::zero(); C];
            for (c, v) in k.iter_mut().enumerate() {
                *v = L::load(row.add(c * LANES));
            }
            for (h, row) in sums.iter_mut().enumerate() {
                let weight = L::splat(*weights.add(h * count + i));
                for (s, v) in row.iter_mut().zip(&k) {
                    *s = s.add_product(weight, *v);
                }
            }
        }
        for (h, row) in sums.iter().enumerate() {
            for (c, s) in row.iter().enumerate() {
                s.store(
                    out.as_mut_ptr()
                        .add((head + h) * g.width + channel + c * LANES),
                );
            }
        }
    }
}
