//! Why a run ended without a verdict: one value that carries the error line, the JSON object and the exit code.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The class of a [`Failure`]; it decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailureKind {
    /// The command line is wrong.
    Usage,
    /// A file, a model, a number or an address that cannot be used.
    BadInput,
    /// Something that was asked for by name cannot be used on this machine.
    Unavailable,
    /// The pools do not fit into the memory there is.
    OutOfMemory,
    /// The peer has other bytes in mind: another format, model or weights.
    SchemaMismatch,
    /// Bits differ that must be equal.
    Mismatch,
    /// The run ended well and shows nothing.
    ProvesNothing,
    /// A file could not be written.
    Output,
    /// Something that should not happen; a bug of this program.
    Internal,
    /// A process of the run died or closed its connection.
    PeerLost,
    /// Another process has what was asked for.
    Locked,
    /// A process of the run showed no progress for `--deadline-ms`.
    DeadlineExceeded,
    /// SIGINT.
    Interrupted,
    /// SIGTERM.
    Terminated,
}

impl FailureKind {
    /// The exit code of the class.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Usage
            | Self::BadInput
            | Self::Unavailable
            | Self::OutOfMemory
            | Self::SchemaMismatch
            | Self::ProvesNothing
            | Self::Output
            | Self::Internal => 2,
            Self::Mismatch => 1,
            Self::PeerLost | Self::Locked | Self::DeadlineExceeded => 3,
            Self::Interrupted => 130,
            Self::Terminated => 143,
        }
    }
}

/// A run that ended without a verdict about bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class.
    pub kind: FailureKind,
    /// One line: what happened, with the value and what was expected.
    pub message: String,
    /// The offending option, file, tensor or schema field.
    pub field: Option<String>,
    /// The offending value.
    pub value: Option<String>,
}

impl Failure {
    /// A failure without a field.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            field: None,
            value: None,
        }
    }

    /// Bad input in `field`.
    pub fn input(field: &str, value: impl fmt::Display, expected: &str) -> Self {
        Self::new(
            FailureKind::BadInput,
            format!("{field} is {value}, expected {expected}"),
        )
        .with_field(field, value)
    }

    /// A bug: something that the rest of the program excludes.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(FailureKind::Internal, message)
    }

    /// Names the offending field and its value.
    #[must_use]
    pub fn with_field(mut self, field: &str, value: impl fmt::Display) -> Self {
        self.field = Some(field.to_owned());
        self.value = Some(value.to_string());
        self
    }

    /// The exit code of the run.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        self.kind.exit_code()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
