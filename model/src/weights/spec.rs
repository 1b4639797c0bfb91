//! The tensors of a checkpoint: hub names, shapes and accepted aliases (table 3.2 of the model specification).

use std::collections::BTreeMap;

use crate::config::Config;

/// What the values of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Stored as BF16 by the hub: projections, norms, embeddings.
    Weight,
    /// Stored as F32 by the hub: mixing parameters, biases, sinks.
    Parameter,
    /// Expert ids per token id.
    ExpertIds,
}

/// Shape and role of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) shape: Vec<usize>,
    pub(crate) role: Role,
}

/// Hub name → tensor.
pub(crate) type Specs = BTreeMap<String, TensorSpec>;

struct Table<'a> {
    config: &'a Config,
    specs: Specs,
}

impl Table<'_> {
    fn add(&mut self, name: String, role: Role, shape: &[u32]) {
        let shape = shape.iter().map(|n| *n as usize).collect();
        self.specs.insert(name, TensorSpec { shape, role });
    }

    fn weight(&mut self, name: String, shape: &[u32]) {
        self.add(name + ".weight", Role::Weight, shape);
    }

    fn mixing(&mut self, prefix: &str, sub_layer: &str) {
        let (n, d) = (self.config.hc_mult, self.config.hidden_size);
        let rows = (2 + n) * n;
        self.add(
            format!("{prefix}.hc_{sub_layer}_fn"),
            Role::Parameter,
            &[rows, n * d],
        );
        self.add(
            format!("{prefix}.hc_{sub_layer}_base"),
            Role::Parameter,
            &[rows],
        );
        self.add(
            format!("{prefix}.hc_{sub_layer}_scale"),
            Role::Parameter,
            &[3],
        );
    }

    fn head_mixing(&mut self, prefix: &str) {
        let (n, d) = (self.config.hc_mult, self.config.hidden_size);
        self.add(format!("{prefix}hc_head_fn"), Role::Parameter, &[n, n * d]);
        self.add(format!("{prefix}hc_head_base"), Role::Parameter, &[n]);
        self.add(format!("{prefix}hc_head_scale"), Role::Parameter, &[1]);
    }

    fn compressor(&mut self, prefix: &str, ratio: u32, width: u32) {
        let (rows, d) = (
            if ratio == 4 { 2 * width } else { width },
            self.config.hidden_size,
        );
        self.weight(format!("{prefix}.wkv"), &[rows, d]);
        self.weight(format!("{prefix}.wgate"), &[rows, d]);
        self.add(format!("{prefix}.ape"), Role::Parameter, &[ratio, rows]);
        self.weight(format!("{prefix}.norm"), &[width]);
    }

    fn attention(&mut self, prefix: &str, ratio: u32) {
        let c = self.config;
        let (d, heads, dim) = (c.hidden_size, c.num_attention_heads, c.head_dim);
        let a = format!("{prefix}.attn");
        self.add(format!("{a}.attn_sink"), Role::Parameter, &[heads]);
        self.weight(format!("{a}.wq_a"), &[c.q_lora_rank, d]);
        self.weight(format!("{a}.q_norm"), &[c.q_lora_rank]);
        self.weight(format!("{a}.wq_b"), &[heads * dim, c.q_lora_rank]);
        self.weight(format!("{a}.wkv"), &[dim, d]);
        self.weight(format!("{a}.kv_norm"), &[dim]);
        let group_rows = c.o_groups * c.o_lora_rank;
        self.weight(format!("{a}.wo_a"), &[group_rows, heads / c.o_groups * dim]);
        self.weight(format!("{a}.wo_b"), &[d, group_rows]);
        if ratio != 0 {
            self.compressor(&format!("{a}.compressor"), ratio, dim);
        }
        if ratio == 4 {
            let x = format!("{a}.indexer");
            self.weight(
                format!("{x}.wq_b"),
                &[c.index_n_heads * c.index_head_dim, c.q_lora_rank],
            );
            self.weight(format!("{x}.weights_proj"), &[c.index_n_heads, d]);
            self.compressor(&format!("{x}.compressor"), 4, c.index_head_dim);
        }
    }

    fn experts(&mut self, prefix: &str, is_hash: bool) {
        let c = self.config;
        let (d, width) = (c.hidden_size, c.moe_intermediate_size);
        let f = format!("{prefix}.ffn");
        self.weight(format!("{f}.gate"), &[c.n_routed_experts, d]);
        if is_hash {
            self.add(
                format!("{f}.gate.tid2eid"),
                Role::ExpertIds,
                &[c.vocab_size, c.num_experts_per_tok],
            );
        } else {
            self.add(
                format!("{f}.gate.bias"),
                Role::Parameter,
                &[c.n_routed_experts],
            );
        }
        let routed = (0..c.n_routed_experts).map(|e| format!("{f}.experts.{e}"));
        for expert in routed.chain([format!("{f}.shared_experts")]) {
            self.weight(format!("{expert}.w1"), &[width, d]);
            self.weight(format!("{expert}.w3"), &[width, d]);
            self.weight(format!("{expert}.w2"), &[d, width]);
        }
    }

    fn block(&mut self, prefix: &str, ratio: u32, is_hash: bool) {
        let d = self.config.hidden_size;
        self.weight(format!("{prefix}.attn_norm"), &[d]);
        self.weight(format!("{prefix}.ffn_norm"), &[d]);
        self.mixing(prefix, "attn");
        self.mixing(prefix, "ffn");
        self.attention(prefix, ratio);
        self.experts(prefix, is_hash);
    }
}

