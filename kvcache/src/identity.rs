//! Names of blocks of tokens: the one key function for lookup, insertion, storage and prefetch.
//!
//! A [`BlockKey`] is SHA-256 over the namespace, the key of the block before it, the tokens of the
//! block and what else decides its content, so that a key says everything before it too. The
//! [`Namespace`] covers whatever decides the shape or the meaning of a byte: the model and its
//! weights, the format of every component, page sizes, gate convention, format version, tenant salt.
//!
//! Integers are little-endian. The bytes that are hashed:
//! ```text
//! namespace  "kvgate namespace" | key version u32 | fingerprint [32] | block tokens u32
//!            | salt bytes u32 | salt
//! root key   = namespace digest
//! block key  namespace digest [32] | parent key [32] | token count u32 | tokens u32 each
//!            | extra count u32 | per extra: name bytes u32 | name | 0u8, or 1u8 | value bytes u32 | value
//! ```

use std::fmt;

use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind};
use crate::fingerprint::Fingerprint;
use crate::schema::{CacheSchema, PAGE_TOKENS};

/// Version of what is hashed. Another version is another namespace.
pub const KEY_VERSION: u32 = 1;

/// Longest tenant salt, in bytes.
pub const SALT_LIMIT_BYTES: usize = 128;

/// Block lengths that leave no group of a compressed component open, in tokens.
pub const BLOCK_TOKENS: [u32; 2] = [PAGE_TOKENS, 128];

/// Digest of a [`Namespace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceDigest(pub [u8; 32]);

impl fmt::Display for NamespaceDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

/// Everything but the tokens that decides the bytes of a block. Blocks of two namespaces have no
/// key in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    digest: NamespaceDigest,
    block_tokens: u32,
}

impl Namespace {
    /// The namespace of one schema and one tenant. The salt comes from the server, never from its
    /// client; an empty one is a tenant of its own.
    ///
    /// # Errors
    /// `SaltTooLong`, and `InvalidRequest` for a block length that is not in [`BLOCK_TOKENS`].
    pub fn new(schema: &CacheSchema, block_tokens: u32, salt: &[u8]) -> Result<Namespace, Error> {
        if !BLOCK_TOKENS.contains(&block_tokens) {
            return Err(ErrorKind::InvalidRequest {
                field: "block_tokens",
                value: u64::from(block_tokens),
                expected: "256 or 128".to_owned(),
            }
            .into());
        }
        if salt.len() > SALT_LIMIT_BYTES {
            return Err(ErrorKind::SaltTooLong {
                salt_bytes: salt.len() as u64,
                limit_bytes: SALT_LIMIT_BYTES as u64,
            }
            .into());
        }
        Ok(Namespace::of_parts(
            &schema.fingerprint(),
            block_tokens,
            salt,
        ))
    }

    /// The namespace of a schema without a salt, in blocks of a logical page.
    pub(crate) fn of_schema(schema: &CacheSchema) -> Namespace {
        Namespace::of_parts(&schema.fingerprint(), PAGE_TOKENS, &[])
    }

    fn of_parts(fingerprint: &Fingerprint, block_tokens: u32, salt: &[u8]) -> Namespace {
        let mut hasher = Sha256::new();
        hasher.update(b"kvgate namespace");
        hasher.update(KEY_VERSION.to_le_bytes());
        hasher.update(fingerprint);
        hasher.update(block_tokens.to_le_bytes());
        hasher.update((salt.len() as u32).to_le_bytes());
        hasher.update(salt);
        Namespace {
            digest: NamespaceDigest(hasher.finalize().into()),
            block_tokens,
        }
    }

    /// Its digest: part of every key and of every stored record.
    pub fn digest(&self) -> NamespaceDigest {
        self.digest
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// The key of the empty prefix: the parent of the first block.
    pub fn root(&self) -> BlockKey {
        BlockKey(self.digest.0)
    }
}

/// The name of one full block of tokens behind a certain prefix, in one namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 32]);

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

/// Something beside the tokens that decides the content of a block: an adapter and its revision, the
/// digest of an image and where it begins. It belongs to the block in which it occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtraKey<'a> {
    /// What it is, for example `lora`.
    pub name: &'a str,
    /// Its value. Absent and empty are two different things.
    pub value: Option<&'a [u8]>,
}

