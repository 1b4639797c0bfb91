//! `tier-engines foyer|redis|redis_aof FOLDER`: a store behind the line protocol of ../README.md.

mod blocks;
mod foyer_cache;
mod redis_server;

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

use blocks::{is_block, order, stamp};

type Answer<T> = Result<T, Box<dyn std::error::Error>>;

/// A store of blocks by number.
trait Engine {
    /// Makes it empty, with room for so many bytes.
    fn clear(&mut self, bytes: usize) -> Answer<()>;
    fn put(&mut self, number: usize, block: &[u8]) -> Answer<()>;
    /// Until everything is where the engine keeps it.
    fn flush(&mut self) -> Answer<()>;
    /// `false`: it is not there.
    fn get(&mut self, number: usize, into: &mut [u8]) -> Answer<bool>;
}

fn main() -> Answer<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, folder] = &args[..] else {
        return Err("tier-engines foyer|redis|redis_aof FOLDER".into());
    };
    let folder = Path::new(folder);
    std::fs::create_dir_all(folder)?;
    let mut engine: Box<dyn Engine> = match name.as_str() {
        "foyer" => Box::new(foyer_cache::Foyer::new(folder)?),
        "redis" => Box::new(redis_server::Redis::start(folder, false)?),
        "redis_aof" => Box::new(redis_server::Redis::start(folder, true)?),
        other => return Err(format!("no engine {other}").into()),
    };
    println!("READY {name}");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words[..] {
            ["PUT", bytes, count] => put(&mut *engine, bytes.parse()?, count.parse()?),
            ["GET", bytes, count] => get(&mut *engine, bytes.parse()?, count.parse()?),
            ["Q"] => break,
            _ => Err(format!("what is {line:?}").into()),
        };
        let object = answer.unwrap_or_else(|error| serde_json::json!({"err": error.to_string()}));
        println!("{object}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn put(engine: &mut dyn Engine, bytes: usize, count: usize) -> Answer<serde_json::Value> {
    engine.clear(bytes * count)?;
    let mut block: Vec<u8> = (0..bytes).map(|at| (at * 31 + at / 251) as u8).collect();
    let mut times = Vec::with_capacity(count);
    let begun = Instant::now();
    for number in 0..count {
        stamp(&mut block, number);
        let one = Instant::now();
        engine.put(number, &block)?;
        times.push(one.elapsed().as_secs_f64() * 1e6);
    }
    let put_s = begun.elapsed().as_secs_f64();
    engine.flush()?;
    let flushed_s = begun.elapsed().as_secs_f64();
    let gbps = |seconds: f64| (bytes * count) as f64 / seconds / 1e9;
    Ok(serde_json::json!({
        "gbps": gbps(flushed_s), "gbps_before_flush": gbps(put_s), "count": count,
        "p50_us": at(&mut times, 50), "p99_us": at(&mut times, 99), "bad": 0, "miss": 0,
    }))
}

fn get(engine: &mut dyn Engine, bytes: usize, count: usize) -> Answer<serde_json::Value> {
    let mut into = vec![0; bytes];
    let (mut bad, mut miss) = (0, 0);
    let mut times = Vec::with_capacity(count);
    let begun = Instant::now();
    for number in order(count) {
        let one = Instant::now();
        let is_there = engine.get(number, &mut into)?;
        times.push(one.elapsed().as_secs_f64() * 1e6);
        miss += usize::from(!is_there);
        bad += usize::from(is_there && !is_block(&into, number));
    }
    let seconds = begun.elapsed().as_secs_f64();
    let gbps = (bytes * (count - miss)) as f64 / seconds / 1e9;
    Ok(serde_json::json!({
        "gbps": gbps, "count": count, "p50_us": at(&mut times, 50), "p99_us": at(&mut times, 99),
        "bad": bad, "miss": miss,
    }))
}

fn at(times: &mut [f64], percent: usize) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[(times.len() * percent / 100).min(times.len() - 1)]
}
