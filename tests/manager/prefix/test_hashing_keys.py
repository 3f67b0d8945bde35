"""What keys, items and token ids may be; and digests as they were when records were first stored under them."""

from __future__ import annotations

import copy
import enum
import hashlib
import operator
from array import array

import numpy as np
import pytest

from dsv4_jax.errors import PlanError, RequestError
from dsv4_jax.manager.prefix.hashing import (
    BlockHasher,
    HashSpec,
    MediaItem,
    Namespace,
    canonical_bytes,
)
from dsv4_jax.manager.prefix.token_ids import packed_ids, token_ids

from ...effort import lines_run

SPEC = HashSpec(4, ("weights", 7), 1000)
WIDE = HashSpec(weights_id=("fingerprint", "w"), vocab_size=1000)
IDS = [(7 * i * i + 3 * i) % 1000 for i in range(700)]
ITEMS = [
    MediaItem(("image", b"\x01\x02"), 3, 9),
    MediaItem("sound", 8, 48),
    MediaItem(None, 600, 5000),
    MediaItem(-5, 30, 31),
]
EDGES = [MediaItem("k", 4, 8), MediaItem("k", 7, 9), MediaItem("k", 4, 8)]
BEYOND = [MediaItem("k", 690, 10_000), MediaItem("l", 900, 901)]

# SHA-256 over all digests of a prompt, made before items were clipped to it. Stores hold records under such digests.
FROZEN = [
    (SPEC, 30, None, [], "e85f832083a35aab52f4342f741aa6740a2038b1467b62f0a9eae677623034ab"),
    (SPEC, 30, Namespace("a", ("lora", 2)), [], "e6b5eba975b729fa198e4f219ae5aa662b2cca1ec37fd759a3a3eff6c9ab8a6a"),
    (SPEC, 30, Namespace(np.int64(4)), [], "d85e82c5032510feeddffff7ae202bc71b97be587a6b0032c5fac6565985c20d"),
    (SPEC, 700, Namespace("a"), ITEMS, "18fa9afb884b9a8538c1b9d716e9af4ae2995ec5d933f5b8667274e0c77eca85"),
    (SPEC, 700, Namespace("a"), ITEMS[::-1], "18fa9afb884b9a8538c1b9d716e9af4ae2995ec5d933f5b8667274e0c77eca85"),
    (SPEC, 20, None, EDGES, "fc4fcdf92f58616933be4b7710f811d08a286f33250ea9453d8e108f0dd84ab9"),
    (WIDE, 700, None, [MediaItem("k", 0, 700)], "7fb3fc344aa198055c3a4aa0629f1838334c782a631ad9f9957c467b06287647"),
    (WIDE, 700, None, BEYOND, "e88b18b139d4268157fa5b0c621f12f7140e72b399703c0d5e98d822cb65aa94"),
]


@pytest.mark.parametrize(("spec", "length", "space", "items", "frozen"), FROZEN)
def test_digests_never_change(spec, length, space, items, frozen) -> None:
    whole = BlockHasher(spec, IDS[:length], namespace=space, items=items)
    assert hashlib.sha256(b"".join(whole.digests)).hexdigest() == frozen
    # However they come: in pieces, with drafts taken back, in a copy that goes its own way.
    grown = BlockHasher(spec, IDS[:5], namespace=space, items=iter(items))
    grown.extend([1, 2, 3])
    grown.truncate(5)
    twin = grown.copy()
    for token in IDS[5:length]:
        grown.append(token)
    twin.extend(np.array(IDS[5:length]))
    assert grown.digests == twin.digests == whole.digests


def kind(value: object) -> str:
    """The name of a case: some have no text of their own."""
    return type(value).__name__


# Namespaces


@pytest.mark.parametrize(
    "space", ["", "tenant", 0, 1, [], {}, (), ("a", None), False, True, b"", 0.0, Namespace, object()]
)
def test_only_a_namespace_is_one(space) -> None:
    with pytest.raises(RequestError, match="namespace must be None or a Namespace"):
        SPEC.root(space)
    with pytest.raises(RequestError, match="namespace must be None or a Namespace"):
        BlockHasher(SPEC, IDS, namespace=space)
    assert SPEC.root(None) == SPEC.root(Namespace())


# Keys


class Tenant(int, enum.Enum):
    FIRST = 4


