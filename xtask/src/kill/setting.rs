//! What runs in a trial: one hand-off, or conversations over the tiers of the cache.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::exec::Failure;

use super::Transport;

/// A server that does not answer for so long does not start.
const SERVER_LIMIT: Duration = Duration::from_secs(10);

/// The command line of every trial, and the server that it uses.
pub(super) struct Setting {
    pub(super) transport: Transport,
    pub(super) conversations: Option<Conversations>,
}

/// Conversations of several turns.
pub(super) struct Conversations {
    pub(super) sessions: u32,
    pub(super) turns: u32,
    /// Prefixes stay in this directory from trial to trial.
    pub(super) hicache: Option<PathBuf>,
    pub(super) remote: Option<Remote>,
}

/// A Redis server that this program starts, kills and starts again.
pub(super) struct Remote {
    url: String,
    port: u16,
    folder: tempfile::TempDir,
    server: Option<Child>,
}

impl Setting {
    /// One hand-off of 520 tokens.
    pub(super) fn of(transport: Transport) -> Self {
        Self {
            transport,
            conversations: None,
        }
    }

    pub(super) fn args(&self) -> Vec<String> {
        let mut args = vec!["--transport".to_owned(), self.transport.name().to_owned()];
        let mut add = |option: &str, value: String| args.extend([option.to_owned(), value]);
        let Some(conversations) = &self.conversations else {
            add("--tokens", "520".to_owned());
            add("--steps", "24".to_owned());
            return args;
        };
        add("--sessions", conversations.sessions.to_string());
        add("--turns", conversations.turns.to_string());
        add("--device-pages", "small".to_owned());
        add("--host-pages", "small".to_owned());
        if let Some(directory) = &conversations.hicache {
            add("--hicache", directory.display().to_string());
        }
        if let Some(remote) = &conversations.remote {
            add("--remote", remote.url.clone());
        }
        args
    }

    /// A run that shows no sign of life for so long is hung.
    pub(super) fn patience(&self) -> Duration {
        match self.conversations {
            None => Duration::from_secs(60),
            Some(_) => Duration::from_secs(300),
        }
    }

    /// The server runs, with nothing in it if it had to be started.
    pub(super) fn prepare(&mut self) -> Result<(), Failure> {
        match self.remote() {
            Some(remote) => remote.start(),
            None => Ok(()),
        }
    }

    /// The process of the server, if there is one.
    pub(super) fn server_pid(&self) -> Option<u32> {
        let remote = self.conversations.as_ref()?.remote.as_ref()?;
        remote.server.as_ref().map(Child::id)
    }

    fn remote(&mut self) -> Option<&mut Remote> {
        self.conversations.as_mut()?.remote.as_mut()
    }
}

impl Remote {
    /// A server on the port of `redis://127.0.0.1:PORT[/DB]`.
    pub(super) fn new(url: &str) -> Result<Self, Failure> {
        let rest = url.strip_prefix("redis://127.0.0.1:").unwrap_or_default();
        let port = rest.split('/').next().and_then(|port| port.parse().ok());
        let Some(port) = port else {
            let text = format!("--remote is {url}, expected redis://127.0.0.1:PORT");
            return Err(Failure::new(text));
        };
        if answers(port) {
            let text =
                format!("somebody listens on port {port}; the server to be killed is started here");
            return Err(Failure::new(text));
        }
        let folder = tempfile::tempdir()
            .map_err(|error| Failure::new(format!("no temporary folder: {error}")))?;
        Ok(Self {
            url: url.to_owned(),
            port,
            folder,
            server: None,
        })
    }

    fn start(&mut self) -> Result<(), Failure> {
        if let Some(server) = &mut self.server
            && matches!(server.try_wait(), Ok(None))
        {
            return Ok(());
        }
        let port = self.port.to_string();
        let started = Command::new("redis-server")
            .args(["--port", &port, "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no"])
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let server = started
            .map_err(|error| Failure::new(format!("redis-server does not start: {error}")))?;
        self.server = Some(server);
        let until = Instant::now() + SERVER_LIMIT;
        while !answers(self.port) {
            if Instant::now() > until {
                let text = format!("redis-server does not answer on port {port}");
                return Err(Failure::new(text));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            // One that was struck is reaped here.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

fn answers(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_says_what_runs() {
        let mut setting = Setting::of(Transport::Tcp);
        assert_eq!(setting.args()[2..], ["--tokens", "520", "--steps", "24"]);
        setting.conversations = Some(Conversations {
            sessions: 8,
            turns: 3,
            hicache: Some(PathBuf::from("/tmp/kv")),
            remote: None,
        });
        let args = setting.args();
        assert_eq!(args[2..6], ["--sessions", "8", "--turns", "3"]);
        assert_eq!(args[args.len() - 2..], ["--hicache", "/tmp/kv"]);
        assert_eq!(setting.server_pid(), None);
    }

    #[test]
    fn a_server_elsewhere_is_not_killed() {
        for url in ["redis://10.0.0.1:7000", "redis://127.0.0.1", "s3://bucket"] {
            assert!(Remote::new(url).is_err(), "{url}");
        }
    }
}
