//! Errors of the model: what was refused, with the field, tensor or file and its value.

use std::fmt;
use std::path::{Path, PathBuf};

use kvgate_kernels::KernelError;

/// What went wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A configuration field is missing, has a wrong type, or a value that this model cannot have.
    Config {
        /// Field of config.json.
        field: String,
        /// Its value, or `missing`.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// A file could not be read or written.
    Io {
        /// The file.
        path: PathBuf,
    },
    /// A file is damaged or not of its format.
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint lacks a tensor.
    TensorMissing {
        /// Hub name.
        name: String,
    },
    /// The checkpoint has a tensor that the architecture does not have.
    TensorUnknown {
        /// Name as in the file.
        name: String,
    },
    /// Two tensors of the checkpoint have the same meaning.
    TensorDuplicate {
        /// Hub name.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    TensorShape {
        /// Hub name.
        name: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is stored in a type that this model does not compute with.
    TensorDtype {
        /// Name as in the file.
        name: String,
        /// Type in the file.
        got: String,
        /// Types that are accepted.
        expected: &'static str,
    },
    /// A tensor holds a value that it must not hold.
    TensorValue {
        /// Hub name.
        name: String,
        /// The value.
        value: String,
        /// What would be accepted.
        expected: String,
    },
    /// An argument of a call is outside its range.
    Input {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What would be accepted.
        expected: String,
    },
    /// A cache view lacks a component, or has it in a form that the layer cannot use.
    Cache {
        /// The layer.
        layer: u16,
        /// Component id.
        component: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A kernel refused its operands.
    Kernel,
    /// The cache refused: a lease, a gate or a schema.
    Lease,
}

/// An error of this crate.
#[derive(Debug)]
pub struct ModelError {
    kind: ErrorKind,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ModelError {
    /// What went wrong.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Whether the same call can succeed later. Only a cache that is not ready yet can change.
    pub fn is_retryable(&self) -> bool {
        let cause = self
            .source
            .as_deref()
            .and_then(|s| s.downcast_ref::<kvgate_kvcache::Error>());
        cause.is_some_and(kvgate_kvcache::Error::is_retryable)
    }

    /// The configuration field or tensor at fault, where there is one.
    pub fn field(&self) -> Option<&str> {
        match &self.kind {
            ErrorKind::Config { field, .. } => Some(field),
            ErrorKind::TensorMissing { name }
            | ErrorKind::TensorUnknown { name }
            | ErrorKind::TensorDuplicate { name }
            | ErrorKind::TensorShape { name, .. }
            | ErrorKind::TensorDtype { name, .. }
            | ErrorKind::TensorValue { name, .. } => Some(name),
            ErrorKind::Input { what, .. } => Some(what),
            ErrorKind::Io { .. } | ErrorKind::Corrupt { .. } => Some("file"),
            _ => None,
        }
    }

    /// The refused value, where there is one.
    pub fn value(&self) -> Option<String> {
        match &self.kind {
            ErrorKind::Config { value, .. } | ErrorKind::TensorValue { value, .. } => {
                Some(value.clone())
            }
            ErrorKind::TensorShape { got, .. } => Some(format!("{got:?}")),
            ErrorKind::TensorDtype { got, .. } => Some(got.clone()),
            ErrorKind::Input { value, .. } => Some(value.to_string()),
            ErrorKind::Io { path } | ErrorKind::Corrupt { path, .. } => {
                Some(path.display().to_string())
            }
            _ => None,
        }
    }

    /// An error of the given kind.
    pub fn new(kind: ErrorKind) -> Self {
        Self { kind, source: None }
    }

    pub(crate) fn config(
        field: impl Into<String>,
        value: impl fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Config {
            field: field.into(),
            value: value.to_string(),
            expected: expected.into(),
        })
    }

    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self {
            kind: ErrorKind::Io {
                path: path.to_owned(),
            },
            source: Some(Box::new(source)),
        }
    }

    pub(crate) fn corrupt(path: &Path, reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt {
            path: path.to_owned(),
            reason: reason.into(),
        })
    }

    pub(crate) fn input(what: &'static str, value: u64, expected: impl Into<String>) -> Self {
        Self::new(ErrorKind::Input {
            what,
            value,
            expected: expected.into(),
        })
    }

    pub(crate) fn cache(layer: u16, component: &'static str, reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Cache {
            layer,
            component,
            reason: reason.into(),
        })
    }
}

impl From<KernelError> for ModelError {
    fn from(source: KernelError) -> Self {
        Self {
            kind: ErrorKind::Kernel,
            source: Some(Box::new(source)),
        }
    }
}

impl From<kvgate_kvcache::Error> for ModelError {
    fn from(source: kvgate_kvcache::Error) -> Self {
        Self {
            kind: ErrorKind::Lease,
            source: Some(Box::new(source)),
        }
    }
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ErrorKind::Config {
                field,
                value,
                expected,
            } => {
                write!(f, "config.json: {field} is {value}, expected {expected}")?;
            }
            ErrorKind::Io { path } => write!(f, "{}", path.display())?,
            ErrorKind::Corrupt { path, reason } => write!(f, "{}: {reason}", path.display())?,
            ErrorKind::TensorMissing { name } => write!(f, "tensor {name} is missing")?,
            ErrorKind::TensorUnknown { name } => {
                write!(
                    f,
                    "tensor {name} is not a tensor of this architecture and configuration"
                )?;
            }
            ErrorKind::TensorDuplicate { name } => write!(f, "tensor {name} occurs twice")?,
            ErrorKind::TensorShape {
                name,
                got,
                expected,
            } => {
                write!(f, "tensor {name} has shape {got:?}, expected {expected:?}")?;
            }
            ErrorKind::TensorDtype {
                name,
                got,
                expected,
            } => {
                write!(f, "tensor {name} is stored as {got}, expected {expected}")?;
            }
            ErrorKind::TensorValue {
                name,
                value,
                expected,
            } => {
                write!(f, "tensor {name} holds {value}, expected {expected}")?;
            }
            ErrorKind::Input {
                what,
                value,
                expected,
            } => write!(f, "{what} is {value}, expected {expected}")?,
            ErrorKind::Cache {
                layer,
                component,
                reason,
            } => write!(f, "layer {layer}, {component}: {reason}")?,
            ErrorKind::Kernel => f.write_str("kernel refused")?,
            ErrorKind::Lease => f.write_str("cache")?,
        }
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ModelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|s| s as _)
    }
}
