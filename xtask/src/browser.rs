//! The HTML report of a hand-off, looked at by a browser.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::exec::{Failure, Workspace};
use crate::suites::{Service, Tally, release_binary};

const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// A PNG of an empty page of this size stays well below so many bytes.
const EMPTY_PAGE_BYTES: u64 = 12_000;

/// Makes a report and takes a picture of it.
pub(crate) fn report(workspace: &Workspace) -> Result<Tally, Failure> {
    let Some(browser) = find_browser() else {
        return Ok(Tally::Absent(Service::Chromium));
    };
    let folder = tempfile::tempdir()
        .map_err(|error| Failure::new(format!("no temporary folder: {error}")))?;
    let page = folder.path().join("report.html");
    let program = release_binary(workspace, "pd-handoff");
    let made = workspace
        .program("report", program)
        .args(["--tokens", "300", "--steps", "4", "--report"])
        .args([&page])
        .limit(Duration::from_secs(60))
        .run()?;
    if !made.succeeded() {
        made.show_tail(40);
        return Ok(Tally::Ran {
            passed: 0,
            failed: 1,
        });
    }
    let complaints = [
        complaint_about_text(&page)?,
        complaint_about_picture(workspace, &browser, &page)?,
    ];
    let failed = complaints
        .iter()
        .flatten()
        .inspect(|what| eprintln!("report: {what}"))
        .count();
    Ok(Tally::Ran {
        passed: (complaints.len() - failed) as u64,
        failed: failed as u64,
    })
}

fn find_browser() -> Option<String> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    NAMES
        .iter()
        .find(|name| folders.iter().any(|folder| folder.join(name).is_file()))
        .map(|name| (*name).to_owned())
}

/// One static file: nothing in it may be fetched from elsewhere.
fn complaint_about_text(page: &Path) -> Result<Option<String>, Failure> {
    let text = fs::read_to_string(page).map_err(|error| Failure::io(page, &error))?;
    let fetched = ["src=\"http", "href=\"http", "url(http", "@import"];
    Ok(fetched
        .iter()
        .find(|mark| text.contains(**mark))
        .map(|mark| format!("the page fetches something: {mark}")))
}

fn complaint_about_picture(
    workspace: &Workspace,
    browser: &str,
    page: &Path,
) -> Result<Option<String>, Failure> {
    let picture = page.with_extension("png");
    let done = workspace
        .program("browser", browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1200,900",
        ])
        .args([format!("--screenshot={}", picture.display())])
        .args([format!("file://{}", page.display())])
        .limit(Duration::from_secs(90))
        .run()?;
    let bytes = fs::metadata(&picture).map_or(0, |data| data.len());
    if !done.succeeded() || bytes == 0 {
        return Ok(Some(format!("no picture: {}", done.ending())));
    }
    let empty = bytes < EMPTY_PAGE_BYTES;
    Ok(empty.then(|| format!("the picture is empty: {bytes} bytes")))
}
