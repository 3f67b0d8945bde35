"""Block digests: the format written down a second time, and what must and must not share one."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.errors import PlanError, RequestError
from dsv4_jax.manager.prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace, canonical_bytes

SPEC = HashSpec(block_tokens=4, weights_id=("weights", 7), vocab_size=1000)


def field(value: object) -> bytes:
    """The canonical bytes, from the description."""
    if value is None:
        tag, data = "n", b""
    elif isinstance(value, str):
        tag, data = "s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        tag, data = "b", value
    elif isinstance(value, tuple):
        tag, data = "t", b"".join(map(field, value))
    else:
        tag, data = "i", f"{int(value)}".encode()
    return tag.encode() + len(data).to_bytes(4, "little") + data


def reference(tokens: list[int], items: list[MediaItem], tenant: object, adapter: object) -> list[bytes]:
    """Digests token by token."""
    text = b"dsv4_jax block digest 1" + field(4) + field(("weights", 7)) + field((tenant, adapter))
    parent, out = hashlib.sha256(text).digest(), []
    for begin in range(0, len(tokens) - 3, 4):
        data = b"".join(int(t).to_bytes(4, "little") for t in tokens[begin : begin + 4])
        parts = []
        for item in items:
            covered = [p for p in range(begin, begin + 4) if item.start <= p < item.end]
            if covered:
                first, last = covered[0], covered[-1]
                parts.append(field((item.key, first - item.start, first - begin, last + 1 - begin)))
        parent = hashlib.sha256(parent + data + b"".join(sorted(parts))).digest()
        out.append(parent)
    return out


keys = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
items = st.lists(
    st.builds(
        lambda key, start, length: MediaItem(key, start, start + length), keys, st.integers(0, 30), st.integers(1, 12)
    ),
    max_size=3,
)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 999), max_size=40),
    items,
    keys,
    keys,
    st.lists(st.integers(0, 12), max_size=8),
    st.randoms(),
)
@pytest.mark.slow
def test_digests_are_as_described_however_they_are_made(tokens, media, tenant, adapter, cuts, random) -> None:
    expected = reference(tokens, media, tenant, adapter)
    space = Namespace(tenant, adapter)
    assert BlockHasher(SPEC, tokens, namespace=space, items=media).digests == expected
    random.shuffle(media)
    grown, start, fresh = BlockHasher(SPEC, namespace=space, items=media), 0, []
    for cut in [*cuts, len(tokens)]:
        part = tokens[start : start + cut]
        kinds = (list, tuple, lambda x: np.array(x, np.int32), lambda x: np.array(x, np.uint64))
        fresh += grown.extend(random.choice(kinds)(part))
        start += len(part)
    assert fresh == grown.digests == expected
    keep = random.randint(0, len(tokens))
    grown.truncate(keep)
    assert (grown.num_tokens, grown.digests) == (keep, expected[: keep // 4])
    assert [d for t in tokens[keep:] if (d := grown.append(np.int64(t)))] == expected[keep // 4 :]
    assert grown.digests == expected


@given(keys, keys)
def test_canonical_bytes_are_equal_only_for_equal_keys(a, b) -> None:
    assert canonical_bytes(a) == field(a)
    assert (canonical_bytes(a) == canonical_bytes(b)) == (a == b)


def test_types_are_told_apart_and_integer_types_are_not() -> None:
    values = [None, 1, "1", b"1", (1,), ("1",), (), (None,), "", b"", 0, ((1,),), (1, 1), 11, ("a", "b"), ("ab",), "n"]
    assert len({canonical_bytes(v) for v in values}) == len(values)
    assert canonical_bytes(np.int8(-3)) == canonical_bytes(-3) == canonical_bytes(np.int64(-3))
    assert canonical_bytes((np.uint8(200), "x")) == canonical_bytes((200, "x"))
    assert canonical_bytes(10**40) != canonical_bytes(10**40 + 1)
    for value in (1.0, True, np.bool_(True), np.float32(1), [1], {"a": 1}, (1, [2]), object()):
        with pytest.raises(RequestError, match="a key is made of"):
            canonical_bytes(value)


def test_python_and_numpy_ids_agree() -> None:
    ids = [5, 999, 0, 17, 3, 3, 3, 3]
    makers = [np.int32, np.int64, np.uint16, np.uint32, ">i4", ">u8"]
    hashes = [BlockHasher(SPEC, np.array(ids, kind)).digests for kind in makers]
    hashes += [BlockHasher(SPEC, form).digests for form in (ids, tuple(ids), [np.int16(t) for t in ids])]
    hashes.append(BlockHasher(SPEC, np.array([ids, ids]).T[:, 0]).digests)  # strided
    assert all(h == hashes[0] and len(h) == 2 for h in hashes)


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [1000],
        [2**31],
        [-(2**31) - 1],
        [2**70],
        [1.0],
        ["1"],
        [None],
        [[1, 2]],
        np.array([1000]),
        np.array([-1]),
        np.array([1.0]),
        np.array([[1]]),
        np.array([2**40]),
        np.array([True]),
    ],
)
def test_ids_that_are_none_are_refused_and_nothing_changes(tokens) -> None:
    hasher = BlockHasher(SPEC, [1, 2, 3])
    with pytest.raises(RequestError):
        hasher.extend(tokens)
    assert (hasher.num_tokens, hasher.digests) == (3, [])
    with pytest.raises(RequestError):
        BlockHasher(SPEC, tokens)


def test_the_whole_int32_range_is_the_default_vocabulary() -> None:
    spec = HashSpec(block_tokens=2)
    assert len(BlockHasher(spec, [2**31 - 1, 0]).digests) == 1
    with pytest.raises(RequestError, match="2147483648"):
        BlockHasher(spec, np.array([2**31]))
    with pytest.raises(RequestError, match="vocab_size"):
        HashSpec(vocab_size=2**31 + 1)
    with pytest.raises(PlanError):
        HashSpec(block_tokens=0)


def test_everything_that_matters_is_in_the_digest() -> None:
    tokens = list(range(8))
    variants = [
        BlockHasher(spec, tokens, namespace=space, items=media).digests[1]
        for spec in (SPEC, HashSpec(4, ("weights", 8), 1000), HashSpec(4, ("weights", "7"), 1000), HashSpec(4))
        for space in (None, Namespace("a"), Namespace(None, "a"), Namespace("a", "a"), Namespace(1), Namespace("1"))
        for media in (
            [],
            [MediaItem("k", 0, 8)],
            [MediaItem("k", 1, 8)],
            [MediaItem("l", 1, 8)],
            [MediaItem("k", 7, 8)],
        )
    ]
    assert len(set(variants)) == len(variants)
    # The first block's change reaches the second; a vocabulary is a check only.
    assert BlockHasher(SPEC, [9, *tokens[1:]]).digests[1] != BlockHasher(SPEC, tokens).digests[1]
    assert BlockHasher(HashSpec(4, ("weights", 7), 8), tokens).digests == BlockHasher(SPEC, tokens).digests


def test_items_are_half_open() -> None:
    tokens = list(range(12))
    plain = BlockHasher(SPEC, tokens).digests

    def with_item(start: int, end: int) -> list[bytes]:
        return BlockHasher(SPEC, tokens, items=[MediaItem("k", start, end)]).digests

    assert with_item(4, 8)[0] == plain[0]
    assert with_item(4, 8)[1] != plain[1]
    assert with_item(8, 12)[:2] == plain[:2]
    assert with_item(3, 4)[0] != plain[0]
    assert with_item(12, 13) == plain
    # A block knows its own part of an item, not how far the item goes on.
    assert with_item(4, 8)[:2] == with_item(4, 9)[:2] == with_item(4, 99)[:2]
    assert with_item(4, 8)[2] != with_item(4, 9)[2]
    for start, end in ((4, 4), (5, 4)):
        with pytest.raises(RequestError, match="empty"):
            with_item(start, end)
    with pytest.raises(PlanError):
        with_item(-1, 3)


def test_tenants_share_nothing() -> None:
    spaces = [Namespace(tenant, adapter) for tenant in (None, 0, "0", "a") for adapter in (None, "x")]
    prompts = [[1] * 40, [1] * 20 + [2] * 20]
    seen = [{d for p in prompts for d in BlockHasher(SPEC, p, namespace=space).digests} for space in spaces]
    assert all(len(digests) == 15 for digests in seen)
    assert not any(a & b for a, b in itertools.combinations(seen, 2))


def test_truncate_refuses_more_than_there_is() -> None:
    hasher = BlockHasher(SPEC, range(6))
    with pytest.raises(RequestError, match="cannot truncate 6 tokens to 7"):
        hasher.truncate(7)
    hasher.truncate(6)
    assert hasher.num_tokens == 6
