//! The contract of a tier over object stores of this machine, and what is asked of a URL.
#![cfg(feature = "object")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;

use kvgate_hicache::ErrorKind;
use kvgate_hicache::record::RecordId;
use kvgate_hicache::record::RecordKind::Block;
use kvgate_hicache::testkit::contract::{Damage, Subject, soon};
use kvgate_hicache::testkit::{Sample, contract};
use kvgate_hicache::tier::{ObjectTier, Stored, Tier};
use kvgate_hicache::tier_contract;
use tempfile::TempDir;

/// A folder.
struct Folder(TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn tier(&self) -> ObjectTier {
        ObjectTier::open(&format!("file://{}", self.0.path().display()), &[]).unwrap()
    }

    fn file(&self, id: &RecordId) -> PathBuf {
        let folder = self.0.path().join(id.kind.to_string());
        folder.join(id.key.to_string())
    }
}

impl Subject for Folder {
    fn open(&self) -> Box<dyn Tier> {
        Box::new(self.tier())
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        None
    }

    fn outlives_its_tier(&self) -> bool {
        true
    }

    fn damage(&self, _tier: &dyn Tier, id: &RecordId, damage: Damage) -> bool {
        let file = self.file(id);
        let mut bytes = fs::read(&file).unwrap();
        match damage {
            Damage::Flip(share) => {
                let at = bytes.len() * share as usize / 1000;
                bytes[at] ^= 1;
            }
            Damage::Replaced(other) => bytes = fs::read(self.file(&other)).unwrap(),
            Damage::Half => bytes.truncate(bytes.len() / 2),
            Damage::Longer => bytes.extend([0; 4096]),
            Damage::Gone => {
                fs::remove_file(file).unwrap();
                return true;
            }
        }
        fs::write(file, bytes).unwrap();
        true
    }
}

tier_contract!(folder, Folder::new());

/// The memory of the process; nothing can happen to it from outside.
struct Memory;

impl Subject for Memory {
    fn open(&self) -> Box<dyn Tier> {
        Box::new(ObjectTier::open("memory://some/folder", &[]).unwrap())
    }

    fn open_tight(&self) -> Option<Box<dyn Tier>> {
        None
    }

    fn outlives_its_tier(&self) -> bool {
        false
    }

    fn damage(&self, _tier: &dyn Tier, _id: &RecordId, _damage: Damage) -> bool {
        false
    }
}

#[test]
fn memory_keeps_the_contract() {
    for point in [
        contract::round_trip,
        contract::gone_between_look_and_read,
        contract::namespaces,
        contract::restart,
        contract::readers_beside_writers,
        contract::real_records,
    ] {
        point(&Memory);
    }
}

/// An object of another length is no record: it is written over, not taken for a duplicate.
#[test]
fn what_has_not_the_length_of_the_record_is_written_over() {
    let (folder, sample) = (Folder::new(), Sample::small(1));
    let tier = folder.tier();
    let put = || sample.with_record(Block, 0, |record| tier.write(record, soon()));
    assert_eq!(put().unwrap(), Stored::Written);
    fs::write(folder.file(&sample.id(Block, 0)), b"short").unwrap();
    assert_eq!(put().unwrap(), Stored::Written);
    assert_eq!(put().unwrap(), Stored::Present);
    let found = sample.check_read(Block, 0, |wanted, into| tier.read(wanted, into, soon()));
    assert_eq!(found, Ok(()));
}

/// What cannot be meant is refused with the reason, and no secret is in it.
#[test]
fn urls_and_options_that_are_none_are_refused() {
    let keys = [("access_key_id", "k"), ("secret_access_key", "hush")];
    let with = |more: &[(&'static str, &'static str)]| [&keys[..], more].concat();
    let cases = [
        ("bucket/prefix", with(&[]), "SCHEME://BUCKET/PREFIX"),
        ("ftp://bucket/prefix", with(&[]), "scheme \"ftp\""),
        ("s3:///prefix", with(&[]), "\"\" is no name"),
        (
            "s3://me:hush@bucket/prefix",
            with(&[]),
            "is no name of a bucket",
        ),
        ("s3://bucket?x=1", with(&[]), "is no name of a bucket"),
        ("s3://bucket/a//b", with(&[]), "empty"),
        ("s3://bucket", vec![], "no credentials"),
        ("s3://bucket", vec![keys[0]], "SecretAccessKey"),
        ("gs://bucket", vec![], "no credentials"),
        ("az://bucket", vec![], "no credentials"),
        (
            "s3://bucket",
            with(&[("colour", "red")]),
            "no option \"colour\"",
        ),
        (
            "s3://bucket",
            with(&[("timeout", "1s")]),
            "\"timeout\" is not taken",
        ),
        ("memory://x", vec![("region", "eu")], "no option \"region\""),
        ("file:///no/such/folder", vec![], "/no/such/folder"),
    ];
    for (url, options, expected) in cases {
        let error = ObjectTier::open(url, &options).unwrap_err();
        let ErrorKind::Unavailable { reason, .. } = error.kind() else {
            panic!("{url}: {error}");
        };
        assert!(reason.contains(expected), "{url}: {reason}");
        assert!(!reason.contains("hush") || url.contains("hush"), "{reason}");
    }
}
