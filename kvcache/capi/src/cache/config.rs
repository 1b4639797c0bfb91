//! What of a model's `config.json` decides the shape and the meaning of its cache.

use kvgate_kvcache::{V4Geometry, Yarn};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::status::{Failure, Outcome};

const ARCHITECTURE: &str = "DeepseekV4ForCausalLM";

/// The geometry that a `config.json` of DeepSeek-V4 describes. Digests are left to the caller.
pub(crate) fn geometry_of(text: &str) -> Outcome<V4Geometry> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| Failure::argument(format!("config_json is not JSON: {error}")))?;
    let Value::Object(map) = &value else {
        return Err(Failure::argument("config_json is not an object"));
    };
    let fields = Fields { map, path: "" };
    let model = fields.text("model_type")?;
    if model != "deepseek_v4" {
        return Err(fields.refuse("model_type", "\"deepseek_v4\""));
    }
    let layer_count = fields.int("num_hidden_layers")?;
    let head_dim = fields.int("head_dim")?;
    let main = fields.group("rope_parameters", "main");
    let compress = fields.group("rope_parameters", "compress");
    let theta = |group: Option<Fields<'_>>, outer: &str| match group {
        Some(group) if group.has("rope_theta") => group.positive("rope_theta"),
        _ => fields.positive(outer),
    };
    Ok(V4Geometry {
        layer_ratios: layer_ratios(fields, layer_count)?,
        head_dim,
        rope_dim: rope_dim(fields, head_dim)?,
        index_head_dim: fields.int("index_head_dim")?,
        window_tokens: fields.int("sliding_window")?,
        rope_theta: theta(main, "rope_theta")?,
        compress_rope_theta: theta(compress, "compress_rope_theta")?,
        yarn: yarn(fields, compress)?,
        drafting: false,
        architecture: ARCHITECTURE.to_owned(),
        config_digest: digest(&value),
        weights_digest: [0; 32],
    })
}

fn rope_dim(fields: Fields<'_>, head_dim: u32) -> Outcome<u32> {
    if fields.has("qk_rope_head_dim") || !fields.has("partial_rotary_factor") {
        return fields.int("qk_rope_head_dim");
    }
    let share = fields.positive("partial_rotary_factor")?;
    Ok((f64::from(head_dim) * share) as u32)
}

/// `compress_ratios` of the main layers, or what `layer_types` says.
fn layer_ratios(fields: Fields<'_>, layer_count: u32) -> Outcome<Vec<u32>> {
    let field = if fields.has("compress_ratios") {
        "compress_ratios"
    } else {
        "layer_types"
    };
    let expected = format!("a list with an entry for each of {layer_count} layers");
    let list = fields.value(field).and_then(Value::as_array);
    let list = list.and_then(|list| list.get(..layer_count as usize));
    let list = list.ok_or_else(|| fields.refuse(field, &expected))?;
    let ratio = |(index, entry): (usize, &Value)| {
        let found = match entry.as_str() {
            Some("sliding_attention") => Some(0),
            Some("compressed_sparse_attention") => Some(4),
            Some("heavily_compressed_attention") => Some(128),
            _ => entry.as_u64(),
        };
        match found {
            Some(ratio @ (0 | 4 | 128)) => Ok(ratio as u32),
            _ => Err(Failure::argument(format!(
                "config_json: {field}[{index}] is {entry}, expected 0, 4 or 128, or an attention type"
            ))),
        }
    };
    list.iter().enumerate().map(ratio).collect()
}

fn yarn(fields: Fields<'_>, compress: Option<Fields<'_>>) -> Outcome<Yarn> {
    let scaling = match fields.value("rope_scaling") {
        Some(Value::Object(map)) => Some(Fields {
            map,
            path: "rope_scaling.",
        }),
        _ => compress,
    };
    let scaling = scaling.ok_or_else(|| fields.refuse("rope_scaling", "the YaRN parameters"))?;
    Ok(Yarn {
        factor: scaling.positive("factor")?,
        original_max_position_embeddings: scaling.int("original_max_position_embeddings")?,
        beta_fast: scaling.positive("beta_fast")?,
        beta_slow: scaling.positive("beta_slow")?,
    })
}

/// The fields of one object; `null` counts as absent.
#[derive(Clone, Copy)]
struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: &'static str,
}

impl<'a> Fields<'a> {
    fn value(self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn has(self, field: &str) -> bool {
        self.value(field).is_some()
    }

    fn group(self, outer: &str, inner: &str) -> Option<Fields<'a>> {
        let map = self.value(outer)?.get(inner)?.as_object()?;
        Some(Fields {
            map,
            path: "rope_parameters.",
        })
    }

    fn refuse(self, field: &str, expected: &str) -> Failure {
        let found = match self.value(field) {
            None => "missing".to_owned(),
            Some(value) => {
                let text = value.to_string();
                text[..text.floor_char_boundary(80)].to_owned()
            }
        };
        let path = self.path;
        let message = format!("config_json: {path}{field} is {found}, expected {expected}");
        Failure::argument(message)
    }

