"""Digests of token blocks: what makes two blocks the same cached bytes. Pure Python + numpy.

A block's digest is SHA-256 over canonical bytes only (no pickle, no `hash()`), so it does not depend
on the process, on the integer type of the ids, or on object identity:

    root    = sha256("dsv4_jax block digest 1" + field(block_tokens) + field(weights_id) + field(namespace))
    digest  = sha256(parent digest, 32 bytes + token ids, int32 little-endian + extra)

`parent` is the root for the first block. `extra` is empty without multimodal items; else one field
for each item that overlaps the block. As tokens take a fixed number of bytes, nothing is ambiguous.
`field` writes type, length and bytes of a value, so 1, "1" and b"1" differ (see `canonical_bytes`).

The namespace and the weights' id enter through the root: prompts of two tenants, or before and after a
change of weights, share no digest. SHA-256 because it was the fastest of hashlib's here (SHA extensions).
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from ...checks import INT32_MAX, check_integer, shown
from ...errors import PlanError, RequestError
from .token_ids import check_range, packed, token_ids

__all__ = ["BlockHasher", "HashSpec", "Key", "MediaItem", "Namespace", "canonical_bytes", "given_items"]

Key = None | int | str | bytes | tuple["Key", ...]


def canonical_bytes(value: Any) -> bytes:
    """Returns `value` as type tag, length (uint32, little-endian) and bytes; tuples nest.

    Integers of the same value agree, Python's, numpy's or an enum's. Raises `RequestError` for anything but
    None, integers (up to 4300 digits), str, bytes and tuples of these: floats and booleans have no business
    in a key. And for tuples nested a thousand deep.
    """
    if value is None:
        return b"n" + struct.pack("<I", 0)
    if isinstance(value, str):
        return _field(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _field(b"b", value)
    if isinstance(value, tuple):
        try:
            return _field(b"t", b"".join(map(canonical_bytes, value)))
        except RecursionError:
            raise RequestError("a key is made of tuples nested too deeply") from None
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        try:
            return _field(b"i", int.__repr__(operator.index(value)).encode("ascii"))
        except ValueError as error:  # Python writes so many digits and no more
            raise RequestError(f"a key is made of numbers that can be written: {error}") from error
    raise RequestError(f"a key is made of None, int, str, bytes and tuples, got {shown(value)}")


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<I", len(data)) + data


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share. Requests of different namespaces never have a digest in common."""

    tenant: Key = None
    adapter: Key = None


