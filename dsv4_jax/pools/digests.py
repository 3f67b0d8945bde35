"""Digests of pages of tokens: by these names an event log tells routers what a `RadixCache` has. NumPy, no jax.

    root    = sha256("dsv4_jax page digest 1", page_size, namespace)
    digest  = sha256(the digest before it, 32 bytes + the page's token ids, int64 little-endian)

Canonical bytes only: the same in every process, whatever the integer type of the ids.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from hashlib import sha256
from typing import Any

import numpy as np

from ..checks import check_integer
from ..errors import PoolError
from .spec import as_ids

__all__ = ["as_tokens", "chain", "page_digests", "root_digest"]


def page_digests(tokens: Any, page_size: int = 1, namespace: Hashable = None) -> list[bytes]:
    """Returns the digests of a prompt's whole pages: a router compares them with those that events have named.

    Args:
        tokens, namespace: as of `RadixCache.match`; the namespace None, or integers, str, bytes and tuples of these.
        page_size: of the cache's allocator.

    Raises:
        PoolError: the tokens are no integers, or the namespace has no canonical bytes.
    """
    page = check_integer("page_size", page_size, 1, error=PoolError)  # a Python int: 8 times 32 is 0 in uint8
    return chain(root_digest(page, namespace), as_tokens(tokens), page)


def as_tokens(tokens: Any) -> np.ndarray:
    """Returns token ids as a flat int64 array of its own. Raises `PoolError`."""
    tokens = as_ids("tokens", tokens).reshape(-1)
    if tokens.dtype == np.uint64 and tokens.size and tokens.max() > np.iinfo(np.int64).max:
        raise PoolError(f"tokens must be int64 numbers, got {int(tokens.max())}")
    return tokens.astype(np.int64)


def chain(digest: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    """The digests of the whole pages of `tokens`, which follow what `digest` stands for."""
    out, data, width = [], tokens.astype("<i8").tobytes(), 8 * page_size
    for at in range(0, len(data) - width + 1, width):
        digest = sha256(digest + data[at : at + width]).digest()
        out.append(digest)
    return out


def root_digest(page_size: int, namespace: Hashable) -> bytes:
    # ASCII shows type, order and value of these, and does not depend on the version of Unicode.
    return sha256(f"dsv4_jax page digest 1 {page_size} {_plain(namespace)!a}".encode()).digest()


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, bytes):
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= value < 2**64:
        return operator.index(value)
    if type(value) is tuple:
        return tuple(map(_plain, value))
    raise PoolError(f"a namespace with digests is made of None, 64-bit integers, str, bytes and tuples, got {value!r}")
