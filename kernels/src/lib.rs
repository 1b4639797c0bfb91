//! Part of kvgate.
