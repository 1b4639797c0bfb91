//! From a URL and options to a store: nothing is read from the environment, and nothing is looked for that was
//! not named.

use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use kvgate_transfer::sync::Arc;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls_platform_verifier::BuilderVerifierExt;

use super::{RECORD_LIMIT_BYTES, unavailable};
use crate::error::Error;

/// Tries of one request after the first; the deadline of the call ends them earlier.
const RETRIES: usize = 3;
/// Time for all tries of one request.
const RETRY: Duration = Duration::from_secs(10);
/// Pause before the second try, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Longest answer that is not an object: an error, or a page of a listing.
const ANSWER_LIMIT_BYTES: usize = 1 << 20;

/// A store and the folder in it.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Name in messages, without any secret.
    pub(super) name: String,
    pub(super) prefix: Path,
}

/// The store that `url` names.
///
/// # Errors
/// `Unavailable` with what is wrong about the URL or an option.
pub(super) fn open(url: &str, options: &[(&str, &str)]) -> Result<Place, Error> {
    let refuse = |reason: String| unavailable(url, reason);
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(refuse(
            "expected SCHEME://BUCKET/PREFIX with s3, gs, az, file or memory".to_owned(),
        ));
    };
    if scheme == "file" || scheme == "memory" {
        if let Some((key, _)) = options.first() {
            return Err(refuse(format!("{scheme} has no option {key:?}")));
        }
        return local(scheme, rest).map_err(|error| refuse(error.to_string()));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    // Neither a user, nor a port, nor a query: what is written there would be a secret, or ignored.
    if bucket.is_empty() || !bucket.bytes().all(is_plain) {
        return Err(refuse(format!("{bucket:?} is no name of a bucket")));
    }
    let prefix = folder(prefix).map_err(|error| refuse(error.to_string()))?;
    let store = match scheme {
        "s3" => s3(bucket, options),
        "gs" => gs(bucket, options),
        "az" => az(bucket, options),
        _ => Err(format!(
            "scheme {scheme:?}, expected s3, gs, az, file or memory"
        )),
    };
    Ok(Place {
        store: store.map_err(&refuse)?,
        name: format!("{scheme}://{bucket}"),
        prefix,
    })
}

fn folder(prefix: &str) -> Result<Path, object_store::path::Error> {
    Path::parse(prefix.trim_matches('/'))
}

/// A folder of this machine that exists, or the memory of this process.
fn local(scheme: &str, rest: &str) -> Result<Place, object_store::Error> {
    let store: Arc<dyn ObjectStore> = match scheme {
        "file" => Arc::new(LocalFileSystem::new_with_prefix(rest)?),
        _ => Arc::new(InMemory::new()),
    };
    let prefix = match scheme {
        "file" => Path::default(),
        _ => folder(rest)?,
    };
    let name = match scheme {
        "file" => format!("file://{rest}"),
        _ => "memory://".to_owned(),
    };
    Ok(Place {
        store,
        name,
        prefix,
    })
}

fn key_of<K: FromStr>(name: &str) -> Result<K, String> {
    K::from_str(name).map_err(|_| format!("there is no option {name:?}"))
}

/// The one option of the client that is taken; its time-outs are the deadlines of the calls.
fn client_option(key: ClientConfigKey, name: &str) -> Result<(), String> {
    match key {
        ClientConfigKey::AllowHttp => Ok(()),
        _ => Err(format!("option {name:?} is not taken")),
    }
}

fn retry() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: PAUSES[0],
            max_backoff: PAUSES[1],
            base: 2.0,
        },
        max_retries: RETRIES,
        retry_timeout: RETRY,
    }
}

/// Whether one of these was given: without it the client would look for credentials by itself.
fn check_credentials(given: &[bool], expected: &str) -> Result<(), String> {
    match given.contains(&true) {
        true => Ok(()),
        false => Err(format!("no credentials: expected {expected}")),
    }
}

fn is_http_allowed(value: Option<String>) -> bool {
    value.is_some_and(|value| value == "true")
}

