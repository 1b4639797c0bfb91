//! What two peers must agree on before a page crosses: the fields of the format descriptor, their
//! hash, and the first one that differs.

use sha2::{Digest, Sha256};

use crate::geometry::IndexKFormat;
use crate::layout::RowFormat;
use crate::schema::{CacheSchema, Component, ComponentRow, LiveRule, PAGE_TOKENS};

/// SHA-256 over the sorted fields of a schema.
pub type Fingerprint = [u8; 32];

/// A field that one of two schemas lacks.
pub const ABSENT: &str = "absent";

/// The first field in which two schemas differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldDifference {
    /// Name of the field, for example `index_k.encoding`.
    pub field: String,
    /// Our value.
    pub ours: String,
    /// The value of the other side.
    pub theirs: String,
}

impl CacheSchema {
    /// Every field that decides the shape or the meaning of a byte, as name and value. The order is
    /// that in which a difference is reported: the encoding of a component before what follows from
    /// it, the layout before the model.
    pub fn fields(&self) -> Vec<(String, String)> {
        let mut fields = Fields::default();
        fields.push("page_tokens", PAGE_TOKENS);
        fields.push("arrangement", "per_layer");
        for component in Component::ALL {
            let of_component = |row: &&ComponentRow| row.component == component;
            let rows: Vec<&ComponentRow> = self.rows().iter().filter(of_component).collect();
            if let Some(first) = rows.first() {
                self.push_component(&mut fields, first, &rows);
            }
        }
        self.push_model(&mut fields);
        fields.0
    }

    /// Hash over the sorted fields.
    pub fn fingerprint(&self) -> Fingerprint {
        fingerprint_of(self.fields())
    }

    /// The first field, in the order of [`CacheSchema::fields`], that is not equal; then fields
    /// that only the other side has.
    pub fn first_difference(&self, theirs: &[(String, String)]) -> Option<FieldDifference> {
        let ours = self.fields();
        let find = |fields: &[(String, String)], name: &str| {
            fields
                .iter()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value.clone())
        };
        let absent = || ABSENT.to_owned();
        for (field, value) in &ours {
            let other = find(theirs, field).unwrap_or_else(absent);
            if other != *value {
                return Some(FieldDifference {
                    field: field.clone(),
                    ours: value.clone(),
                    theirs: other,
                });
            }
        }
        let (field, value) = theirs
            .iter()
            .find(|(field, _)| find(&ours, field).is_none())?;
        Some(FieldDifference {
            field: field.clone(),
            ours: absent(),
            theirs: value.clone(),
        })
    }

    fn push_component(&self, fields: &mut Fields, row: &ComponentRow, rows: &[&ComponentRow]) {
        let name = row.component.id();
        let mut push = |field: &str, value: String| fields.push(&format!("{name}.{field}"), value);
        push("encoding", row.format.encoding().to_owned());
        push("rows_per_page", row.rows_per_page.to_string());
        push("entries_per_page", row.entries_per_page.to_string());
        push("row_bytes", row.row_bytes.to_string());
        push("used_bytes", row.used_bytes.to_string());
        push("stride_bytes", row.stride_bytes.to_string());
        push(
            "data_stride_bytes",
            row.format.data_stride_bytes().to_string(),
        );
        if let Some((base_bytes, stride_bytes)) = row.format.scale_section(row.rows_per_page) {
            push("scale_base_bytes", base_bytes.to_string());
            push("scale_stride_bytes", stride_bytes.to_string());
        }
        if row.component == Component::IndexK {
            push("hadamard", u8::from(self.index_k_is_rotated()).to_string());
        }
        if let Some(gate) = gate_convention(row) {
            push("gate", gate.to_owned());
            push("state_dtype", "f32".to_owned());
        }
        push("format_id", self.format_id(row));
        let layers: Vec<String> = rows.iter().map(|row| row.layer.to_string()).collect();
        push("layers", layers.join(","));
    }

    fn push_model(&self, fields: &mut Fields) {
        let geometry = self.geometry();
        let ratios: Vec<String> = geometry.layer_ratios.iter().map(u32::to_string).collect();
        fields.push("geometry.layer_ratios", ratios.join(","));
        fields.push("geometry.head_dim", geometry.head_dim);
        fields.push("geometry.rope_dim", geometry.rope_dim);
        fields.push("geometry.index_head_dim", geometry.index_head_dim);
        fields.push("geometry.window_tokens", geometry.window_tokens);
        fields.push("geometry.drafting", geometry.drafting);
        fields.push("rope.theta", geometry.rope_theta);
        fields.push("rope.compress_theta", geometry.compress_rope_theta);
        fields.push("rope.yarn_factor", geometry.yarn.factor);
        let original = geometry.yarn.original_max_position_embeddings;
        fields.push("rope.yarn_original_max_position_embeddings", original);
        fields.push("rope.yarn_beta_fast", geometry.yarn.beta_fast);
        fields.push("rope.yarn_beta_slow", geometry.yarn.beta_slow);
        fields.push("model.architecture", &geometry.architecture);
        fields.push("model.config_digest", hex(&geometry.config_digest));
        fields.push("model.weights_digest", hex(&geometry.weights_digest));
    }

    /// The canonical format id of a row, for example `index_k:bf16:p64:had1`.
    pub fn format_id(&self, row: &ComponentRow) -> String {
        let name = row.component.id();
        let encoding = row.format.encoding();
        match (row.format, gate_convention(row)) {
            (RowFormat::F32Rows { parts: 4, .. }, Some(gate)) => {
                format!("{name}:f32ring{}:{gate}", row.rows_per_page)
            }
            (_, Some(gate)) => format!("{name}:{encoding}:{gate}"),
            _ if row.component == Component::IndexK => {
                let had = u8::from(self.index_k_is_rotated());
                format!("{name}:{encoding}:p{}:had{had}", row.rows_per_page)
            }
            _ => format!("{name}:{encoding}:p{}", row.rows_per_page),
        }
    }

    fn index_k_is_rotated(&self) -> bool {
        self.formats().index_k != IndexKFormat::F32
    }
}

/// Hash over the sorted fields, one `name=value` line each.
pub fn fingerprint_of(mut fields: Vec<(String, String)>) -> Fingerprint {
    fields.sort();
    let mut hasher = Sha256::new();
    for (name, value) in fields {
        hasher.update(format!("{name}={value}\n").as_bytes());
    }
    hasher.finalize().into()
}

/// Whether stored gates contain the position term: not in ring rows, always in the online form.
fn gate_convention(row: &ComponentRow) -> Option<&'static str> {
    match row.component.spec().live {
        LiveRule::OverlapAndOpen => Some("raw"),
        LiveRule::OpenGroup => Some("biased"),
        LiveRule::Window | LiveRule::DraftWindow | LiveRule::ClosedGroups => None,
    }
}

#[derive(Default)]
struct Fields(Vec<(String, String)>);

impl Fields {
    fn push(&mut self, name: &str, value: impl ToString) {
        self.0.push((name.to_owned(), value.to_string()));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
