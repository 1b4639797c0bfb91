//! Typed access to the fields of a JSON object, with errors that name field and value.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// The fields of one object.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map }
    }

    /// The raw value; `null` counts as absent.
    pub(super) fn value(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    pub(super) fn refuse(
        &self,
        field: &str,
        value: Option<&Value>,
        expected: impl Into<String>,
    ) -> ModelError {
        let shown = match value {
            None => "missing".to_owned(),
            Some(v) => {
                let mut text = v.to_string();
                if let Some((cut, _)) = text.char_indices().nth(120) {
                    text.truncate(cut);
                    text.push('…');
                }
                text
            }
        };
        ModelError::config(field, shown, expected)
    }

    pub(super) fn int(&self, field: &str, range: RangeInclusive<u32>) -> Result<u32, ModelError> {
        let value = self.value(field);
        let number = value
            .and_then(Value::as_u64)
            .and_then(|v| u32::try_from(v).ok());
        match number {
            Some(v) if range.contains(&v) => Ok(v),
            _ => Err(self.refuse(
                field,
                value,
                format!("an integer from {} to {}", range.start(), range.end()),
            )),
        }
    }

    pub(super) fn int_or(
        &self,
        field: &str,
        usual: u32,
        range: RangeInclusive<u32>,
    ) -> Result<u32, ModelError> {
        if self.value(field).is_none() {
            Ok(usual)
        } else {
            self.int(field, range)
        }
    }

    fn number(
        &self,
        field: &str,
        expected: &str,
        accept: impl Fn(f64) -> bool,
    ) -> Result<f64, ModelError> {
        let value = self.value(field);
        match value.and_then(Value::as_f64) {
            Some(v) if v.is_finite() && accept(v) && (v as f32).is_finite() => Ok(v),
            _ => Err(self.refuse(field, value, expected)),
        }
    }

    pub(super) fn positive(&self, field: &str) -> Result<f64, ModelError> {
        self.number(field, "a positive number", |v| v > 0.0)
    }

    pub(super) fn not_negative(&self, field: &str) -> Result<f64, ModelError> {
        self.number(field, "a number that is not negative", |v| v >= 0.0)
    }

    pub(super) fn above_one(&self, field: &str) -> Result<f64, ModelError> {
        self.number(field, "a number above 1", |v| v > 1.0)
    }

    /// A list of `count` strings; if it is absent, the error names `legacy`.
    pub(super) fn strings(
        &self,
        field: &str,
        count: u32,
        legacy: &str,
    ) -> Result<Vec<&'a str>, ModelError> {
        let Some(value) = self.value(field) else {
            return Err(self.refuse(legacy, None, format!("{legacy} or {field}")));
        };
        let list: Option<Vec<&str>> = value
            .as_array()
            .and_then(|a| a.iter().map(Value::as_str).collect());
        match list {
            Some(list) if list.len() == count as usize => Ok(list),
            _ => Err(self.refuse(field, Some(value), format!("a list of {count} names"))),
        }
    }
}
