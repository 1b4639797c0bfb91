//! The instruction set that the vector operations use, chosen once at run time.

use std::sync::OnceLock;

/// A code path of the vector operations. All of them return the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, any processor.
    Scalar,
    /// x86-64 with AVX2.
    Avx2,
    /// x86-64 with AVX-512 F.
    Avx512,
}

impl Isa {
    /// The fastest path that this processor runs; asked once per process.
    pub fn detect() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        *FOUND.get_or_init(|| *Self::usable().last().unwrap_or(&Isa::Scalar))
    }

    /// Every path that this processor runs, slowest first.
    pub fn usable() -> Vec<Self> {
        let mut found = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                found.push(Isa::Avx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                found.push(Isa::Avx512);
            }
        }
        found
    }

    /// Whether this processor runs the path.
    pub(crate) fn is_usable(self) -> bool {
        self == Isa::Scalar || Self::usable().contains(&self)
    }

    /// Name for reports, for example `x86_64-avx512f`.
    pub fn name(self) -> &'static str {
        match (
            self,
            cfg!(target_arch = "x86_64"),
            cfg!(target_arch = "aarch64"),
        ) {
            (Isa::Avx512, ..) => "x86_64-avx512f",
            (Isa::Avx2, ..) => "x86_64-avx2",
            (Isa::Scalar, true, _) => "x86_64-scalar",
            (Isa::Scalar, _, true) => "aarch64-scalar",
            (Isa::Scalar, ..) => "scalar",
        }
    }
}
