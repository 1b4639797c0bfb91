//! Failures that other serving stacks had in the field, one module per scenario: what was given, what
//! happened there, what has to happen here. Each test names its guard, and a mutant that takes the guard
//! away makes it report the symptom of the field.
//!
//! `cargo xtask test --list-rows` lists which test stands for which scenario; `KVGATE_SEED=S` runs one seed
//! alone.
#![allow(clippy::needless_update, reason = "a feature adds a field")]
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../host/mod.rs"]
mod host;

mod dev_03;
mod dev_04;
mod dev_05;
mod dev_09;
mod dev_10;
mod dev_12;
mod dev_15;