/// The key of one block: of `tokens` and `extras` behind the prefix `parent`.
pub fn block_key(
    namespace: &NamespaceDigest,
    parent: &BlockKey,
    tokens: &[u32],
    extras: &[ExtraKey<'_>],
) -> BlockKey {
    let mut input = Vec::with_capacity(72 + 4 * tokens.len());
    input.extend_from_slice(&namespace.0);
    input.extend_from_slice(&parent.0);
    push_u32(&mut input, tokens.len());
    input.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    push_u32(&mut input, extras.len());
    for extra in extras {
        push_bytes(&mut input, extra.name.as_bytes());
        input.push(u8::from(extra.value.is_some()));
        if let Some(value) = extra.value {
            push_bytes(&mut input, value);
        }
    }
    BlockKey(Sha256::digest(&input).into())
}

fn push_u32(input: &mut Vec<u8>, value: usize) {
    input.extend_from_slice(&(value as u32).to_le_bytes());
}

fn push_bytes(input: &mut Vec<u8>, bytes: &[u8]) {
    push_u32(input, bytes.len());
    input.extend_from_slice(bytes);
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// The keys of a growing sequence. Each block is hashed once, when its last token arrives.
#[derive(Clone, Debug)]
pub struct KeyChain {
    namespace: Namespace,
    keys: Vec<BlockKey>,
    open: Vec<u32>,
    /// Name and value of what belongs to the open block.
    open_extras: Vec<(String, Option<Vec<u8>>)>,
    hash_calls: u64,
}

impl KeyChain {
    /// The keys of the empty sequence.
    pub fn new(namespace: &Namespace) -> KeyChain {
        KeyChain {
            namespace: namespace.clone(),
            keys: Vec::new(),
            open: Vec::new(),
            open_extras: Vec::new(),
            hash_calls: 0,
        }
    }

    /// The keys of a whole sequence without extra keys.
    pub fn of(namespace: &Namespace, tokens: &[u32]) -> KeyChain {
        let mut chain = KeyChain::new(namespace);
        chain.extend(tokens);
        chain
    }

    /// Appends tokens. Answers how many blocks were completed.
    pub fn extend(&mut self, mut tokens: &[u32]) -> usize {
        let block_tokens = self.namespace.block_tokens as usize;
        let before = self.keys.len();
        while self.open.len() + tokens.len() >= block_tokens {
            let (head, rest) = tokens.split_at(block_tokens - self.open.len());
            tokens = rest;
            if self.open.is_empty() {
                self.close(head);
            } else {
                let mut block = std::mem::take(&mut self.open);
                block.extend_from_slice(head);
                self.close(&block);
            }
        }
        self.open.extend_from_slice(tokens);
        self.keys.len() - before
    }

    /// Says that something beside the tokens occurs at the next token.
    pub fn note(&mut self, extra: ExtraKey<'_>) {
        let value = extra.value.map(<[u8]>::to_vec);
        self.open_extras.push((extra.name.to_owned(), value));
    }

    fn close(&mut self, block: &[u32]) {
        let noted = std::mem::take(&mut self.open_extras);
        let extras: Vec<ExtraKey<'_>> = noted
            .iter()
            .map(|(name, value)| ExtraKey {
                name,
                value: value.as_deref(),
            })
            .collect();
        let key = block_key(&self.namespace.digest, &self.parent(), block, &extras);
        self.hash_calls += 1;
        self.keys.push(key);
    }

    /// The key of the last full block, or the root: the parent of the next one.
    pub fn parent(&self) -> BlockKey {
        let last = self.keys.last().copied();
        last.unwrap_or_else(|| self.namespace.root())
    }

    /// Keys of the full blocks, in order.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Tokens so far, those of the open block included.
    pub fn token_count(&self) -> u64 {
        self.keys.len() as u64 * u64::from(self.namespace.block_tokens) + self.open.len() as u64
    }

    /// How often the key function ran: once per full block.
    pub fn hash_calls(&self) -> u64 {
        self.hash_calls
    }

    /// The namespace of the keys.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }
}

#[cfg(all(test, not(kv_loom)))]
#[path = "identity_tests.rs"]
mod tests;
