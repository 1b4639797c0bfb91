//! Failures that other serving stacks had in the field with tiers of memory, one module per scenario. Each test
//! names its guard, and a mutant that takes the guard away makes it report the symptom of the field.
//!
//! `cargo xtask test --list-rows` lists which test stands for which scenario.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../common/mod.rs"]
mod common;

mod dev_01;
mod dev_02;
mod dev_06;
mod dev_07;
mod dev_08;
mod dev_11;
mod dev_13;
mod dev_14;
