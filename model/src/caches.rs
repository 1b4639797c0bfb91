//! What the model asks of whoever owns its caches.

use std::ops::Range;

use kvgate_kvcache::LayerId;

use crate::error::ModelError;
use crate::standin::LayerMut;
pub use crate::standin::MonoCaches;

/// The caches of one sequence, layer by layer.
///
/// A producer commits and posts a layer in `layer_done`; a consumer waits for the layer's arrival in
/// `layer`.
pub trait LayerCaches {
    /// A view of `layer` that the call may read and write.
    ///
    /// # Errors
    /// The layer is not ready, or does not exist.
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError>;

    /// The rows of `tokens` of this layer are written.
    ///
    /// # Errors
    /// The layer cannot be committed.
    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError>;
}