@dataclasses.dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture (sound, ...) whose placeholder tokens are [start, end), half open.

    Attributes:
        key: what its content is, e.g. `("image", digest)`.
        start, end: token positions in the prompt, 0 <= start < end.
    """

    key: Key
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class HashSpec:
    """What all requests of one cache share.

    Attributes:
        block_tokens: tokens of a block.
        weights_id: whatever else the bytes of a block depend on: name of the weights, fingerprint of the layout.
        vocab_size: ids are 0..vocab_size - 1, at most 2^31.

    Raises:
        RequestError: a weights' id of a wrong type, or a vocabulary beyond int32.
        PlanError: a count that is none.
    """

    block_tokens: int = 128
    weights_id: Key = None
    vocab_size: int = INT32_MAX + 1

    def __post_init__(self) -> None:
        check_integer("block_tokens", self.block_tokens, 1, error=PlanError)
        if check_integer("vocab_size", self.vocab_size, 1, error=PlanError) > INT32_MAX + 1:
            raise RequestError(f"vocab_size must be at most {INT32_MAX + 1}, got {self.vocab_size}")
        canonical_bytes(self.weights_id)

    def root(self, namespace: Namespace | None = None) -> bytes:
        """Returns the parent digest of a namespace's first blocks: 32 bytes. None is the namespace of those who name
        none.

        Raises:
            RequestError: neither None nor a `Namespace`, or a key of a wrong type.
        """
        if namespace is not None and not isinstance(namespace, Namespace):
            raise RequestError(f"namespace must be None or a Namespace, got {shown(namespace)}")
        space = Namespace() if namespace is None else namespace
        fields = (self.block_tokens, self.weights_id, (space.tenant, space.adapter))
        return sha256(b"dsv4_jax block digest 1" + b"".join(map(canonical_bytes, fields))).digest()


class BlockHasher:
    """The digests of one request's full blocks, as its tokens become known.

    Attributes:
        root: the namespace's root digest.
        digests: one per full block, in path order.

    Args:
        spec: of the cache.
        tokens: those known now.
        namespace: of the request.
        items: multimodal items, in any order; they may lie beyond the tokens known so far.

    Raises:
        RequestError: an id out of range, no namespace or items, a key of a wrong type, or an empty interval.
        PlanError: an item's position that is negative, no integer, or beyond int64.
    """

    def __init__(
        self,
        spec: HashSpec,
        tokens: Sequence[int] | np.ndarray = (),
        *,
        namespace: Namespace | None = None,
        items: Iterable[MediaItem] = (),
    ):
        self.spec, self._namespace = spec, namespace
        self.root = spec.root(namespace)
        self.digests: list[bytes] = []
        self._ids = array("I")
        self._items = _checked(items)
        self.extend(tokens)

    @classmethod
    def adopt(
        cls, spec: HashSpec, ids: array[int], *, namespace: Namespace | None = None, items: Iterable[MediaItem] = ()
    ) -> BlockHasher:
        """A hasher of ids of the vocabulary, as `packed_ids` makes them: the array is the hasher's from now on."""
        hasher = cls(spec, namespace=namespace, items=items)
        hasher._ids = ids
        hasher._hash_full_blocks()
        return hasher

    @property
    def namespace(self) -> Namespace:
        """The namespace of the request: of one that names none, that without a tenant."""
        return Namespace() if self._namespace is None else self._namespace

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def ids(self, num_tokens: int) -> array[int]:
        """Returns the first `num_tokens` ids, code "I"."""
        return self._ids[:num_tokens]

    def named(self, first: int, last: int) -> Iterator[tuple[bytes, array[int]]]:
        """Yields digest and ids of the blocks first..last - 1 that nothing but their tokens names: none of a namespace,
        and none from the first item on."""
        size = self.spec.block_tokens
        if self.namespace != Namespace():
            return
        plain = min([last, *(start // size for _, start, _ in self._items)])
        for i in range(first, plain):
            yield self.digests[i], self._ids[i * size : (i + 1) * size]

    def extend(self, tokens: Sequence[int] | np.ndarray) -> list[bytes]:
        """Adds tokens; returns the digests of blocks that became full. Raises `RequestError`, then nothing changed."""
        self._ids += packed(token_ids(tokens, self.spec.vocab_size))
        return self._hash_full_blocks()

    def append(self, token: int) -> bytes | None:
        """Adds one token; returns the digest of the block it fills, if it does."""
        if type(token) is not int or not 0 <= token < self.spec.vocab_size:
            filled = self.extend((token,))  # a numpy integer, or to be refused there
            return filled[0] if filled else None
        self._ids.append(token)
        return self._hash_full_blocks()[0] if self.num_tokens % self.spec.block_tokens == 0 else None

    def copy(self) -> BlockHasher:
        """Another hasher that stands where this one does."""
        twin = copy.copy(self)
        twin.digests, twin._ids = list(self.digests), self._ids[:]
        return twin

    def of(self, spec: HashSpec) -> BlockHasher:
        """Returns a hasher of the same tokens in the same namespace, of another cache or other weights."""
        other = BlockHasher(spec, namespace=self._namespace)
        other._items, other._ids = self._items, self._ids[:]
        other._hash_full_blocks()
        return other

    def follow(self, ids: array[int], start: int = 0) -> None:
        """Makes the tokens from `start` on those of `ids`; digests are computed anew where they differ.

        Args:
            ids: code "I". What lies beyond them stays if all of them agree.
            start: a block boundary, at most `num_tokens`.

        Raises:
            RequestError: an id is none of the vocabulary; then nothing changed.
            PlanError: `start` is no such boundary.
        """
        start = check_integer("start", start, error=PlanError)
        if start % self.spec.block_tokens or start > self.num_tokens:
            raise PlanError(f"start {start} is not one of the block boundaries in 0..{self.num_tokens}")
        known = self._ids[start : start + len(ids)]
        if known == ids:
            return
        check_range(np.frombuffer(ids, np.uint32), self.spec.vocab_size)
        common = min(len(known), len(ids))
        differ = np.flatnonzero(np.frombuffer(known, np.uint32)[:common] != np.frombuffer(ids, np.uint32)[:common])
        same = int(differ[0]) if differ.size else common
        self.truncate(start + same)
        self._ids += ids[same:]
        self._hash_full_blocks()

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens but the first `num_tokens` (rejected drafts). Raises `RequestError` if there are fewer."""
        num_tokens = check_integer("num_tokens", num_tokens, error=PlanError)
        if num_tokens > self.num_tokens:
            raise RequestError(f"cannot truncate {self.num_tokens} tokens to {num_tokens}")
        del self._ids[num_tokens:]
        del self.digests[num_tokens // self.spec.block_tokens :]

    def _hash_full_blocks(self) -> list[bytes]:
        size, done, fresh = self.spec.block_tokens, len(self.digests), list[bytes]()
        parent, blocks = self.digests[-1] if done else self.root, len(self._ids) // self.spec.block_tokens
        extras = self._extras(done, blocks) if self._items else {}
        data, width = self._ids[done * size : blocks * size].tobytes(), 4 * size
        for i, start in enumerate(range(0, len(data), width), done):
            block = parent + data[start : start + width]
            parent = sha256(block + extras[i] if extras and i in extras else block).digest()
            fresh.append(parent)
        self.digests += fresh
        return fresh

    def _extras(self, first: int, last: int) -> dict[int, bytes]:
        """Returns the extra bytes of those blocks first..last - 1 that an item overlaps.

        An item counts with its key, where its part begins in the item, and where that part lies in
        the block: all that the block's bytes can depend on. So a block does not depend on how far an
        item reaches beyond it, and the order in which the items were given does not matter.
        """
        block, parts = self.spec.block_tokens, dict[int, list[bytes]]()
        for key, start, end in self._items:
            for i in range(max(start // block, first), min(-(-end // block), last)):
                low, high = max(start, i * block), min(end, (i + 1) * block)
                part = (low - start, low - i * block, high - i * block)
                parts.setdefault(i, []).append(_field(b"t", key + b"".join(map(canonical_bytes, part))))
        return {i: b"".join(sorted(fields)) for i, fields in parts.items()}


def given_items(items: Iterable[MediaItem]) -> tuple[MediaItem, ...]:
    """Items that are not looked at yet. Raises `RequestError` for what is no list."""
    try:
        return tuple(items)
    except TypeError as error:
        raise RequestError(f"items must be MediaItems, got {shown(items)}") from error


def _checked(items: Iterable[MediaItem]) -> list[tuple[bytes, int, int]]:
    """(canonical bytes of the key, start, end) of each item. Raises as `BlockHasher` does."""
    checked = []
    for item in given_items(items):
        if not isinstance(item, MediaItem):
            raise RequestError(f"items must be MediaItems, got {shown(item)}")
        start, end = (
            check_integer("an item's start", item.start, error=PlanError),
            check_integer("an item's end", item.end, error=PlanError),
        )
        if start >= end:
            raise RequestError(f"an item's interval [{start}, {end}) is empty")
        checked.append((canonical_bytes(item.key), start, end))
    return checked
