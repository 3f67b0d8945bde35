"""`Identity`: a name that only its owner can go by. No jax.

A host draws a secret number when it starts, and its name ends in the *mark* of what is public of it. Two hosts that
know what is public of each other have a key in common that nobody else can make (Diffie and Hellman's exchange, in the
group of 2,048 bits of RFC 3526). So whoever uses the key of a name is that host, whatever others know of it. This is
about names alone: what is said afterwards is not encrypted by it, which is for TLS.
"""

from __future__ import annotations

import hashlib
import secrets

__all__ = ["PUBLIC_BYTES", "Identity", "mark_of"]

PUBLIC_BYTES = 256
_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3"
    "CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5"
    "AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356"
    "208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28F"
    "B5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)


class Identity:
    """A secret number, made anew.

    Attributes:
        public: what others are told of it, `PUBLIC_BYTES`.
        mark: 32 hexadecimal digits of its hash, in which the name of its owner ends.
    """

    def __init__(self) -> None:
        self._number = secrets.randbits(256) | 1 << 255
        self.public = pow(2, self._number, _PRIME).to_bytes(PUBLIC_BYTES, "big")
        self.mark = mark_of(self.public)

    def key_with(self, public: bytes) -> bytes:
        """32 bytes that the owner of that one has, too. Raises `ValueError` if it is of nobody."""
        theirs = int.from_bytes(public, "big")
        if len(public) != PUBLIC_BYTES or not 1 < theirs < _PRIME - 1:
            raise ValueError("no public number")
        return hashlib.sha256(pow(theirs, self._number, _PRIME).to_bytes(PUBLIC_BYTES, "big")).digest()


def mark_of(public: bytes) -> str:
    """The mark of what is public of an identity."""
    return hashlib.sha256(public).hexdigest()[:32]
