//! What a tier is tested with. Not part of any default set of features.

pub mod contract;
mod disk;
mod faulty;
mod hooked;
mod sample;

pub use disk::{Kept, SimDisk};
pub use faulty::Faulty;
pub use hooked::Hooked;
pub use sample::Sample;
