//! [`Stopwatch`]: how long something takes, where somebody measures it.

/// When something began, in builds that measure it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    #[cfg(all(feature = "metrics", not(kv_loom)))]
    began: std::time::Instant,
}

impl Stopwatch {
    #[inline]
    pub(crate) fn start() -> Self {
        Self {
            #[cfg(all(feature = "metrics", not(kv_loom)))]
            began: std::time::Instant::now(),
        }
    }

    #[cfg(all(feature = "metrics", not(kv_loom)))]
    pub(crate) fn seconds(self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}
