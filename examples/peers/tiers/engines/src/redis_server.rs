//! A Redis server of our own behind a socket in the folder, and one client.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Answer, Engine};

pub struct Redis {
    server: Child,
    connection: redis::Connection,
}

impl Redis {
    /// With `is_durable` every write is in a file and synced before its answer.
    pub fn start(folder: &Path, is_durable: bool) -> Answer<Redis> {
        let folder = folder.canonicalize()?;
        let socket = folder.join("socket");
        let (file, sync) = if is_durable { ("yes", "always") } else { ("no", "no") };
        let mut command = Command::new("redis-server");
        command
            .args(["--port", "0", "--save", "", "--appendonly", file, "--appendfsync", sync])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(&folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut server = command.spawn()?;
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let client = redis::Client::open(format!("unix://{}", socket.display()))?;
            match client.get_connection() {
                Ok(connection) => return Ok(Redis { server, connection }),
                Err(error) if Instant::now() > until => {
                    server.kill()?;
                    return Err(error.into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Engine for Redis {
    fn clear(&mut self, _bytes: usize) -> Answer<()> {
        Ok(redis::cmd("FLUSHALL").exec(&mut self.connection)?)
    }

    fn put(&mut self, number: usize, block: &[u8]) -> Answer<()> {
        Ok(redis::cmd("SET").arg(number).arg(block).exec(&mut self.connection)?)
    }

    fn flush(&mut self) -> Answer<()> {
        Ok(())
    }

    fn get(&mut self, number: usize, into: &mut [u8]) -> Answer<bool> {
        let found: Option<Vec<u8>> = redis::cmd("GET").arg(number).query(&mut self.connection)?;
        let Some(found) = found.filter(|found| found.len() == into.len()) else {
            return Ok(false);
        };
        into.copy_from_slice(&found);
        Ok(true)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // Fails only for one that has ended.
        let _is_ended = self.server.kill();
        let _status = self.server.wait();
    }
}
