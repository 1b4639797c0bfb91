//! `pd-handoff`: one process computes a prompt, another one decodes from its cache, a third one computes
//! the same alone, and every bit is compared.

pub mod activity;
pub mod cancel;
pub mod channel;
pub mod child;
pub mod cli;
pub mod compare;
pub mod console;
pub mod control;
pub mod failure;
pub mod fault;
pub mod html;
pub mod observer;
pub mod options;
pub mod out;
pub mod prompt;
pub mod report;
pub mod signals;
pub mod table;
pub mod timeline;
pub mod version;
