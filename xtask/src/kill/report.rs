//! Adding up the trials of a campaign.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::trial::Hit;
use super::{Blow, Phase, Transport};

/// Of so many trials at least one has to hit each phase: 20 of 200.
const TRIALS_PER_HIT: u32 = 10;

/// What a campaign has seen.
pub(crate) struct Report {
    transport: Transport,
    blow: Blow,
    asked: u32,
    seed: u64,
    phases: [u32; 5],
    victims: BTreeMap<&'static str, u32>,
    /// By process and code; signals are negative.
    codes: BTreeMap<String, u32>,
    misses: u32,
    leftover_processes: usize,
    leftover_files: Vec<String>,
    longest: Duration,
    surprises: Vec<String>,
    surprising_trials: u64,
}

impl Report {
    pub(super) fn new(transport: Transport, blow: Blow, asked: u32, seed: u64) -> Self {
        Self {
            transport,
            blow,
            asked,
            seed,
            phases: [0; 5],
            victims: BTreeMap::new(),
            codes: BTreeMap::new(),
            misses: 0,
            leftover_processes: 0,
            leftover_files: Vec::new(),
            longest: Duration::ZERO,
            surprises: Vec::new(),
            surprising_trials: 0,
        }
    }

    pub(super) fn trials(&self) -> u32 {
        self.phases.iter().sum()
    }

    pub(super) fn misses(&self) -> u32 {
        self.misses
    }

    pub(super) fn note_miss(&mut self) {
        self.misses += 1;
    }

    /// The phase that was hit least so far.
    pub(super) fn rarest_phase(&self) -> Phase {
        let rarest = Phase::ALL
            .into_iter()
            .min_by_key(|phase| self.phases[*phase as usize]);
        rarest.unwrap_or(Phase::Handshake)
    }

    pub(super) fn add(&mut self, hit: Hit) {
        let trial = self.trials() + 1;
        self.phases[hit.phase as usize] += 1;
        *self.victims.entry(hit.victim).or_default() += 1;
        let code = hit
            .launcher_code
            .map_or("none".to_owned(), |code| code.to_string());
        let whose = if hit.victim == "launcher" {
            "launcher (struck)"
        } else {
            "launcher"
        };
        *self.codes.entry(format!("{whose} {code}")).or_default() += 1;
        for (name, code) in &hit.orphan_codes {
            *self
                .codes
                .entry(format!("{name} (orphan) {code}"))
                .or_default() += 1;
        }
        self.leftover_processes += hit.leftover_processes;
        self.leftover_files.extend(hit.leftover_files);
        self.longest = self.longest.max(hit.ended_after);
        if !hit.surprises.is_empty() {
            self.surprising_trials += 1;
        }
        for what in hit.surprises {
            let text = format!(
                "trial {trial}, {} struck in {}: {what}",
                hit.victim,
                hit.phase.name()
            );
            eprintln!("kill: {text}");
            self.surprises.push(text);
        }
    }

    pub(super) fn surprise(&mut self, text: String) {
        self.surprises.push(text);
        self.surprising_trials += 1;
    }

    /// A campaign that hardly hit a phase says nothing about it.
    pub(super) fn check_coverage(&mut self) {
        let wanted = self.asked / TRIALS_PER_HIT;
        for phase in Phase::ALL {
            let hits = self.phases[phase as usize];
            if hits < wanted {
                let text = format!("phase {} hit {hits} times, wanted {wanted}", phase.name());
                self.surprise(text);
            }
        }
    }

    pub(crate) fn is_surprising(&self) -> bool {
        !self.surprises.is_empty()
    }

    /// Trials that went wrong, at most as many as were asked for.
    pub(crate) fn surprising_runs(&self) -> u64 {
        self.surprising_trials.min(u64::from(self.asked))
    }

    pub(crate) fn print(&self) {
        let name = self.transport.name();
        println!(
            "kill {name}: {} runs, seed {}, {:?}",
            self.trials(),
            self.seed,
            self.blow
        );
        for phase in Phase::ALL {
            println!(
                "  phase {:<11} {}",
                phase.name(),
                self.phases[phase as usize]
            );
        }
        for (victim, count) in &self.victims {
            println!("  struck {victim:<10} {count}");
        }
        for (code, count) in &self.codes {
            println!("  exit {code}: {count}");
        }
        println!(
            "  leftovers: {} processes, {} files; longest end {:.2} s; missed {}",
            self.leftover_processes,
            self.leftover_files.len(),
            self.longest.as_secs_f64(),
            self.misses
        );
        for text in &self.surprises {
            println!("  surprise: {text}");
        }
        println!("kill {name}: {} surprises", self.surprises.len());
    }

    pub(super) fn json(&self) -> Value {
        let phases: BTreeMap<_, _> = Phase::ALL
            .iter()
            .map(|phase| (phase.name(), self.phases[*phase as usize]))
            .collect();
        json!({
            "schema": "kvgate.kill/1",
            "transport": self.transport.name(),
            "signal": format!("{:?}", self.blow).to_lowercase(),
            "runs": self.trials(),
            "seed": self.seed,
            "phases": phases,
            "victims": self.victims,
            "exit_codes": self.codes,
            "leftovers": {
                "processes": self.leftover_processes,
                "files": self.leftover_files,
            },
            "longest_end_ms": self.longest.as_millis() as u64,
            "missed": self.misses,
            "surprises": self.surprises,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(phase: Phase, surprises: &[&str]) -> Hit {
        Hit {
            phase,
            victim: "decode",
            launcher_code: Some(3),
            orphan_codes: Vec::new(),
            leftover_processes: 0,
            leftover_files: Vec::new(),
            ended_after: Duration::from_millis(10),
            surprises: surprises.iter().map(|text| (*text).to_owned()).collect(),
        }
    }

    #[test]
    fn a_phase_that_was_hardly_hit_is_a_surprise() {
        let mut report = Report::new(Transport::Shm, Blow::Kill, 20, 1);
        for phase in Phase::ALL {
            report.add(hit(phase, &[]));
            report.add(hit(phase, &[]));
        }
        report.check_coverage();
        assert!(!report.is_surprising());
        let mut short = Report::new(Transport::Shm, Blow::Kill, 30, 1);
        for _ in 0..30 {
            short.add(hit(Phase::Prefill, &[]));
        }
        short.check_coverage();
        assert_eq!(short.surprising_runs(), 4);
    }

    #[test]
    fn surprises_are_counted_by_trial() {
        let mut report = Report::new(Transport::Tcp, Blow::Kill, 20, 1);
        report.add(hit(Phase::Decode, &["one", "two"]));
        assert!(report.is_surprising());
        assert_eq!(report.surprising_runs(), 1);
        assert_eq!(report.rarest_phase(), Phase::Handshake);
        assert_eq!(report.json()["surprises"].as_array().unwrap().len(), 2);
    }
}
