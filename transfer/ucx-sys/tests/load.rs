//! The library, when it is there, and the error when it is not.

use std::path::PathBuf;

use kvgate_ucx_sys::{LEAST_VERSION, SYSTEM_NAME, UCS_ERR_UNREACHABLE, Ucp};

/// The one variable that may name a library; the crate itself reads none.
fn given() -> Vec<PathBuf> {
    let named = std::env::var_os("KVGATE_UCX_LIBRARY");
    named.map(PathBuf::from).into_iter().collect()
}

#[test]
fn the_library_is_loaded_where_there_is_one() {
    match Ucp::load(&given()) {
        Ok(ucp) => {
            println!("UCX {} from {}", ucp.version(), ucp.path().display());
            assert!(ucp.version() >= LEAST_VERSION);
            let words = ucp.describe(UCS_ERR_UNREACHABLE);
            assert!(
                words.contains("reachable") && words.contains("-6"),
                "{words}"
            );
            assert!(ucp.describe(-99).contains("-99"));
        }
        Err(absent) => println!("SKIP: apt-get install libucx0 ({absent})"),
    }
}

#[test]
fn an_absent_library_is_an_error_that_names_every_place() {
    let nowhere = PathBuf::from("/nonexistent/libucp.so.0");
    // A file that is no library.
    let wrong = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let absent = Ucp::load_only(&[nowhere.clone(), wrong.clone()]).unwrap_err();
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
    match Ucp::load(std::slice::from_ref(&nowhere)) {
        Ok(ucp) => assert_eq!(ucp.path(), PathBuf::from(SYSTEM_NAME)),
        Err(absent) => {
            let paths: Vec<_> = absent.tried.into_iter().map(|a| a.path).collect();
            assert_eq!(paths, [nowhere, PathBuf::from(SYSTEM_NAME)]);
        }
    }
}