def nested(depth: int) -> tuple:
    key: tuple = ()
    for _ in range(depth):
        key = (key,)
    return key


def test_an_integer_key_is_its_value_whatever_its_class() -> None:
    assert canonical_bytes(Tenant.FIRST) == canonical_bytes(4) == canonical_bytes(np.uint8(4))


@pytest.mark.parametrize(
    "key", [10**5000, -(10**5000), (1, 10**5000), nested(100_000), nested(2000), np.nan, np.array([1])], ids=kind
)
def test_keys_without_canonical_bytes(key) -> None:
    for make in (canonical_bytes, lambda key: SPEC.root(Namespace(key)), lambda key: HashSpec(4, key)):
        with pytest.raises(RequestError):
            make(key)
    with pytest.raises(RequestError):
        BlockHasher(SPEC, items=[MediaItem(key, 0, 1)])


# Items


def test_an_item_costs_what_the_prompt_is_long() -> None:
    beyond = MediaItem("k", 2, 2**40), MediaItem("l", 2**39, 2**62)
    within = MediaItem("k", 2, 701), MediaItem("l", 705, 801)
    assert lines_run(BlockHasher, SPEC, IDS, items=beyond) <= 2 * lines_run(BlockHasher, SPEC, IDS, items=within)
    far = BlockHasher(SPEC, IDS, items=beyond)
    assert far.digests == BlockHasher(SPEC, IDS, items=[MediaItem("k", 2, 701)]).digests
    grown = BlockHasher(SPEC, items=[MediaItem("k", 2, 2**40)])
    assert grown.extend(IDS) == far.digests


def test_many_items_cost_a_look_each() -> None:
    items = [MediaItem("k", i, i + 3) for i in range(0, 20_000, 4)]
    few, many = (BlockHasher(SPEC, [1] * 20_000, items=given) for given in (items[:500], items))

    def grow(hasher: BlockHasher) -> None:
        for _ in range(200):  # 50 blocks
            hasher.append(2)

    assert lines_run(grow, many) <= 10 * lines_run(grow, few)
    assert many.digests[:5000] == BlockHasher(SPEC, [1] * 20_000, items=items[::-1]).digests


@pytest.mark.parametrize(
    "items", [None, 5, [None], [("k", 0, 3)], ["k"], [Namespace()], {"k": 1}, MediaItem("k", 0, 1)]
)
def test_items_are_items(items) -> None:
    with pytest.raises(RequestError, match="items"):
        BlockHasher(SPEC, IDS, items=items)


@pytest.mark.parametrize(
    "place", [True, 1.0, np.nan, "1", None, np.array([1]), np.float32(1), 2**63, -1, 10**5000], ids=kind
)
def test_an_items_place_is_two_counts(place) -> None:
    for item in (MediaItem("k", place, 9), MediaItem("k", 0, place)):
        with pytest.raises(PlanError, match="an item's"):
            BlockHasher(SPEC, IDS, items=[item])


