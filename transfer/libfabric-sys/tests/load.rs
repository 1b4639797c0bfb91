//! The library, when it is there, and the error when it is not.

use std::path::PathBuf;

use kvgate_libfabric_sys::{API_VERSION, FI_EAGAIN, Fabric, SYSTEM_NAME, Version};

/// The one variable that may name a library; the crate itself reads none.
fn given() -> Vec<PathBuf> {
    let named = std::env::var_os("KVGATE_LIBFABRIC_LIBRARY");
    named.map(PathBuf::from).into_iter().collect()
}

#[test]
fn the_library_is_loaded_where_there_is_one() {
    match Fabric::load(&given()) {
        Ok(fabric) => {
            println!(
                "libfabric {} from {}",
                fabric.version(),
                fabric.path().display()
            );
            let Version { major, minor } = fabric.version();
            assert!((major << 16 | minor) >= API_VERSION, "{}", fabric.version());
            let words = fabric.describe(-i64::from(FI_EAGAIN));
            assert!(
                words.contains("temporarily") && words.contains("-11"),
                "{words}"
            );
            assert!(fabric.describe(i64::MIN).contains("-9223372036854775808"));
        }
        Err(absent) => println!("SKIP: apt-get install libfabric1 ({absent})"),
    }
}

#[test]
fn an_absent_library_is_an_error_that_names_every_place() {
    let nowhere = PathBuf::from("/nonexistent/libfabric.so.0");
    // A file that is no library.
    let wrong = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let absent = Fabric::load_only(&[nowhere.clone(), wrong.clone()]).unwrap_err();
    let paths: Vec<_> = absent.tried.iter().map(|a| a.path.clone()).collect();
    assert_eq!(paths, [nowhere.clone(), wrong]);
    let text = absent.to_string();
    for attempt in &absent.tried {
        assert!(
            !attempt.reason.is_empty() && text.contains(&attempt.reason),
            "{text}"
        );
    }
    // With the system's name behind it, the given path is passed over or named first.
    match Fabric::load(std::slice::from_ref(&nowhere)) {
        Ok(fabric) => assert_eq!(fabric.path(), PathBuf::from(SYSTEM_NAME)),
        Err(absent) => {
            let paths: Vec<_> = absent.tried.into_iter().map(|a| a.path).collect();
            assert_eq!(paths, [nowhere, PathBuf::from(SYSTEM_NAME)]);
        }
    }
}
