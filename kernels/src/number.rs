//! Number formats of the KV pages: bf16, e4m3, e2m1, ue8m0.
//!
//! All roundings are to nearest, ties to even, with the model specification's clamps.

/// bf16 bits of `x`, rounded to nearest even. NaN stays NaN.
#[inline]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Value of bf16 bits.
#[inline]
pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `x` rounded to bf16.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    bf16_value(bf16_bits(x))
}

/// e4m3 ("fn" variant) code of `x`: clamped to ±448, ties to even, subnormals kept, -0 kept.
#[inline]
pub fn e4m3_code(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    if x.is_nan() {
        return sign | 0x7F;
    }
    let a = x.abs().min(448.0);
    const SMALLEST_NORMAL: f32 = 0.015625; // 2^-6
    if a < SMALLEST_NORMAL {
        // Subnormals count in steps of 2^-9; adding 2^23 rounds to an integer, ties to even.
        const MAGIC: f32 = 8_388_608.0;
        let steps = (a * 512.0 + MAGIC) - MAGIC;
        return sign | steps as u8;
    }
    let bits = a.to_bits();
    let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
    sign | ((rounded >> 20) - ((127 - 7) << 3)) as u8
}

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0f32; 256];
    let mut code = 0usize;
    while code < 256 {
        let sign = (code as u32 & 0x80) << 24;
        let exponent = (code as u32 >> 3) & 0xF;
        let mantissa = code as u32 & 7;
        let magnitude = if code & 0x7F == 0x7F {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 * 0.001953125 // 2^-9
        } else {
            f32::from_bits(((exponent + 120) << 23) | (mantissa << 20))
        };
        table[code] = f32::from_bits(magnitude.to_bits() | sign);
        code += 1;
    }
    table
}

/// Values of the 256 e4m3 codes.
pub static E4M3: [f32; 256] = e4m3_table();

/// Value of an e4m3 code.
#[inline]
pub fn e4m3_value(code: u8) -> f32 {
    E4M3[code as usize]
}

/// Values of the eight e2m1 magnitudes.
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// e2m1 code of `x`: clamped to ±6, ties to the even mantissa, bit 3 = sign (kept for zeros).
#[inline]
pub fn e2m1_code(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 28) & 8) as u8;
    let a = x.abs();
    // Thresholds between neighbours; a tie goes to the even code.
    let code = if a <= 0.25 {
        0
    } else if a < 0.75 {
        1
    } else if a <= 1.25 {
        2
    } else if a < 1.75 {
        3
    } else if a <= 2.5 {
        4
    } else if a < 3.5 {
        5
    } else if a <= 5.0 {
        6
    } else {
        7
    };
    sign | code
}

/// Value of an e2m1 code (low four bits).
#[inline]
pub fn e2m1_value(code: u8) -> f32 {
    let magnitude = E2M1[(code & 7) as usize];
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// Byte of the smallest power of two not below the normal `x > 0`.
#[inline]
pub fn ue8m0_ceil(x: f32) -> u8 {
    let bits = x.to_bits();
    (((bits >> 23) & 0xFF) + u32::from(bits & 0x7F_FFFF != 0)).min(255) as u8
}

/// 2^(byte - 127); byte 255 is NaN.
#[inline]
pub fn ue8m0_value(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits((b as u32) << 23),
    }
}

/// Largest magnitude of a block.
#[inline]
pub fn abs_max(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Scale byte of an fp8 block: ue8m0_ceil(max(amax, 1e-4) / 448).
#[inline]
pub fn fp8_block_scale(block: &[f32]) -> u8 {
    ue8m0_ceil(abs_max(block).max(1e-4) / 448.0)
}

/// Scale byte of an fp4 block: ue8m0_ceil(max(amax, 6 * 2^-126) / 6).
#[inline]
pub fn fp4_block_scale(block: &[f32]) -> u8 {
    ue8m0_ceil(abs_max(block).max(6.0 * f32::MIN_POSITIVE) / 6.0)
}

/// Plain f32 scale of an fp8 index row: max(amax, 1e-4) / 448, not a power of two.
#[inline]
pub fn fp8_row_scale(row: &[f32]) -> f32 {
    abs_max(row).max(1e-4) / 448.0
}

/// Rounds blocks of `block` channels through e4m3 with power-of-two scales, in place.
pub fn fake_fp8(x: &mut [f32], block: usize) {
    for part in x.chunks_mut(block.max(1)) {
        let scale = ue8m0_value(fp8_block_scale(part));
        for v in part {
            *v = e4m3_value(e4m3_code(*v / scale)) * scale;
        }
    }
}

/// Rounds blocks of `block` channels through e2m1 with power-of-two scales, in place.
pub fn fake_fp4(x: &mut [f32], block: usize) {
    for part in x.chunks_mut(block.max(1)) {
        let scale = ue8m0_value(fp4_block_scale(part));
        for v in part {
            *v = e2m1_value(e2m1_code(*v / scale)) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_round_trips_and_rounds_to_nearest_even() {
        for code in 0..=255u8 {
            let v = e4m3_value(code);
            if v.is_nan() {
                continue;
            }
            assert_eq!(e4m3_code(v), code);
        }
        // Between any two neighbours: the middle goes to the even code, everything else to the nearer.
        for code in 0..0x7Eu8 {
            let (a, b) = (e4m3_value(code), e4m3_value(code + 1));
            let middle = (a + b) / 2.0;
            assert_eq!(
                e4m3_code(middle),
                if code & 1 == 0 { code } else { code + 1 }
            );
            assert_eq!(e4m3_code(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(e4m3_code(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        assert_eq!(e4m3_code(1e9), 0x7E);
        assert_eq!(e4m3_code(f32::NEG_INFINITY), 0xFE);
        assert_eq!(e4m3_code(-0.0), 0x80);
    }

    #[test]
    fn bf16_rounds_to_even() {
        assert_eq!(round_bf16(1.0), 1.0);
        assert_eq!(bf16_bits(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(bf16_bits(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert!(bf16_value(bf16_bits(f32::NAN)).is_nan());
        assert_eq!(bf16_bits(f32::INFINITY), 0x7F80);
        assert_eq!(bf16_bits(f32::MAX), 0x7F80);
    }

    #[test]
    fn ue8m0_covers_its_ends() {
        assert_eq!(ue8m0_ceil(1.0), 127);
        assert_eq!(ue8m0_ceil(1.0000001), 128);
        assert_eq!(ue8m0_value(127), 1.0);
        assert_eq!(ue8m0_value(0), 2f32.powi(-127));
        assert!(ue8m0_value(255).is_nan());
        assert_eq!(fp8_block_scale(&[0.0; 64]), 105);
        assert_eq!(fp4_block_scale(&[0.0; 32]), 1);
    }
}
