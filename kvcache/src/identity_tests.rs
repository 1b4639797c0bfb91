use super::*;
use crate::geometry::{Formats, IndexKFormat, LatentFormat, V4Geometry};

const NONE: &[ExtraKey<'_>] = &[];

fn tokens(count: u32) -> Vec<u32> {
    (0..u64::from(count))
        .map(|i| ((i * 7919 + 3) % 129_280) as u32)
        .collect()
}

fn fixed_namespace(block_tokens: u32, salt: &[u8]) -> Namespace {
    let fingerprint = std::array::from_fn(|i| i as u8);
    Namespace::of_parts(&fingerprint, block_tokens, salt)
}

/// Computed by another program from the description at the head of the module.
#[test]
fn keys_are_the_same_on_every_machine() {
    let golden = [
        (
            fixed_namespace(256, b""),
            "cd13487065fba2ffb046cb2579d01d7c2b2a8d7cbc874dca7d89cdab09558290",
            [
                "32be48ff79a11818612469ba48b06a4df11763d10d903245388f7e238abcfb93",
                "c9b6703edc46e5607e823f41430eacb36e2f8a599be3454802ece3c2f208a81b",
            ],
        ),
        (
            fixed_namespace(256, b"tenant-a"),
            "a3febb0d17200f2558c67aa3c07247833df790b001dfa9616db73bde7ed743fe",
            [
                "481693d0521b9865f5f7b6dc8961e0cfcaf6b1974b58c0a03014e57056253393",
                "9e0e19c9ae1039b0453bc748791531a4a425dd7672c662eace9317a35f99a33e",
            ],
        ),
        (
            fixed_namespace(128, b""),
            "c78849c92655ac4bbbf4b8827ea57af3c5868b228f260f23f7e529a534da2ee4",
            [
                "df76f6473f009d0f955ca883986cd08f521fd8e16b4c9a191d9f689142e20ad8",
                "8202b31a37761edda1d75ea1276ea4e0f935715ca44741fd2695ccdba460e59d",
            ],
        ),
    ];
    for (namespace, digest, keys) in golden {
        assert_eq!(namespace.digest().to_string(), digest);
        let chain = KeyChain::of(&namespace, &tokens(512));
        let found: Vec<String> = chain.keys()[..2].iter().map(BlockKey::to_string).collect();
        assert_eq!(found, keys);
    }
    let namespace = fixed_namespace(256, b"");
    let mut chain = KeyChain::new(&namespace);
    chain.note(ExtraKey {
        name: "lora",
        value: Some(b"r7"),
    });
    chain.note(ExtraKey {
        name: "image",
        value: None,
    });
    chain.extend(&tokens(256));
    assert_eq!(
        chain.parent().to_string(),
        "828ed9ad8e800661b530ea2395b34686d749e7aa428934330c3641ccc90b70d9"
    );
}

#[test]
fn a_key_covers_everything_before_it() {
    let namespace = fixed_namespace(256, b"");
    let sequence = tokens(600);
    let chain = KeyChain::of(&namespace, &sequence);
    assert_eq!(chain.keys().len(), 2, "the open block has no key");
    assert_eq!(chain.token_count(), 600);
    let mut other = sequence.clone();
    other[0] += 1;
    let others = KeyChain::of(&namespace, &other);
    assert!(chain.keys()[0] != others.keys()[0] && chain.keys()[1] != others.keys()[1]);
    let foreign = KeyChain::of(&fixed_namespace(256, b"x"), &sequence);
    assert!(chain.keys().iter().all(|key| !foreign.keys().contains(key)));
    assert_eq!(
        KeyChain::of(&namespace, &sequence[..300]).keys(),
        &chain.keys()[..1]
    );
}

#[test]
fn a_block_is_hashed_once_however_the_tokens_come() {
    let namespace = fixed_namespace(128, b"");
    let sequence = tokens(1_000);
    let whole = KeyChain::of(&namespace, &sequence);
    for step in [1, 3, 127, 128, 129, 700] {
        let mut chain = KeyChain::new(&namespace);
        let completed: usize = sequence.chunks(step).map(|part| chain.extend(part)).sum();
        assert_eq!(chain.keys(), whole.keys(), "in steps of {step}");
        assert_eq!((completed, chain.hash_calls()), (7, 7));
    }
}

#[test]
fn extra_keys_are_told_apart() {
    let namespace = fixed_namespace(256, b"");
    let block = tokens(256);
    let key =
        |extras: &[ExtraKey<'_>]| block_key(&namespace.digest(), &namespace.root(), &block, extras);
    let extra = |name: &'static str, value: Option<&'static [u8]>| ExtraKey { name, value };
    let mut keys = vec![
        key(NONE),
        key(&[extra("a", Some(b"bc"))]),
        key(&[extra("ab", Some(b"c"))]),
        key(&[extra("a", Some(b""))]),
        key(&[extra("a", None)]),
        key(&[extra("a", None), extra("a", None)]),
        key(&[extra("", Some(b"a"))]),
    ];
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count);
    // Tokens that look like an extra key are tokens.
    let shorter = block_key(&namespace.digest(), &namespace.root(), &block[..255], NONE);
    assert!(!keys.contains(&shorter));
}

/// A change of weights, model, any format, the block length or the salt is another namespace.
#[test]
fn whatever_decides_a_byte_is_in_the_namespace() {
    let geometry = V4Geometry::flash();
    let schema = |geometry: &V4Geometry, formats: &Formats| {
        CacheSchema::deepseek_v4(geometry, formats).unwrap()
    };
    let formats = Formats::default();
    let mut weights = geometry.clone();
    weights.weights_digest[31] = 1;
    let mut config = geometry.clone();
    config.config_digest[0] = 1;
    let with = |index_k, latent| Formats {
        index_k,
        latent,
        ..formats
    };
    let schemas = [
        schema(&geometry, &formats),
        schema(&weights, &formats),
        schema(&config, &formats),
        schema(&V4Geometry::pro(), &formats),
        schema(&geometry, &with(IndexKFormat::Fp8, LatentFormat::PackedFp8)),
        schema(&geometry, &with(IndexKFormat::Bf16, LatentFormat::F32)),
    ];
    let mut digests = Vec::new();
    for schema in &schemas {
        for block_tokens in BLOCK_TOKENS {
            for salt in [&b""[..], b"a", b"b"] {
                let namespace = Namespace::new(schema, block_tokens, salt).unwrap();
                digests.push(namespace.digest());
            }
        }
    }
    let count = digests.len();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), count);
}

#[test]
fn a_long_salt_and_an_odd_block_are_refused() {
    let schema = CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default()).unwrap();
    let salt = [7; SALT_LIMIT_BYTES + 1];
    assert!(Namespace::new(&schema, 256, &salt[1..]).is_ok());
    let error = Namespace::new(&schema, 256, &salt).unwrap_err();
    assert_eq!(
        error.kind(),
        &ErrorKind::SaltTooLong {
            salt_bytes: 129,
            limit_bytes: 128
        }
    );
    let error = Namespace::new(&schema, 64, b"").unwrap_err();
    assert_eq!(error.to_string(), "block_tokens is 64, expected 256 or 128");
}

/// The work is linear in the tokens; the bound on the time is far above what it takes.
#[test]
fn a_million_tokens_are_4096_keys() {
    let namespace = fixed_namespace(256, b"");
    let sequence = tokens(1_048_576);
    let chain = KeyChain::of(&namespace, &sequence);
    assert_eq!((chain.keys().len(), chain.hash_calls()), (4_096, 4_096));
}
