//! `--fault KIND[,component=C][,layer=L][,page=P][,request=R]`.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The index_k view of a layer is handed out before arrival.
    UngatedIndexK,
    /// A write of an aborted request lands in its page's next owner.
    LateWrite,
    /// One descriptor is removed after planning, its chunk still redeemed.
    DropPage,
    /// Two destination slots are exchanged.
    SwapPages,
    /// The second half of the last live row range is not written.
    HalfPage,
    /// The destination moves by 16 bytes a page.
    WrongStride,
    /// A completion of a former attempt is redeemed.
    StaleEpoch,
    /// All tickets are redeemed before the last write.
    EarlyDone,
    /// `LateWrite` with the quiesce check on.
    LateWriteChecked,
    /// `StaleEpoch` with the epoch check on.
    StaleEpochChecked,
    /// `EarlyDone` with the completion-level check on.
    EarlyDoneChecked,
    /// Every completion is sent twice.
    Duplicate,
}

impl FaultKind {
    /// Every kind, in the order of the table of kinds.
    pub const ALL: [Self; 12] = [
        Self::UngatedIndexK,
        Self::LateWrite,
        Self::DropPage,
        Self::SwapPages,
        Self::HalfPage,
        Self::WrongStride,
        Self::StaleEpoch,
        Self::EarlyDone,
        Self::LateWriteChecked,
        Self::StaleEpochChecked,
        Self::EarlyDoneChecked,
        Self::Duplicate,
    ];

    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::UngatedIndexK => "ungated-index-k",
            Self::LateWrite => "late-write",
            Self::DropPage => "drop-page",
            Self::SwapPages => "swap-pages",
            Self::HalfPage => "half-page",
            Self::WrongStride => "wrong-stride",
            Self::StaleEpoch => "stale-epoch",
            Self::EarlyDone => "early-done",
            Self::LateWriteChecked => "late-write-checked",
            Self::StaleEpochChecked => "stale-epoch-checked",
            Self::EarlyDoneChecked => "early-done-checked",
            Self::Duplicate => "duplicate",
        }
    }

    /// The check that would stop the fault stays on, so the run must end well.
    #[must_use]
    pub fn is_checked(self) -> bool {
        matches!(
            self,
            Self::LateWriteChecked
                | Self::StaleEpochChecked
                | Self::EarlyDoneChecked
                | Self::Duplicate
        )
    }

    /// A write that is held until its page has a new owner.
    #[must_use]
    pub fn is_late_write(self) -> bool {
        matches!(self, Self::LateWrite | Self::LateWriteChecked)
    }

    /// A completion of an attempt that was given up.
    #[must_use]
    pub fn is_stale_epoch(self) -> bool {
        matches!(self, Self::StaleEpoch | Self::StaleEpochChecked)
    }

    /// A completion ahead of its bytes.
    #[must_use]
    pub fn is_early_done(self) -> bool {
        matches!(self, Self::EarlyDone | Self::EarlyDoneChecked)
    }
}

/// A fault as asked for: what is left out is drawn from the seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultSpec {
    /// What is planted.
    pub kind: FaultKind,
    /// A component id of the schema.
    pub component: Option<String>,
    /// A layer, from 0.
    pub layer: Option<u16>,
    /// The request's own page of that component and layer, from 0.
    pub page: Option<u32>,
    /// The request, from 0.
    pub request: Option<u32>,
    /// Draws what is left out.
    pub seed: u64,
}

impl FromStr for FaultSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let word = parts.next().unwrap_or_default();
        let kind = FaultKind::ALL
            .into_iter()
            .find(|kind| kind.id() == word)
            .ok_or_else(|| {
                let ids: Vec<_> = FaultKind::ALL.iter().map(|kind| kind.id()).collect();
                format!("unknown kind {word:?}, expected none, {}", ids.join(", "))
            })?;
        let mut spec = Self {
            kind,
            component: None,
            layer: None,
            page: None,
            request: None,
            seed: 1,
        };
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!("{part:?} is not KEY=VALUE"));
            };
            match key {
                "component" => set(&mut spec.component, key, value.to_owned())?,
                "layer" => set(&mut spec.layer, key, number(key, value)?)?,
                "page" => set(&mut spec.page, key, number(key, value)?)?,
                "request" => set(&mut spec.request, key, number(key, value)?)?,
                _ => {
                    return Err(format!(
                        "unknown key {key:?}, expected component, layer, page or request"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

fn set<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    if slot.replace(value).is_some() {
        return Err(format!("{key} is given twice"));
    }
    Ok(())
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("{key}={value} is not a number in range"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_parses_under_its_id() {
        for kind in FaultKind::ALL {
            assert_eq!(kind.id().parse::<FaultSpec>().unwrap().kind, kind);
        }
    }

    #[test]
    fn place_is_read_and_junk_refused() {
        let spec: FaultSpec = "drop-page,component=index_k,layer=3,page=2,request=1"
            .parse()
            .unwrap();
        assert_eq!(spec.component.as_deref(), Some("index_k"));
        assert_eq!(
            (spec.layer, spec.page, spec.request),
            (Some(3), Some(2), Some(1))
        );
        for text in [
            "",
            "drop",
            "drop-page,layer",
            "drop-page,layer=x",
            "drop-page,layer=1,layer=2",
            "drop-page,row=1",
        ] {
            assert!(text.parse::<FaultSpec>().is_err(), "{text}");
        }
    }
}
