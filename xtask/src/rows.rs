//! Which test covers which report from the field.

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::invariants::defines;

/// A failure that was seen in other systems, and what keeps it out of this one.
struct Row {
    id: &'static str,
    subject: &'static str,
    cover: Cover,
}

enum Cover {
    /// File and test function.
    Tests(&'static [(&'static str, &'static str)]),
    /// The code that could fail in this way does not exist yet.
    NotYet(&'static str),
}

const ROWS: [Row; 15] = [
    Row {
        id: "DEV-01",
        subject: "a host tier that does not carry index_k",
        cover: Cover::NotYet("no host tier"),
    },
    Row {
        id: "DEV-02",
        subject: "index_k read before its layer has landed",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-03",
        subject: "an abort gives pages away while a write is running",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-04",
        subject: "done after the first of several components",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-05",
        subject: "several writers and the metadata of a request",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-06",
        subject: "pages copied before their producer has finished",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-07",
        subject: "a host page evicted while it is loaded",
        cover: Cover::NotYet("no host tier"),
    },
    Row {
        id: "DEV-08",
        subject: "a load into pages that an older step still writes",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-09",
        subject: "a prefix sent before it was written",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-10",
        subject: "a peer restarts at the same address",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-11",
        subject: "a prefetch that publishes more than it loaded",
        cover: Cover::NotYet("no storage tier"),
    },
    Row {
        id: "DEV-12",
        subject: "a receiver waits for a component that nobody sends",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-13",
        subject: "a failed load counted as loaded",
        cover: Cover::NotYet("tests are being written"),
    },
    Row {
        id: "DEV-14",
        subject: "ranks that disagree about completions",
        cover: Cover::NotYet("no tensor-parallel ranks"),
    },
    Row {
        id: "DEV-15",
        subject: "pages reused before the running step has passed",
        cover: Cover::NotYet("tests are being written"),
    },
];

/// Prints the table; a row that names a test which does not exist is a finding.
pub(crate) fn list(workspace: &Workspace) -> Result<Outcome, Failure> {
    let mut missing = false;
    for row in &ROWS {
        match &row.cover {
            Cover::NotYet(why) => println!("{}  {}: not yet ({why})", row.id, row.subject),
            Cover::Tests(tests) => {
                println!("{}  {}:", row.id, row.subject);
                for (file, function) in *tests {
                    let exists = workspace
                        .read(file)
                        .is_ok_and(|text| defines(&text, function));
                    missing |= !exists;
                    let mark = if exists { "" } else { "  MISSING" };
                    println!("        {file}::{function}{mark}");
                }
            }
        }
    }
    Ok(Outcome::found_if(missing))
}
