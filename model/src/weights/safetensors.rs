//! The safetensors container: a length, a JSON header, tightly packed tensors.
//!
//! Files come from outside, so the header is checked before anything is allocated or read: its
//! length, every dtype, shape and offset, that tensors follow each other without gap or overlap, and
//! that the file ends with the last of them.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::ModelError;

/// Header limit of the format.
const HEADER_LIMIT_BYTES: u64 = 100_000_000;

/// Element types of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
}

const DTYPES: [(Dtype, &str, usize); 16] = [
    (Dtype::Bool, "BOOL", 1),
    (Dtype::U8, "U8", 1),
    (Dtype::I8, "I8", 1),
    (Dtype::F8E4M3, "F8_E4M3", 1),
    (Dtype::F8E5M2, "F8_E5M2", 1),
    (Dtype::F8E8M0, "F8_E8M0", 1),
    (Dtype::I16, "I16", 2),
    (Dtype::U16, "U16", 2),
    (Dtype::F16, "F16", 2),
    (Dtype::Bf16, "BF16", 2),
    (Dtype::I32, "I32", 4),
    (Dtype::U32, "U32", 4),
    (Dtype::F32, "F32", 4),
    (Dtype::I64, "I64", 8),
    (Dtype::U64, "U64", 8),
    (Dtype::F64, "F64", 8),
];

impl Dtype {
    fn entry(self) -> (Dtype, &'static str, usize) {
        *DTYPES
            .iter()
            .find(|(d, ..)| *d == self)
            .unwrap_or(&DTYPES[0])
    }

    /// Name in the header.
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// Bytes of an element.
    pub fn element_bytes(self) -> usize {
        self.entry().2
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Absolute position of the first byte in the file.
    offset_bytes: u64,
    len_bytes: usize,
}

/// A tensor in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Little-endian elements, row-major.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// An f32 tensor.
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// An i64 tensor.
    pub fn i64(shape: &[usize], values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self {
            dtype: Dtype::I64,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// The values of a BF16 or F32 tensor as f32; `None` for other types.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        match self.dtype {
            Dtype::F32 => Some(
                self.bytes
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                    .collect(),
            ),
            Dtype::Bf16 => {
                let value =
                    |b: &[u8]| kvgate_kernels::number::bf16_value(u16::from_le_bytes([b[0], b[1]]));
                Some(self.bytes.chunks_exact(2).map(value).collect())
            }
            _ => None,
        }
    }

    /// The values of an I32, I64 or U8 tensor as i64; `None` for other types.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        match self.dtype {
            Dtype::I64 => {
                let value =
                    |b: &[u8]| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                Some(self.bytes.chunks_exact(8).map(value).collect())
            }
            Dtype::I32 => {
                let value = |b: &[u8]| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                Some(self.bytes.chunks_exact(4).map(value).collect())
            }
            Dtype::U8 => Some(self.bytes.iter().map(|b| i64::from(*b)).collect()),
            _ => None,
        }
    }
}

/// An open file with a checked header.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, TensorInfo>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// The file cannot be read, or is not a complete safetensors file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |e| ModelError::io(path, e);
        let mut file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let mut length = [0u8; 8];
        if file_bytes < 8 {
            return Err(ModelError::corrupt(
                path,
                format!("truncated: {file_bytes} bytes, no header"),
            ));
        }
        file.read_exact(&mut length).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > HEADER_LIMIT_BYTES || header_bytes > file_bytes - 8 {
            let reason =
                format!("header of {header_bytes} bytes does not fit a file of {file_bytes} bytes");
            return Err(ModelError::corrupt(path, reason));
        }
        let mut header = vec![0u8; header_bytes as usize];
        file.read_exact(&mut header).map_err(io)?;
        let tensors = parse_header(&header, 8 + header_bytes, file_bytes)
            .map_err(|reason| ModelError::corrupt(path, reason))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            tensors,
        })
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads every tensor.
    ///
    /// # Errors
    /// Reading fails.
    pub fn read_all(&mut self) -> Result<BTreeMap<String, Tensor>, ModelError> {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        names
            .into_iter()
            .map(|name| self.read(&name).map(|tensor| (name, tensor)))
            .collect()
    }

    /// Reads one tensor.
    ///
    /// # Errors
    /// There is no such tensor, or reading fails.
    pub fn read(&mut self, name: &str) -> Result<Tensor, ModelError> {
        let Some(info) = self.tensors.get(name) else {
            return Err(ModelError::new(crate::ErrorKind::TensorMissing {
                name: name.to_owned(),
            }));
        };
        let mut bytes = vec![0u8; info.len_bytes];
        let result = self
            .file
            .seek(SeekFrom::Start(info.offset_bytes))
            .and_then(|_| self.file.read_exact(&mut bytes));
        result.map_err(|e| ModelError::io(&self.path, e))?;
        Ok(Tensor {
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes,
        })
    }
}