    fn text(self, field: &str) -> Outcome<&'a str> {
        let text = self.value(field).and_then(Value::as_str);
        text.ok_or_else(|| self.refuse(field, "a text"))
    }

    fn int(self, field: &str) -> Outcome<u32> {
        let number = self.value(field).and_then(Value::as_u64);
        number
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| self.refuse(field, "an integer of 32 bits"))
    }

    fn positive(self, field: &str) -> Outcome<f64> {
        let number = self.value(field).and_then(Value::as_f64);
        number
            .filter(|number| number.is_finite() && *number > 0.0)
            .ok_or_else(|| self.refuse(field, "a positive number"))
    }
}

/// SHA-256 over the value, whatever the order and the spacing of the file.
fn digest(value: &Value) -> [u8; 32] {
    let mut text = String::new();
    write_sorted(value, &mut text);
    Sha256::digest(text).into()
}

fn write_sorted(value: &Value, into: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(name, _)| *name);
            into.push('{');
            for (name, value) in entries {
                into.push_str(&Value::from(name.as_str()).to_string());
                into.push(':');
                write_sorted(value, into);
                into.push(',');
            }
            into.push('}');
        }
        Value::Array(list) => {
            into.push('[');
            for value in list {
                write_sorted(value, into);
                into.push(',');
            }
            into.push(']');
        }
        other => into.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASIC: &str = r#"{
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "num_nextn_predict_layers": 1,
        "head_dim": 96, "qk_rope_head_dim": 32, "index_head_dim": 64, "sliding_window": 16,
        "rope_theta": 10000, "compress_rope_theta": 160000, "compress_ratios": [0, 4, 128, 0],
        "rope_scaling": { "type": "yarn", "factor": 16, "original_max_position_embeddings": 256,
                          "beta_fast": 32, "beta_slow": 1 } }"#;

    /// The basic configuration in the other spelling.
    const NAMED: &str = r#"{
        "model_type": "deepseek_v4", "num_hidden_layers": 3, "head_dim": 96,
        "partial_rotary_factor": 0.33334, "index_head_dim": 64, "sliding_window": 16,
        "layer_types": ["sliding_attention", "compressed_sparse_attention",
                        "heavily_compressed_attention"],
        "rope_parameters": {
            "main": { "rope_theta": 10000 },
            "compress": { "rope_type": "yarn", "rope_theta": 160000, "factor": 16,
                          "original_max_position_embeddings": 256, "beta_fast": 32,
                          "beta_slow": 1 } } }"#;

    #[test]
    fn both_spellings_of_a_configuration_give_one_geometry() {
        let (basic, mut named) = (geometry_of(BASIC).unwrap(), geometry_of(NAMED).unwrap());
        assert_eq!(basic.layer_ratios, [0, 4, 128]);
        assert_eq!(
            (basic.head_dim, basic.rope_dim, basic.window_tokens),
            (96, 32, 16)
        );
        assert_ne!(basic.config_digest, named.config_digest);
        named.config_digest = basic.config_digest;
        assert_eq!(basic, named);
    }

    #[test]
    fn the_digest_is_that_of_the_content() {
        let spaced = BASIC.replace(", ", " ,  ");
        let moved = BASIC.replace(r#""head_dim": 96, "#, "");
        let moved = moved.replace(r#""sliding_window""#, r#""head_dim": 96, "sliding_window""#);
        let other = BASIC.replace("160000", "160001");
        let digest = |text: &str| geometry_of(text).unwrap().config_digest;
        assert_eq!(digest(BASIC), digest(&spaced));
        assert_eq!(digest(BASIC), digest(&moved));
        assert_ne!(digest(BASIC), digest(&other));
    }

    #[test]
    fn fields_that_cannot_be_right_are_named() {
        for (from, to, what) in [
            ("deepseek_v4", "llama", "model_type is \"llama\""),
            (r#""head_dim": 96"#, r#""head_dim": -1"#, "head_dim is -1"),
            ("160000", "0", "compress_rope_theta is 0"),
            ("128, 0]", "128, 0", "not JSON"),
            ("[0, 4, 128, 0]", "[0, 4]", "an entry for each of 3 layers"),
            ("[0, 4, 128, 0]", "[0, 5, 128]", "compress_ratios[1] is 5"),
            (
                r#""factor": 16"#,
                r#""factor": null"#,
                "rope_scaling.factor is missing",
            ),
            (
                r#""sliding_window": 16"#,
                r#""x": 16"#,
                "sliding_window is missing",
            ),
        ] {
            let failure = geometry_of(&BASIC.replace(from, to)).unwrap_err();
            assert!(
                format!("{failure:?}").contains(&format!("{what:?}")[1..what.len()]),
                "{failure:?}"
            );
        }
        assert!(geometry_of("[]").is_err());
    }
}
