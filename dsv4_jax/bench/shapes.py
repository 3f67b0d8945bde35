"""Named argument shapes of every op, shared by the benchmark and the tests. Imports no jax.

A shape knows the bytes an implementation cannot avoid moving (each input that is needed read once, each
output written once; ids and counts included, tables and masks under 1 % left out) and its FLOPs. Context
lengths are tokens: a CSA request of N tokens has N / 4 entries and index keys, an HCA request N / 128.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import OptionError
from ..formats import RowFormat, index_format, kv_format
from ..layout import KeySplit

if TYPE_CHECKING:  # it imports jax
    from ..ops.attend import KernelSplit

__all__ = [
    "CASES",
    "OPS",
    "QUICK",
    "AppendShape",
    "AttendShape",
    "Case",
    "CompressShape",
    "DraftHead",
    "GatherShape",
    "KVStoreShape",
    "ScoreShape",
    "Shape",
    "TopKShape",
    "select",
]

DraftHead = Literal["mtp", "dspark"]  # what makes the drafts of a step

HEAD_DIM, ROPE_DIM, INDEX_DIM, INDEX_HEADS, WINDOW = 512, 64, 128, 64, 128
BLOCK_TOKENS = 128
CSA_RATIO, HCA_RATIO = 4, 128
K8, K128, M1 = 8 * 1024, 128 * 1024, 1024 * 1024
FP8 = kv_format("fp8", HEAD_DIM, ROPE_DIM)
INDEX_FP4, INDEX_FP8 = index_format("fp4", INDEX_DIM), index_format("fp8", INDEX_DIM)
BF16, F32, ID = 2, 4, 4  # bytes


class Shape:
    """What an op is called with: how much it moves and multiplies at least."""

    @property
    def bytes_moved(self) -> int:
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Ops that only move rows have none."""
        return 0


@dataclasses.dataclass(frozen=True)
class AppendShape(Shape):
    """`tokens` rows into a pool; `fused`: from raw bf16 rows (norm and RoPE included), else from finished ones."""

    tokens: int
    fmt: RowFormat
    fused: bool = True

    @property
    def bytes_moved(self) -> int:
        return self.tokens * (self.fmt.dim * BF16 + ID + self.fmt.row_bytes)