#[derive(Deserialize)]
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header as a list, so that a name that occurs twice is seen.
struct RawHeader(Vec<(String, RawInfo)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut list = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        list.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(list))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

fn parse_header(
    header: &[u8],
    data_start: u64,
    file_bytes: u64,
) -> Result<BTreeMap<String, TensorInfo>, String> {
    let RawHeader(list) =
        serde_json::from_slice(header).map_err(|e| format!("header is not valid: {e}"))?;
    let data_bytes = file_bytes - data_start;
    let mut seen = HashSet::new();
    let mut spans: Vec<(u64, u64, &str)> = Vec::with_capacity(list.len());
    let mut tensors = BTreeMap::new();
    for (name, raw) in &list {
        if !seen.insert(name.as_str()) {
            return Err(format!("tensor {name} occurs twice in the header"));
        }
        let info = check_tensor(name, raw, data_start, data_bytes)?;
        spans.push((raw.data_offsets[0], raw.data_offsets[1], name));
        tensors.insert(name.clone(), info);
    }
    spans.sort_unstable();
    let mut expected = 0;
    for (begin, end, name) in spans {
        if begin != expected {
            return Err(format!(
                "tensor {name} begins at byte {begin}, expected {expected}"
            ));
        }
        expected = end;
    }
    if expected != data_bytes {
        return Err(format!(
            "{data_bytes} bytes of data, the header describes {expected}"
        ));
    }
    Ok(tensors)
}

fn check_tensor(
    name: &str,
    raw: &RawInfo,
    data_start: u64,
    data_bytes: u64,
) -> Result<TensorInfo, String> {
    let Some((dtype, _, element_bytes)) = DTYPES.into_iter().find(|(_, n, _)| *n == raw.dtype)
    else {
        return Err(format!("tensor {name} has unknown dtype {:?}", raw.dtype));
    };
    let [begin, end] = raw.data_offsets;
    if begin > end || end > data_bytes {
        return Err(format!(
            "truncated: tensor {name} lies at {begin}..{end}, the file has {data_bytes} bytes of data"
        ));
    }
    let product = raw
        .shape
        .iter()
        .try_fold(element_bytes as u64, |n, dim| n.checked_mul(*dim));
    if product != Some(end - begin) {
        return Err(format!(
            "tensor {name} of shape {:?} has {} bytes of data",
            raw.shape,
            end - begin
        ));
    }
    let shape = raw
        .shape
        .iter()
        .map(|dim| usize::try_from(*dim))
        .collect::<Result<_, _>>();
    let (Ok(shape), Ok(len_bytes)) = (shape, usize::try_from(end - begin)) else {
        return Err(format!("tensor {name} does not fit the address space"));
    };
    Ok(TensorInfo {
        dtype,
        shape,
        offset_bytes: data_start + begin,
        len_bytes,
    })
}

/// Writes a safetensors file from named tensors; the data is made one tensor at a time.
///
/// # Errors
/// The file cannot be written, or `tensor` fails.
pub fn write_file<'a>(
    path: &Path,
    infos: &[(&'a str, Dtype, &[usize])],
    mut tensor: impl FnMut(&'a str) -> Result<Tensor, ModelError>,
) -> Result<(), ModelError> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    let mut offset = 0usize;
    for (name, dtype, shape) in infos {
        let len_bytes = shape.iter().product::<usize>() * dtype.element_bytes();
        let end = offset + len_bytes;
        let entry = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [offset, end]});
        header.insert((*name).to_owned(), entry);
        offset = end;
    }
    let mut text = serde_json::Value::Object(header).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let io = |e| ModelError::io(path, e);
    let mut out = BufWriter::new(File::create(path).map_err(io)?);
    out.write_all(&(text.len() as u64).to_le_bytes())
        .map_err(io)?;
    out.write_all(text.as_bytes()).map_err(io)?;
    for (name, ..) in infos {
        out.write_all(&tensor(name)?.bytes).map_err(io)?;
    }
    out.flush().map_err(io)
}

/// Writes tensors that are already in memory.
///
/// # Errors
/// The file cannot be written.
pub fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), ModelError> {
    let infos: Vec<(&str, Dtype, &[usize])> = tensors
        .iter()
        .map(|(n, t)| (n.as_str(), t.dtype, t.shape.as_slice()))
        .collect();
    write_file(path, &infos, |name| Ok(tensors[name].clone()))
}
