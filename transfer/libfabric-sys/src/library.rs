//! The library itself: where it is looked for, and its functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use crate::bindings::*;

/// What the loader of the system is asked for when no given path leads to a library.
pub const SYSTEM_NAME: &str = "libfabric.so.1";

/// The version of the structs, to be passed to `fi_getinfo`.
pub const API_VERSION: u32 = (1 << 16) | 17;

/// The version of a loaded library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes with the API.
    pub major: u32,
    /// Grows with it.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One place that was tried, and why it did not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// A path, or a name that the loader of the system looks for.
    pub path: PathBuf,
    /// The loader's words, or a missing function.
    pub reason: String,
}

/// No usable library: every place that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// In the order in which they were tried.
    pub tried: Vec<Attempt>,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("libfabric is absent; tried")?;
        for (index, attempt) in self.tried.iter().enumerate() {
            let before = if index == 0 { " " } else { "; " };
            write!(f, "{before}{} ({})", attempt.path.display(), attempt.reason)?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

macro_rules! functions {
    ($($name:ident @ $symbol:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// A loaded libfabric. The fields are its functions, under their own names; each is as unsafe as
        /// in C.
        ///
        /// The library stays loaded for good: providers have threads and hooks of their own.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct Fabric {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            path: PathBuf,
        }

        impl Fabric {
            /// The functions of a library that is never closed.
            fn bind(handle: *mut c_void, path: &Path) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes().as_ptr().cast();
                        let version = concat!($symbol, "\0").as_bytes().as_ptr().cast();
                        // SAFETY: a live handle and two strings that end with a zero.
                        let found = unsafe { libc::dlvsym(handle, name, version) };
                        if found.is_null() {
                            return Err(concat!("no function ", stringify!($name), "@", $symbol).into());
                        }
                        // SAFETY: the symbol of this version has the type of the header of this version.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($arg),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                    path: path.to_path_buf(),
                })
            }
        }
    };
}

functions! {
    fi_getinfo @ "FABRIC_1.3": fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
    fi_freeinfo @ "FABRIC_1.3": fn(*mut fi_info);
    fi_dupinfo @ "FABRIC_1.3": fn(*const fi_info) -> *mut fi_info;
    fi_fabric @ "FABRIC_1.1": fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
    fi_version @ "FABRIC_1.0": fn() -> u32;
    fi_strerror @ "FABRIC_1.0": fn(c_int) -> *const c_char;
}

impl Fabric {
    /// The first usable library of `given`, then of [`SYSTEM_NAME`]. The caller reads its configuration
    /// and environment itself.
    ///
    /// Opening a library runs its constructors: give paths that are trusted.
    ///
    /// # Errors
    /// Every path that was tried, with the reason.
    pub fn load(given: &[PathBuf]) -> Result<Self, LoadError> {
        let mut all = given.to_vec();
        all.push(PathBuf::from(SYSTEM_NAME));
        Self::load_only(&all)
    }

    /// The first usable library of `paths`, and no other.
    ///
    /// # Errors
    /// As [`Fabric::load`].
    pub fn load_only(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for path in paths {
            match Self::open(path) {
                Ok(fabric) => return Ok(fabric),
                Err(reason) => tried.push(Attempt {
                    path: path.clone(),
                    reason,
                }),
            }
        }
        Err(LoadError { tried })
    }

    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: libfabric's constructors read its environment; they are made for being loaded at any
        // time.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        // Never closed from here on: a constructor has run.
        Self::bind(library.into_raw(), path)
    }

    /// The version of the library.
    pub fn version(&self) -> Version {
        // SAFETY: takes nothing and may be called at any time.
        let version = unsafe { (self.fi_version)() };
        Version {
            major: version >> 16,
            minor: version & 0xffff,
        }
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// libfabric's words for a negated error number, with the number.
    pub fn describe(&self, code: i64) -> String {
        let number = c_int::try_from(code.unsigned_abs()).unwrap_or(c_int::MAX);
        // SAFETY: any number is allowed; the answer is a string of the library or of the C library.
        let words = unsafe { (self.fi_strerror)(number) };
        if words.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, ends with a zero, see above.
        let words = unsafe { CStr::from_ptr(words) };
        format!("{} ({code})", words.to_string_lossy())
    }
}