fn s3(bucket: &str, options: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>, String> {
    use AmazonS3ConfigKey as Key;
    let mut builder = AmazonS3Builder::new();
    for (name, value) in options {
        let key = key_of(name)?;
        if let Key::Client(key) = key {
            client_option(key, name)?;
        }
        builder = builder.with_config(key, *value);
    }
    let has = |key: Key| builder.get_config_value(&key).is_some();
    let given = [
        has(Key::AccessKeyId),
        has(Key::WebIdentityTokenFile),
        has(Key::ContainerCredentialsRelativeUri),
        has(Key::ContainerCredentialsFullUri),
        has(Key::MetadataEndpoint),
        builder.get_config_value(&Key::SkipSignature).as_deref() == Some("true"),
    ];
    let expected = "access_key_id and secret_access_key, web_identity_token_file and role_arn, \
        container_credentials_relative_uri, metadata_endpoint or skip_signature=true";
    check_credentials(&given, expected)?;
    let http = builder.get_config_value(&Key::Client(ClientConfigKey::AllowHttp));
    let store = builder
        .with_bucket_name(bucket)
        .with_retry(retry())
        .with_http_connector(Connector(is_http_allowed(http)));
    Ok(Arc::new(store.build().map_err(|error| error.to_string())?))
}

fn gs(bucket: &str, options: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>, String> {
    use GoogleConfigKey as Key;
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in options {
        let key = key_of(name)?;
        if let Key::Client(key) = key {
            client_option(key, name)?;
        }
        builder = builder.with_config(key, *value);
    }
    let has = |key: Key| builder.get_config_value(&key).is_some();
    let given = [
        has(Key::ServiceAccount),
        has(Key::ServiceAccountKey),
        has(Key::ApplicationCredentials),
        has(Key::BearerToken),
        builder.get_config_value(&Key::SkipSignature).as_deref() == Some("true"),
    ];
    let expected = "service_account, service_account_key, application_credentials, bearer_token or \
        skip_signature=true";
    check_credentials(&given, expected)?;
    let http = builder.get_config_value(&Key::Client(ClientConfigKey::AllowHttp));
    let store = builder
        .with_bucket_name(bucket)
        .with_retry(retry())
        .with_http_connector(Connector(is_http_allowed(http)));
    Ok(Arc::new(store.build().map_err(|error| error.to_string())?))
}

fn az(container: &str, options: &[(&str, &str)]) -> Result<Arc<dyn ObjectStore>, String> {
    use AzureConfigKey as Key;
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in options {
        let key = key_of(name)?;
        if let Key::Client(key) = key {
            client_option(key, name)?;
        }
        builder = builder.with_config(key, *value);
    }
    let has = |key: Key| builder.get_config_value(&key).is_some();
    let given = [
        has(Key::AccessKey),
        has(Key::SasKey),
        has(Key::Token),
        has(Key::ClientSecret),
        has(Key::FederatedTokenFile),
        has(Key::MsiEndpoint),
        builder.get_config_value(&Key::SkipSignature).as_deref() == Some("true"),
    ];
    let expected = "access_key, sas_key, token, client_secret, federated_token_file, msi_endpoint or \
        skip_signature=true";
    check_credentials(&given, expected)?;
    let http = builder.get_config_value(&Key::Client(ClientConfigKey::AllowHttp));
    let store = builder
        .with_container_name(container)
        .with_retry(retry())
        .with_http_connector(Connector(is_http_allowed(http)));
    Ok(Arc::new(store.build().map_err(|error| error.to_string())?))
}

/// Makes the client: no proxy of the environment, the system's roots, plain HTTP only where it was asked for.
#[derive(Debug)]
struct Connector(bool);

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let generic = |source: Box<dyn std::error::Error + Send + Sync>| {
            let store = "http";
            object_store::Error::Generic { store, source }
        };
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(BuilderVerifierExt::with_platform_verifier)
            .map_err(|error| generic(error.into()))?
            .with_no_client_auth();
        let client = reqwest::Client::builder()
            .user_agent(concat!("kvgate/", env!("CARGO_PKG_VERSION")))
            .tls_backend_preconfigured(tls)
            .https_only(!self.0)
            .no_proxy()
            .build()
            .map_err(|error| generic(error.into()))?;
        Ok(HttpClient::new(Bounded(client)))
    }
}

/// Takes no more of an answer than a right one can have: an object up to the longest record, anything else up
/// to [`ANSWER_LIMIT_BYTES`].
#[derive(Debug)]
struct Bounded(reqwest::Client);

#[async_trait]
impl HttpService for Bounded {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = self.0.call(request).await?.into_parts();
        let limit_bytes = match parts.status.is_success() {
            true => RECORD_LIMIT_BYTES as usize,
            false => ANSWER_LIMIT_BYTES,
        };
        let body = Limited::new(body, limit_bytes)
            .map_err(|error| HttpError::new_boxed(HttpErrorKind::Decode, error));
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}
