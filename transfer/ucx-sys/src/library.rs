//! The library itself: where it is looked for, and its functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::bindings::*;

/// What the loader of the system is asked for when no given path leads to a library.
pub const SYSTEM_NAME: &str = "libucp.so.0";

/// The oldest UCX whose functions and behaviour are known to do.
pub const LEAST_VERSION: Version = Version {
    major: 1,
    minor: 13,
    patch: 0,
};

/// The version of a loaded library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes with the ABI.
    pub major: u32,
    /// Grows with the API.
    pub minor: u32,
    /// Corrections.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// One place that was tried, and why it did not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// A path, or a name that the loader of the system looks for.
    pub path: PathBuf,
    /// The loader's words, a missing function, or a version that is too old.
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
        f.write_str("UCX is absent; tried")?;
        for (index, attempt) in self.tried.iter().enumerate() {
            let before = if index == 0 { " " } else { "; " };
            write!(f, "{before}{} ({})", attempt.path.display(), attempt.reason)?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// A loaded UCP. The fields are its functions, under their own names; each is as unsafe as in C.
        ///
        /// The library stays loaded for good: it has threads and hooks of its own.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct Ucp {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            version: Version,
            path: PathBuf,
        }

        impl Ucp {
            fn bind(library: &Library, path: &Path) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is that of the declaration in the header of this version and
                        // of every later one; the library is never unloaded, so the copy stays good.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) $(-> $result)?>(name)
                        };
                        *symbol.map_err(|_| concat!("no function ", stringify!($name)))?
                    },)*
                    version: Version { major: 0, minor: 0, patch: 0 },
                    path: path.to_path_buf(),
                })
            }
        }
    };
}

functions! {
    ucp_get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint);
    ucs_status_string: fn(ucs_status_t) -> *const c_char;
    ucp_config_read: fn(*const c_char, *const c_char, *mut *mut ucp_config_t) -> ucs_status_t;
    ucp_config_modify: fn(*mut ucp_config_t, *const c_char, *const c_char) -> ucs_status_t;
    ucp_config_release: fn(*mut ucp_config_t);
    ucp_init_version: fn(c_uint, c_uint, *const ucp_params_t, *const ucp_config_t, *mut ucp_context_h) -> ucs_status_t;
    ucp_cleanup: fn(ucp_context_h);
    ucp_worker_create: fn(ucp_context_h, *const ucp_worker_params_t, *mut ucp_worker_h) -> ucs_status_t;
    ucp_worker_destroy: fn(ucp_worker_h);
    ucp_worker_get_address: fn(ucp_worker_h, *mut *mut ucp_address_t, *mut usize) -> ucs_status_t;
    ucp_worker_release_address: fn(ucp_worker_h, *mut ucp_address_t);
    ucp_worker_progress: fn(ucp_worker_h) -> c_uint;
    ucp_worker_arm: fn(ucp_worker_h) -> ucs_status_t;
    ucp_worker_get_efd: fn(ucp_worker_h, *mut c_int) -> ucs_status_t;
    ucp_mem_map: fn(ucp_context_h, *const ucp_mem_map_params_t, *mut ucp_mem_h) -> ucs_status_t;
    ucp_mem_unmap: fn(ucp_context_h, ucp_mem_h) -> ucs_status_t;
    ucp_rkey_pack: fn(ucp_context_h, ucp_mem_h, *mut *mut c_void, *mut usize) -> ucs_status_t;
    ucp_rkey_buffer_release: fn(*mut c_void);
    ucp_ep_create: fn(ucp_worker_h, *const ucp_ep_params_t, *mut ucp_ep_h) -> ucs_status_t;
    ucp_ep_close_nbx: fn(ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_flush_nbx: fn(ucp_ep_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_query: fn(ucp_ep_h, *mut ucp_ep_attr_t) -> ucs_status_t;
    ucp_ep_rkey_unpack: fn(ucp_ep_h, *const c_void, *mut ucp_rkey_h) -> ucs_status_t;
    ucp_rkey_destroy: fn(ucp_rkey_h);
    ucp_put_nbx: fn(ucp_ep_h, *const c_void, usize, u64, ucp_rkey_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_get_nbx: fn(ucp_ep_h, *mut c_void, usize, u64, ucp_rkey_h, *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_request_check_status: fn(*mut c_void) -> ucs_status_t;
    ucp_request_free: fn(*mut c_void);
}

impl Ucp {
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
    /// As [`Ucp::load`].
    pub fn load_only(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for path in paths {
            match Self::open(path) {
                Ok(ucp) => return Ok(ucp),
                Err(reason) => tried.push(Attempt {
                    path: path.clone(),
                    reason,
                }),
            }
        }
        Err(LoadError { tried })
    }

    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: UCX's constructors read its environment and install its own hooks; they are made for
        // being loaded at any time.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        // Never unloaded from here on: a constructor has run.
        let library = ManuallyDrop::new(library);
        let mut ucp = Self::bind(&library, path)?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three places for three numbers; it may be called before anything else.
        unsafe { (ucp.ucp_get_version)(&mut major, &mut minor, &mut patch) };
        ucp.version = Version {
            major,
            minor,
            patch,
        };
        if ucp.version < LEAST_VERSION || major != LEAST_VERSION.major {
            return Err(format!(
                "version {}, at least {LEAST_VERSION} is needed",
                ucp.version
            ));
        }
        Ok(ucp)
    }

    /// The version of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// UCX's words for a status, with the number.
    pub fn describe(&self, status: ucs_status_t) -> String {
        // SAFETY: any number is allowed; the answer is a string that lives as long as the library.
        let words = unsafe { (self.ucs_status_string)(status) };
        if words.is_null() {
            return format!("status {status}");
        }
        // SAFETY: not null, ends with a zero, see above.
        let words = unsafe { CStr::from_ptr(words) };
        format!("{} (status {status})", words.to_string_lossy())
    }
}
