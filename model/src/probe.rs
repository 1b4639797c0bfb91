//! Intermediate values for tests and checks.

/// Receives intermediate rows during [`crate::Model::forward`].
///
/// Names are those of the fixtures without the layer prefix: `hc_attn_x [d]`, `hc_attn_post [n]`,
/// `hc_attn_comb [n*n]`, `attn.q [H*D]`, `attn.kv [D]`, `attn.o_pre_proj [H*D]`,
/// `attn.indexer.score [visible entries]`, `attn.indexer.selected` (entry ids), `attn_out [d]`,
/// `ffn.expert_idx` (ids), `ffn.expert_weight`, `ffn_out [d]`, `out [n*d]`.
pub trait Probe {
    /// One row of one token.
    fn row(&mut self, layer: u16, name: &'static str, position: u32, values: &[f32]);
}
