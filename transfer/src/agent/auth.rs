//! Challenge and response over a shared secret: each side proves with its first words on a connection
//! that it knows the secret, and the secret never travels.
//!
//! `HMAC-SHA-256(secret, label | side of the prover | link version | prover's nonce | verifier's nonce)`.
//! Nonces are fresh for each connection, so an answer cannot be replayed; the side is in the input, so
//! an answer cannot be sent back to where it came from. What follows on the connection is not
//! encrypted and not signed: the secret keeps strangers out, a network that changes bytes it does not.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::wire;

const LABEL: &[u8] = b"kvgate link auth 1";

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// It called `connect`.
    Connector,
    /// It accepted.
    Listener,
}

impl Side {
    /// The other end.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Connector => Self::Listener,
            Self::Listener => Self::Connector,
        }
    }
}

/// The answer of `prover` to the peer's nonce.
pub(crate) fn prove(
    secret: &[u8],
    prover: Side,
    own_nonce: &[u8; 32],
    peer_nonce: &[u8; 32],
) -> [u8; 32] {
    code(secret, prover, own_nonce, peer_nonce)
        .finalize()
        .into_bytes()
        .into()
}

/// Whether `mac` is the answer that the peer, on the `prover` side, owes. Takes the same time for
/// every wrong answer.
pub(crate) fn verify(
    secret: &[u8],
    prover: Side,
    peer_nonce: &[u8; 32],
    own_nonce: &[u8; 32],
    mac: &[u8; 32],
) -> bool {
    code(secret, prover, peer_nonce, own_nonce)
        .verify_slice(mac)
        .is_ok()
}

fn code(
    secret: &[u8],
    prover: Side,
    prover_nonce: &[u8; 32],
    verifier_nonce: &[u8; 32],
) -> Hmac<Sha256> {
    // A key of any length is allowed, so the empty key of the other arm is never taken.
    let mut code =
        Hmac::<Sha256>::new_from_slice(secret).unwrap_or_else(|_| Hmac::new(&Default::default()));
    code.update(LABEL);
    code.update(&[match prover {
        Side::Connector => 0,
        Side::Listener => 1,
    }]);
    code.update(&wire::VERSION.to_le_bytes());
    code.update(prover_nonce);
    code.update(verifier_nonce);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_fits_one_secret_one_side_and_one_pair_of_nonces() {
        let (ours, theirs) = ([1; 32], [2; 32]);
        let mac = prove(b"secret", Side::Connector, &ours, &theirs);
        assert!(verify(b"secret", Side::Connector, &ours, &theirs, &mac));
        assert!(!verify(b"Secret", Side::Connector, &ours, &theirs, &mac));
        assert!(!verify(b"secret", Side::Listener, &ours, &theirs, &mac));
        assert!(!verify(b"secret", Side::Connector, &theirs, &ours, &mac));
        assert!(!verify(b"secret", Side::Connector, &ours, &[3; 32], &mac));
    }
}