/// The tensors that the model loads.
pub(crate) fn main_specs(config: &Config) -> Specs {
    let mut table = Table {
        config,
        specs: Specs::new(),
    };
    let (v, d) = (config.vocab_size, config.hidden_size);
    table.weight("embed".into(), &[v, d]);
    table.weight("head".into(), &[v, d]);
    table.weight("norm".into(), &[d]);
    table.head_mixing("");
    for (i, ratio) in config.compress_ratios.iter().enumerate() {
        table.block(
            &format!("layers.{i}"),
            *ratio,
            (i as u32) < config.num_hash_layers,
        );
    }
    table.specs
}

/// The tensors of the draft blocks: their shapes are checked where they are present.
pub(crate) fn draft_specs(config: &Config) -> Specs {
    let mut table = Table {
        config,
        specs: Specs::new(),
    };
    let d = config.hidden_size;
    for i in 0..config.num_nextn_predict_layers {
        let p = format!("mtp.{i}");
        table.block(&p, 0, false);
        table.head_mixing(&format!("{p}."));
        for norm in ["enorm", "hnorm", "norm"] {
            table.weight(format!("{p}.{norm}"), &[d]);
        }
        table.weight(format!("{p}.e_proj"), &[d, d]);
        table.weight(format!("{p}.h_proj"), &[d, d]);
    }
    table.specs
}

/// The hub name of a name that DeepSeek's converter accepts; `None` for the tensors it skips
/// (embedding and head copies of draft blocks).
pub(crate) fn hub_name(name: &str) -> Option<String> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let segments: Vec<&str> = name
        .split('.')
        .map(|segment| match segment {
            "self_attn" => "attn",
            "mlp" => "ffn",
            "weight_scale_inv" => "scale",
            "e_score_correction_bias" => "bias",
            other => other,
        })
        .collect();
    let copies = [
        "embed",
        "emb",
        "embed_tokens",
        "head",
        "lm_head",
        "shared_head",
    ];
    if segments.len() > 3 && segments[0] == "mtp" && copies.contains(&segments[2]) {
        return None;
    }
    Some(segments.join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_become_hub_names() {
        let hub = |n| hub_name(n).unwrap();
        assert_eq!(
            hub("model.layers.3.self_attn.wq_a.weight"),
            "layers.3.attn.wq_a.weight"
        );
        assert_eq!(
            hub("layers.1.mlp.gate.e_score_correction_bias"),
            "layers.1.ffn.gate.bias"
        );
        assert_eq!(
            hub("layers.1.mlp.experts.2.w1.weight_scale_inv"),
            "layers.1.ffn.experts.2.w1.scale"
        );
        assert_eq!(hub_name("mtp.0.embed.weight"), None);
        assert_eq!(hub("mtp.0.norm.weight"), "mtp.0.norm.weight");
        assert_eq!(hub("mtp.0.hc_head_fn"), "mtp.0.hc_head_fn");
    }
}
