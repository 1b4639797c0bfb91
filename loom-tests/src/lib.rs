//! Scenario kit of the model checks.
