//! An object store as the remote tier: where it is and who asks comes from the variables that the command line tools
//! of its kind take.

use kvgate_hicache::Error;
use kvgate_hicache::tier::ObjectTier;

/// What is taken from the environment for `s3`.
const S3: [&str; 7] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
];
/// For `gs`.
const GS: [&str; 1] = ["GOOGLE_APPLICATION_CREDENTIALS"];
/// For `az`.
const AZ: [&str; 3] = [
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
];

/// The tier at `url`, whose scheme is `scheme`.
///
/// # Errors
/// Those of [`ObjectTier::open`].
pub(super) fn open(scheme: &str, url: &str) -> Result<ObjectTier, Error> {
    let options = options(scheme, |name| std::env::var(name).ok());
    let options: Vec<(&str, &str)> = options.iter().map(|(a, b)| (&**a, &**b)).collect();
    ObjectTier::open(url, &options)
}

/// The options of a store, from variables.
fn options(scheme: &str, variable: impl Fn(&str) -> Option<String>) -> Vec<(String, String)> {
    let names: &[&str] = match scheme {
        "s3" => &S3,
        "gs" => &GS,
        "az" => &AZ,
        _ => &[],
    };
    let given = names.iter().filter_map(|name| {
        let value = variable(name).filter(|value| !value.is_empty())?;
        Some((name.to_ascii_lowercase(), value))
    });
    let mut options: Vec<_> = given.collect();
    // An endpoint without TLS is meant when it is named.
    let is_plain = |(name, value): &(String, String)| {
        name.starts_with("aws_endpoint") && value.starts_with("http://")
    };
    if options.iter().any(is_plain) {
        options.push(("allow_http".to_owned(), "true".to_owned()));
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_takes_its_own_variables_only() {
        let variable = |name: &str| match name {
            "AWS_ACCESS_KEY_ID" => Some("key".to_owned()),
            "AWS_ENDPOINT_URL" => Some("http://127.0.0.1:1".to_owned()),
            "AWS_REGION" => Some(String::new()),
            "AZURE_STORAGE_ACCOUNT_KEY" => Some("word".to_owned()),
            _ => None,
        };
        let of = |scheme: &str| options(scheme, variable);
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let s3 = [
            pair("aws_access_key_id", "key"),
            pair("aws_endpoint_url", "http://127.0.0.1:1"),
            pair("allow_http", "true"),
        ];
        assert_eq!(of("s3"), s3);
        assert_eq!(of("az"), [pair("azure_storage_account_key", "word")]);
        assert_eq!(of("gs"), []);
        assert_eq!(of("file"), []);
    }
}
