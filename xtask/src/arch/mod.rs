//! `cargo xtask arch`: who may depend on whom, and which words may stand where.
//!
//! Every rule is a function from sources to complaints, and every rule has a test with a sample
//! that breaks it.

mod crates;
mod modules;
mod sources;
mod words;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::metadata::Metadata;

/// Runs all rules and prints one line per complaint.
pub(crate) fn run(workspace: &Workspace) -> Result<Outcome, Failure> {
    let complaints = check(workspace)?;
    for complaint in &complaints {
        println!("{complaint}");
    }
    println!("arch: {} violations", complaints.len());
    Ok(Outcome::found_if(!complaints.is_empty()))
}

/// All complaints of all rules.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let metadata = Metadata::load(workspace, false)?;
    let members: Vec<_> = metadata.members().collect();
    let sources = sources::load(workspace)?;
    let mut complaints = crates::directions(&members);
    complaints.extend(crates::fault_features(&members));
    for source in &sources {
        complaints.extend(words::check(source));
    }
    complaints.extend(modules::circles(&sources));
    Ok(complaints)
}