def test_what_an_items_iterator_raises_is_passed_on() -> None:
    def broken():
        yield MediaItem("k", 0, 1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        BlockHasher(SPEC, IDS, items=broken())


# Token ids


class Evil:
    def __index__(self) -> int:
        raise ZeroDivisionError

    __repr__ = __index__


BAD_TOKENS = {
    "bool": [1, True],
    "numpy bool": [np.True_, 2],
    "bool array": np.array([True]),
    "false": [False] * 3,
    "float": [1, 1.0],
    "numpy float": [np.float32(1)],
    "nan": [float("nan")],
    "string": ["1"],
    "none": [1, None],
    "a text": "12",
    "no sequence": 5,
    "nothing": None,
    "set of none": {None},
    "bytes of str": [b"1"],
    "huge": [10**5000],
    "beyond int64": [2**63],
    "beyond int32": [2**31],
    "negative": [3, -1],
    "beyond": [1000],
    "2-D": np.array([[1, 2]]),
    "0-D": np.array(1),
    "empty 2-D": np.zeros((0, 4), int),
    "nested": [[1], [2]],
    "ragged": [1, [2, 3]],
    "arrays in a list": [np.array([1]), np.array([2])],
    "uint64": np.array([2**64 - 1], np.uint64),
    "objects": np.array([1, 2], object),
    "evil": [Evil()],
    "dates": np.array(["2026-01-01"], "M8[D]"),
    "durations": np.array([3], "m8[s]"),
    "complex": np.array([1j]),
    "records": np.zeros(2, [("a", int)]),
}


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_bad_token_ids(tokens) -> None:
    with pytest.raises(RequestError, match=r"tokens must be|token id .* is not in 0\.\.999"):
        token_ids(tokens, 1000)
    hasher = BlockHasher(SPEC, [1, 2, 3])
    with pytest.raises(RequestError):
        hasher.extend(tokens)
    assert (hasher.num_tokens, hasher.digests) == (3, [])


@pytest.mark.parametrize("token", [True, np.True_, 1.0, "1", None, [1], 1000, -1, 10**5000, Evil()], ids=kind)
def test_bad_last_token(token) -> None:
    hasher = BlockHasher(SPEC, [1, 2, 3])
    with pytest.raises(RequestError):
        hasher.append(token)
    assert (hasher.num_tokens, hasher.digests) == (3, [])


@pytest.mark.parametrize("empty", [[], (), "", np.array([]), np.zeros(0, int), iter(()), {}])
def test_no_tokens(empty) -> None:
    assert token_ids(empty, 1000).shape == (0,)


def test_a_generator_is_read_once_and_what_it_raises_is_passed_on() -> None:
    def broken():
        yield 1
        raise TypeError("mine")

    hasher = BlockHasher(SPEC, [1, 2, 3])
    with pytest.raises(TypeError, match="mine"):
        hasher.extend(broken())
    assert hasher.num_tokens == 3
    assert token_ids((i for i in range(3)), 1000).tolist() == [0, 1, 2]


# Token ids, as a request keeps them


class Indexed:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_bad_tokens_make_no_array(tokens) -> None:
    with pytest.raises(RequestError, match=r"tokens must be|token id .* is not in 0\.\.999"):
        packed_ids(tokens, 1000)


def test_a_masked_array_is_its_numbers() -> None:
    """Its list has None where it is masked, and its extremes look past that: ids of no vocabulary came in."""
    given = np.ma.array([1, 2, 3], mask=[0, 0, 1])
    assert packed_ids(given, 1000).tolist() == token_ids(given, 1000).tolist() == [1, 2, 3]
    for convert in (token_ids, packed_ids):
        with pytest.raises(RequestError, match=r"token id 1000 is not in 0\.\.999"):
            convert(np.ma.array([1, 1000], mask=[0, 1]), 1000)


@pytest.mark.parametrize(
    "given",
    [
        [np.int8(100)] * 5,
        [3, np.uint64(2)],
        [np.int32(2**30), np.int32(2**30)],
        [Indexed(), 3],
        (5, 6),
        iter([5, 6]),
        range(4),
        np.arange(4),
        np.arange(4, dtype=np.uint64),
        np.arange(8, dtype=">i2")[::2],
        array("I", [5, 999]),
        [],
        np.zeros(0),
    ],
    ids=kind,
)
def test_tokens_of_any_type_become_plain_ints(given) -> None:
    numbers = [operator.index(token) for token in copy.copy(given)]
    ids = packed_ids(given)
    assert ids is not given and ids.typecode == "I"
    assert ids.tolist() == numbers == token_ids(ids).tolist()


@pytest.mark.parametrize("token", [-1, 1000, 2**31, 2**32, 2**64])
def test_the_id_that_is_none_is_named(token) -> None:
    for call in (token_ids, packed_ids):
        with pytest.raises(RequestError, match=f"token id {token} is not in 0..999"):
            call([5, token, 6], 1000)


def test_adopted_ids_are_hashed_as_others() -> None:
    adopted = BlockHasher.adopt(SPEC, packed_ids(IDS), namespace=Namespace("a"), items=ITEMS)
    assert adopted.digests == BlockHasher(SPEC, IDS, namespace=Namespace("a"), items=ITEMS).digests
    twin = adopted.copy()
    adopted.extend([1, 2, 3, 4])
    assert adopted.ids(704).tolist() == [*IDS, 1, 2, 3, 4] and twin.num_tokens == 700


def test_a_long_prompt_is_converted_without_a_look_at_each_token() -> None:
    short, long = ([0, 1, 500] * n for n in (10, 10_000))
    assert lines_run(packed_ids, long, 1000) == lines_run(packed_ids, short, 1000)