@dataclasses.dataclass(frozen=True)
class CompressShape(Shape):
    """A compressor fed with `rows` requests of `length` tokens each, every request completing its last entry.

    length 1 is a decode step in which all requests flush; a longer one starts at position 0 (prefill).
    `index_fmt`: a CSA layer's other compressor, for its index keys, is fed by the same call.
    """

    kind: Literal["csa", "index", "hca", "hca_raw"]
    rows: int
    fmt: RowFormat
    length: int = 1
    index_fmt: RowFormat | None = None

    @property
    def compressors(self) -> tuple[CompressShape, ...]:
        """The shapes of the compressors that the call feeds, one each."""
        main = dataclasses.replace(self, index_fmt=None)
        return (main, dataclasses.replace(main, kind="index", fmt=self.index_fmt)) if self.index_fmt else (main,)

    @property
    def ratio(self) -> int:
        return CSA_RATIO if self.kind in ("csa", "index") else HCA_RATIO

    @property
    def input_width(self) -> int:
        """Columns of kv (and of score): CSA rows have an overlapping and an own half."""
        return self.fmt.dim * (2 if self.ratio == CSA_RATIO else 1)

    @property
    def ring(self) -> int:
        """How many state rows a slot has."""
        return {"csa": 2 * CSA_RATIO, "index": 2 * CSA_RATIO, "hca": 1, "hca_raw": HCA_RATIO}[self.kind]

    @property
    def state_width(self) -> int:
        return 3 * self.fmt.dim if self.kind == "hca" else 2 * self.input_width

    @property
    def bytes_moved(self) -> int:
        """Counts kv and score in, state read and written, and entries out, of each request.

        A decode step reads the halves of the 2r - 1 older rows that its entry pools (CSA), the triple
        (HCA online) or r - 1 older rows (HCA raw), and writes one state row. A prefill reads no state and
        leaves the last `ring` rows.
        """
        if len(self.compressors) > 1:
            return sum(one.bytes_moved for one in self.compressors)
        row = self.state_width * F32
        fed = self.length * 2 * self.input_width * F32
        written = min(self.length, self.ring) * row
        entries = max(1, self.length // self.ratio) * self.fmt.row_bytes
        read = 0
        if self.length == 1:
            older = {
                "csa": (2 * CSA_RATIO - 1) * row // 2,
                "index": (2 * CSA_RATIO - 1) * row // 2,
                "hca": row,
                "hca_raw": (HCA_RATIO - 1) * row,
            }
            read = older[self.kind]
        return self.rows * (fed + read + written + entries)


@dataclasses.dataclass(frozen=True)
class GatherShape(Shape):
    """A gather of `rows` stored rows to dense bf16."""

    rows: int
    fmt: RowFormat

    @property
    def bytes_moved(self) -> int:
        return self.rows * (ID + self.fmt.row_bytes + self.fmt.dim * BF16)


@dataclasses.dataclass(frozen=True)
class ScoreShape(Shape):
    """Index scores of `tokens` tokens over `blocks` blocks of `rows_per_block` keys each."""

    tokens: int
    heads: int
    blocks: int
    rows_per_block: int
    fmt: RowFormat

    @property
    def keys(self) -> int:
        return self.blocks * self.rows_per_block

    @property
    def bytes_moved(self) -> int:
        """Counts keys and block ids, bf16 queries, float32 head weights, and float32 scores out."""
        per_token = self.keys * (self.fmt.row_bytes + F32) + self.blocks * ID
        return self.tokens * (per_token + self.heads * (self.fmt.dim * BF16 + F32))

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.heads * self.fmt.dim * self.keys


@dataclasses.dataclass(frozen=True)
class TopKShape(Shape):
    """A selection of the best k of `entries` float32 scores for each of `tokens` tokens."""

    tokens: int
    entries: int
    k: int

    @property
    def bytes_moved(self) -> int:
        return self.tokens * (self.entries * F32 + min(self.k, self.entries) * ID)


@dataclasses.dataclass(frozen=True)
class AttendShape(Shape):
    """`tokens` tokens of `heads` heads over `window` keys and up to `entries` compressed ones (0: SWA)."""

    tokens: int
    heads: int
    window: int
    entries: int
    fmt: RowFormat
    key_split: KernelSplit = "throughput"

    @property
    def keys(self) -> int:
        return self.window + self.entries

    @property
    def bytes_moved(self) -> int:
        """Counts key rows and their ids, bf16 queries, float32 output and log-sum-exp."""
        per_head = self.fmt.dim * (BF16 + F32) + F32
        return self.tokens * (self.keys * (self.fmt.row_bytes + ID) + self.heads * per_head)

    @property
    def flops(self) -> int:
        """Counts two products over the same rows."""
        return 4 * self.tokens * self.heads * self.fmt.dim * self.keys


@dataclasses.dataclass(frozen=True)
class KVStoreShape(Shape):
    """`tokens` bf16 rows of K and of V, `heads` heads of `dim` each, into a `KVPool`."""

    tokens: int
    heads: int
    dim: int
    storage: Literal["bf16", "fp8"]

    @property
    def bytes_moved(self) -> int:
        """Counts the rows and one id each in, and the rows out, in fp8 with a float32 scale."""
        width = self.heads * self.dim
        stored = width * BF16 if self.storage == "bf16" else width + F32
        return self.tokens * (2 * (width * BF16 + stored) + ID)


@dataclasses.dataclass(frozen=True)
class Case:
    """A named shape of an op, for any batch.

    Attributes:
        op: a name in `OPS`.
        name: unique within the op.
        context: tokens in the cache of each request; None if the shape does not depend on it.
        batches: the sizes that are measured unless others are asked for: requests, tokens or rows.
        make: batch -> shape.
    """

    op: str
    name: str
    context: int | None
    batches: tuple[int, ...]
    make: Callable[[int], Shape]

    def with_key_split(self, key_split: KeySplit) -> Case:
        """This case with attention's keys cut that way ("context" is no kernel's); other ops have none to cut."""
        split: KernelSplit = "throughput" if key_split == "context" else key_split

        def make(batch: int) -> Shape:
            shape = self.make(batch)
            return dataclasses.replace(shape, key_split=split) if isinstance(shape, AttendShape) else shape

        return dataclasses.replace(self, make=make)


def _attend(name: str, context: int | None, heads: int, entries: int, *batches: int) -> Case:
    return Case("attend", name, context, batches, lambda b: AttendShape(b, heads, WINDOW, entries, FP8))


def _scores(name: str, context: int, fmt: RowFormat, *batches: int) -> Case:
    blocks, per_block = context // BLOCK_TOKENS, BLOCK_TOKENS // CSA_RATIO
    make = lambda b: ScoreShape(b, INDEX_HEADS, blocks, per_block, fmt)  # noqa: E731
    return Case("index_scores", name, context, batches, make)


def _top_k(name: str, context: int, k: int, *batches: int) -> Case:
    return Case("top_k", name, context, batches, lambda b: TopKShape(b, context // CSA_RATIO, k))


def _kv_store(storage: Literal["bf16", "fp8"]) -> Case:
    """Makes the case of a GQA model with 8 KV heads of 128: decode steps, and 134 (fp8) or 268 MB written."""
    return Case("kv_store", storage, None, (64, 1024, 65536), lambda b: KVStoreShape(b, 8, 128, storage))


def _compress(op: str, name: str, kind: str, fmt: RowFormat, *batches: int) -> Case:
    return Case(op, name, None, batches, lambda b: CompressShape(kind, b, fmt))  # type: ignore[arg-type]


def _prefill(op: str, kind: str, fmt: RowFormat) -> Case:
    """Makes the case of a prefill, whose batch is its tokens, all of one request."""
    make = lambda b: CompressShape(kind, 1, fmt, b)  # type: ignore[arg-type]  # noqa: E731
    return Case(op, "prefill", None, (8192, 65536), make)


# Flash and Pro share head_dim, window, indexer geometry and ratios; they differ in heads (64, 128) and k (512, 1024).
CASES: tuple[Case, ...] = (
    Case("append", "fused", None, (1, 64, 256, 1024), lambda b: AppendShape(b, FP8)),
    Case("append", "plain", None, (1, 64, 1024), lambda b: AppendShape(b, FP8, fused=False)),
    _compress("compress_csa", "decode", "csa", FP8, 1, 16, 64, 256),
    Case("compress_csa", "decode-both", None, (1, 64, 256), lambda b: CompressShape("csa", b, FP8, 1, INDEX_FP4)),
    _prefill("compress_csa", "csa", FP8),
    _compress("compress_index", "decode", "index", INDEX_FP4, 1, 16, 64, 256),
    _prefill("compress_index", "index", INDEX_FP4),
    _compress("compress_hca", "decode", "hca", FP8, 1, 16, 64, 256),
    _compress("compress_hca", "decode-raw", "hca_raw", FP8, 1, 16, 64),
    _prefill("compress_hca", "hca", FP8),
    Case("gather", "rows", None, (256 * 1024, M1), lambda b: GatherShape(b, FP8)),
    Case("gather", "window", None, (1, 64, 256), lambda b: GatherShape(b * WINDOW, FP8)),
    Case("gather", "topk-flash", None, (1, 64, 256), lambda b: GatherShape(b * 512, FP8)),
    Case("gather", "topk-pro", None, (64, 256), lambda b: GatherShape(b * 1024, FP8)),
    _scores("fp8-8k", K8, INDEX_FP8, 1, 64, 256),
    _scores("fp8-128k", K128, INDEX_FP8, 1, 16, 64, 256),
    _scores("fp8-1m", M1, INDEX_FP8, 1, 16),
    _scores("fp4-8k", K8, INDEX_FP4, 1, 64, 256),
    _scores("fp4-128k", K128, INDEX_FP4, 1, 16, 64, 256),
    _scores("fp4-1m", M1, INDEX_FP4, 1, 16),
    _top_k("flash-8k", K8, 512, 1, 64, 256),
    _top_k("flash-128k", K128, 512, 1, 16, 64, 256),
    _top_k("flash-1m", M1, 512, 1, 16),
    _top_k("pro-128k", K128, 1024, 1, 64),
    _top_k("pro-1m", M1, 1024, 1, 16),
    _attend("swa-flash", None, 64, 0, 1, 64, 256),
    _attend("csa-flash", None, 64, 512, 1, 16, 64, 128, 256),
    _attend("hca-flash-8k", K8, 64, 64, 1, 64, 256),
    _attend("hca-flash-128k", K128, 64, 1024, 1, 16, 64, 256),
    _attend("hca-flash-1m", M1, 64, 8192, 1, 16, 64),
    _attend("csa-pro", None, 128, 1024, 1, 16, 64, 256),
    _attend("hca-pro-128k", K128, 128, 1024, 1, 64, 256),
    _kv_store("bf16"),
    _kv_store("fp8"),
)
OPS = tuple(dict.fromkeys(case.op for case in CASES))

# V4 widths at sizes a CPU runs in a moment; the tests use the same.
QUICK: tuple[Case, ...] = (
    Case("append", "fused", None, (3,), lambda b: AppendShape(b, FP8)),
    _compress("compress_csa", "decode", "csa", FP8, 2),
    _compress("compress_index", "decode", "index", INDEX_FP4, 2),
    _compress("compress_hca", "decode", "hca", FP8, 2),
    Case("gather", "rows", None, (64,), lambda b: GatherShape(b, FP8)),
    Case("index_scores", "v4-widths", 256, (2,), lambda b: ScoreShape(b, INDEX_HEADS, 2, 32, INDEX_FP4)),
    Case("top_k", "v4-widths", 8192, (2,), lambda b: TopKShape(b, 2048, 512)),
    Case("attend", "v4-widths", None, (2,), lambda b: AttendShape(b, 16, WINDOW, 64, FP8)),
    Case("kv_store", "fp8", None, (3,), lambda b: KVStoreShape(b, 2, 64, "fp8")),
)


def select(
    cases: Sequence[Case],
    ops: Sequence[str],
    *,
    name: str | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
) -> list[tuple[Case, int]]:
    """Selects (case, batch) pairs, in the order of `cases`.

    Args:
        ops: names in `OPS`.
        name: only shapes whose "op/name" holds this text.
        batches: these instead of each case's own.
        contexts: only cases of these contexts, and those that have none.

    Raises:
        OptionError: an op does not exist, or nothing is left.
    """
    for op in ops:
        if op not in OPS:
            raise OptionError(f"unknown op {op!r}, expected {', '.join(OPS)}, all or step")
    chosen = [
        (case, batch)
        for case in cases
        if case.op in ops
        and (name is None or name in f"{case.op}/{case.name}")
        and (contexts is None or case.context is None or case.context in contexts)
        for batch in batches or case.batches
    ]
    if not chosen:
        names = sorted({case.name for case in cases if case.op in ops})
        raise OptionError(f"no shape of {', '.join(ops)} is left by these filters, there are: {', '.join(names)}")
    return chosen
