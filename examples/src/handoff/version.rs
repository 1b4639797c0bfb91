//! What `--version` prints.

/// Version, features and git hash.
#[cfg(feature = "fault-injection")]
pub const LINE: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " features=fault-injection git=",
    env!("KVGATE_GIT_HASH")
);

/// Version, features and git hash.
#[cfg(not(feature = "fault-injection"))]
pub const LINE: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " features=none git=",
    env!("KVGATE_GIT_HASH")
);
