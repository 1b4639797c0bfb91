//! What a tier is tested with. Not part of any default set of features.

mod disk;
mod sample;

pub use disk::{Kept, SimDisk};
pub use sample::Sample;
