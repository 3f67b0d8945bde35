"""The registry: what it lists is there, a name that is asked for runs or says why not, and None walks the chain."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi
from dsv4_jax.errors import ImplementationError, PerformanceWarning
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, RowFormat, index_format, kv_format
from dsv4_jax.ops import attend, registry, sequence, top_k
from dsv4_jax.ops.append import AppendArguments, WindowView
from dsv4_jax.ops.attend import AttendArguments
from dsv4_jax.ops.columns import Product
from dsv4_jax.ops.compress import CompressArguments
from dsv4_jax.ops.dense_bf16 import DenseBf16Arguments
from dsv4_jax.ops.dense_fp8 import DenseFp8Arguments
from dsv4_jax.ops.entry_rows import EntryRowsArguments
from dsv4_jax.ops.epilogue import Epilogue
from dsv4_jax.ops.exchange import ExchangeArguments, Peers
from dsv4_jax.ops.gather import GatherArguments
from dsv4_jax.ops.hyper_connection import HyperConnectionArguments, Written
from dsv4_jax.ops.index_scores import IndexScoresArguments
from dsv4_jax.ops.moe import MoeArguments
from dsv4_jax.ops.normalise import NormaliseArguments
from dsv4_jax.ops.queries import QueriesArguments
from dsv4_jax.ops.registry import NAMES, OPS, find, frozen, pick
from dsv4_jax.ops.route import RouteArguments
from dsv4_jax.ops.sample_tokens import SampleTokensArguments, SamplingRows
from dsv4_jax.ops.swiglu import SwigluArguments
from dsv4_jax.ops.top_k import TopKArguments
from dsv4_jax.pools import KVSpec
from dsv4_jax.pools.kv_pool import KVStoreArguments

from ..pallas.test_compress import STREAMS, arguments_of, plan_of, stream_of
from .op_test import OpTest

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = [(op.name, name) for op in OPS.values() for name in op.names]
pairs = pytest.mark.parametrize(("op", "name"), PAIRS, ids=[f"{op}-{name}" for op, name in PAIRS])
KV_ROWS = [kv_format(name, *width) for name in KV_FORMATS for width in ((512, 64), (32, 8), (76, 12))]
KEYS = [index_format(name, dim) for name in INDEX_FORMATS for dim in (128, 32, 48)]


def product_of(heads: int, dim: int) -> Product:
    x, weights = (floats(n, 512).astype(jnp.bfloat16) for n in (3, heads * dim))
    return Product(x, weights, (heads, dim))


def floats(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def ints(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def stored(fmt: RowFormat, rows: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((rows, p.width), p.dtype) for p in fmt.parts)


def appended() -> Iterator[AppendArguments]:
    for fmt in (*KV_ROWS, *KEYS):
        epilogue = Epilogue(jnp.ones(fmt.dim), jnp.ones((fmt.rope_dim or 16) // 2), hadamard=fmt.dim == 128)
        yield AppendArguments(floats(3, fmt.dim), fmt, None, None, stored(fmt, 4), ints(3))
        yield AppendArguments(floats(3, fmt.dim).astype(jnp.bfloat16), fmt, epilogue, ints(3))


def attended() -> Iterator[AttendArguments]:
    for fmt in KV_ROWS:
        rows = stored(fmt, 4)
        window = (floats(2, 3, fmt.dim), floats(3), WindowView(rows, ints(2, 5), jnp.ones((2, 5), bool)))
        turned = ints(2), jnp.ones(fmt.rope_dim // 2)
        yield AttendArguments(*window, None, None, None, 1.0, fmt, turned, jnp.bfloat16)
        yield AttendArguments(*window, rows, ints(2, 7), ints(2), 1.0, fmt, (ints(2), jnp.ones(3)))


def compressed() -> Iterator[CompressArguments]:
    plan, table = jax.tree.map(jnp.asarray, plan_of(np.array([3, 126]), 1))
    for name in STREAMS:
        kinds, fmts = zip(*STREAMS[name], strict=True)
        rng = np.random.default_rng(0)
        made = [stream_of(k, plan, table, f, 0, rng) for k, f in zip(kinds, fmts, strict=True)]
        yield arguments_of(kinds, made, plan, table)


def scored() -> Iterator[IndexScoresArguments]:
    for fmt in KEYS:
        for heads, per_block in ((4, 16), (65, 32), (3, 6)):
            yield IndexScoresArguments(
                stored(fmt, 4 * per_block),
                floats(2, heads, fmt.dim),
                floats(2, heads),
                ints(2, 3),
                ints(2),
                0,
                per_block,
                fmt,
            )


def connected() -> Iterator[HyperConnectionArguments]:
    for n, width, iterations in ((4, 4096, 20), (4, 4096, None), (2, 64, 3)):
        rows = n if iterations is None else (2 + n) * n
        weights = floats(rows, n * width), floats(width + 64)
        for outputs in range(3):
            written = Written((floats(2, width),) * outputs, floats(2, n), floats(2, n, n)) if outputs else None
            yield HyperConnectionArguments(
                floats(2, n, width), *weights, written, iterations, 1e-6, 1e-6, jnp.dtype(jnp.bfloat16), 4 * outputs
            )


EXAMPLES: dict[str, Callable[[], Iterator[Any]]] = {
    "append": appended,
    "attend": attended,
    "compress": compressed,
    "dense_fp8": lambda: (
        DenseFp8Arguments(
            floats(rows, 2 * 256),
            jnp.zeros((4, 2, 8192), jnp.uint8),
            jnp.zeros((2, 2), jnp.uint8),
            2,
            jnp.dtype(dtype),
            256,
        )
        for rows in (2, (1 << 16) + 1)
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
    "dense_e4m3": lambda: EXAMPLES["dense_fp8"](),
    "dense_bf16": lambda: (
        DenseBf16Arguments(
            floats(tokens, 4096), jnp.zeros((rows, 4096 // groups), jnp.bfloat16), groups, jnp.dtype(dtype), alike
        )
        for tokens, rows, groups, alike in (
            (2, 16, 1, False),
            (2, 1024, 2, False),
            (17, 1024, 1, False),
            (17, 1024, 1, True),
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
    "entry_rows": lambda: (EntryRowsArguments(ints(2, keys), ints(2), ints(3, 4), 8, 16, 5) for keys in (1, 2**22 + 1)),
    "exchange": lambda: (  # of no axes: a device alone needs no mesh
        ExchangeArguments((floats(4, 8), floats(2, width)), kind, (), 1 if kind == "gather" else 0, peers, 0)
        for kind in ("gather", "all_to_all", "sum_to_owner", "sum_to_all")
        for width in (4, 3)
        for peers in (None, Peers(0, (), 2, 256, 1), Peers(0, (), 2, 64, 1))
    ),
    "gather": lambda: (
        GatherArguments(stored(fmt, 4), ints(2, 3), fmt, dtype)
        for fmt in (*KV_ROWS, *KEYS)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    ),
    "hyper_connection": connected,
    "index_scores": scored,
    "kv_store": lambda: (
        KVStoreArguments(
            *([stored_leaf(spec, n) for n in spec.leaves if n[0] == part] for part in "kv"),
            *(floats(3, spec.width(part)).astype(dtype) for part in "kv"),
            ints(3),
            storage,
        )
        for storage in ("bf16", "f16", "f32", "fp8")
        for dtype in (jnp.float32, jnp.bfloat16)
        for spec in (KVSpec(7, 1, 3, 12, 2, 5, storage), KVSpec(7, 1, 2, 16, 2, 8, storage))
    ),
    "moe": lambda: (
        MoeArguments(
            floats(2, hidden),
            ints(2, 6),
            floats(2, 6),
            jnp.zeros((8, 8, hidden // 128, 4352), jnp.uint8),
            jnp.zeros((8, hidden // 64, 2, 4352), jnp.uint8),
            1.0,
            0,
            8,
            1,
        )
        for hidden in (512, 384)
    ),
    "moe_e4m3": lambda: EXAMPLES["moe"](),
    "normalise": lambda: (
        NormaliseArguments(floats(2, 64), floats(64), 1e-6, jnp.dtype(dtype)) for dtype in (jnp.float32, jnp.bfloat16)
    ),
    "queries": lambda: (
        QueriesArguments(queries, ints(queries.shape[0]), jnp.ones(pairs), eps, rotate, rotate)
        for dim, pairs, rotate in ((512, 32, False), (512, 32, True), (128, 32, True), (64, 8, True), (128, 16, False))
        for queries in (floats(2, 3, dim), floats(2, 3, dim).astype(jnp.bfloat16), product_of(4, dim))
        for eps in (None, 1e-6)
    ),
    "route": lambda: (
        RouteArguments(floats(2, experts), *picks, 6, 1.5)
        for experts in (256, 600)
        for picks in ((floats(experts), None), (None, ints(2, 6)))
    ),
    "sample_tokens": lambda: (
        SampleTokensArguments(floats(2, vocab), SamplingRows.of([None, None]), ints(2)) for vocab in (5, 131_073)
    ),
    "swiglu": lambda: (
        SwigluArguments(floats(2, width), floats(2, width), 10.0, jnp.dtype(dtype))
        for width in (64, 6)
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
    "top_k": lambda: (
        TopKArguments(floats(2, width), ints(2), k) for width, k in ((5, 1), (1100, 1050), (4100, 7), (262_145, 3))
    ),
}


def stored_leaf(spec: KVSpec, name: str) -> jax.Array:
    return jnp.zeros(*spec.leaves[name])


@pairs
def test_is_declared_where_its_name_says(op: str, name: str) -> None:
    found = find(op, name)
    assert (found.op, found.name) == (op, name)
    module = OPS[op].module(name)
    assert module == (OPS[op].reference or f"dsv4_jax.ops.{op}") if name == "xla" else f"dsv4_jax.{name}.{op}"
    assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    assert found.call.__module__ == module and "IMPLEMENTATION" in importlib.import_module(module).__all__


@pytest.mark.parametrize("op", [op.name for op in OPS.values() if "xla" in op.names])
def test_a_reference_is_one_call(op: str) -> None:
    """Also where nobody jits it; a step's layers share its trace."""
    for arguments in EXAMPLES[op]():
        calls = jax.make_jaxpr(lambda arguments=arguments: registry.run(op, arguments, "xla"))().eqns
        assert [(eqn.primitive.name, eqn.params["name"]) for eqn in calls] == [("jit", op)]


def test_nothing_that_is_declared_is_missing_from_the_list() -> None:
    rooms = {"ops": "xla", "pools": "xla", "pallas": "pallas", "cuda": "cuda", "triton": "triton"}
    declared = set()
    for room, name in rooms.items():
        for path in (ROOT / "dsv4_jax" / room).glob("*.py"):
            if re.search(r"^IMPLEMENTATION = ", path.read_text(), re.M):
                made = importlib.import_module(f"dsv4_jax.{room}.{path.stem}").IMPLEMENTATION
                assert made.name == name
                declared.add((made.op, made.name))
    assert declared == set(PAIRS)


@pairs
def test_runs_or_says_why_not(op: str, name: str) -> None:
    """No other error, for any format and any odd size; with a reason exactly where `supports` or `problem` has one."""
    ran = refused = 0
    for arguments in EXAMPLES[op]():
        found = find(op, name)
        reason = found.problem() or found.supports(arguments)
        assert reason is None or (isinstance(reason, str) and reason.strip() == reason != "")
        call = jax.jit(lambda arguments=arguments: registry.run(op, arguments, name))
        if reason is None:
            call.trace()
            ran += 1
        else:
            with pytest.raises(ImplementationError, match=re.escape(f"{op}: implementation {name!r} cannot run: ")):
                call.trace()
            refused += 1
    assert ran + refused > 1 and (ran > 1 or name in ("cuda", "triton"))


@pairs
def test_the_ops_test_class_is_run_over_it(op: str, name: str) -> None:
    """Every implementation of the registry has a subclass; on a CPU all but those that need a GPU to run."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "OpTest" in (text := path.read_text()) or "implementation = " in text:
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))

    def below(found: type) -> Iterator[type[OpTest]]:
        for made in found.__subclasses__():
            yield made
            yield from below(made)

    tested = [x for x in below(OpTest) if (getattr(x, "op", ""), getattr(x, "implementation", "")) == (op, name)]
    assert any(test.startswith("test_") for x in tested for test in dir(x)), f"no test class of {op} has {name}"
    on_cpu = [x for x in tested if not any(mark.name == "gpu" for mark in getattr(x, "pytestmark", []))]
    assert on_cpu or name in ("cuda", "triton")


@pytest.mark.parametrize("op", [op.name for op in OPS.values() if "cuda" in op.names])
def test_cuda_lowers_or_says_why_not(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """As above with the library assumed: what the kernels take is lowered for a GPU, the rest is refused."""
    monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
    monkeypatch.setattr(ffi, "cuda_target", lambda op, target: target)
    targets, refused = set(), 0
    for arguments in EXAMPLES[op]():
        call = jax.jit(lambda arguments=arguments: registry.run(op, arguments, "cuda"))
        if find(op, "cuda").supports(arguments) is None:
            text = call.trace().lower(lowering_platforms=("cuda",)).as_text()
            targets |= set(re.findall(r"custom_call @(dsv4_\w+)", text))
        else:
            refused += 1
            with pytest.raises(ImplementationError, match=f"{op}: implementation 'cuda' cannot run: it "):
                call.trace()
    assert targets == set(find(op, "cuda").targets) and refused


def test_float32_rows_are_not_what_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to run as the reference under the name "cuda", library or not."""
    fmt = kv_format("f32", 512, 64)
    window = WindowView(stored(fmt, 4), ints(1, 3), jnp.ones((1, 3), bool))
    call = [floats(1, 2, 512), floats(2), window, None, None, None]
    monkeypatch.setenv("DSV4_JAX_CUDA_LIBRARY", "/nowhere/libdsv4_cuda.so")
    ffi.load_cuda.cache_clear()
    with pytest.raises(ImplementationError, match="attend: implementation 'cuda' cannot run: no CUDA library at"):
        attend(*call, scale=1.0, fmt=fmt, implementation="cuda")
    ffi.load_cuda.cache_clear()
    monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
    with pytest.raises(ImplementationError, match=r"attend: .*'cuda' cannot run: .* not of 512 f32"):
        attend(*call, scale=1.0, fmt=fmt, implementation="cuda")


class TestChain:
    """What None picks, as on a GPU whose library is there or not."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def test_falls_through_what_does_not_take_the_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
        of_k = lambda k: TopKArguments(floats(1, 2000), ints(1), k)  # noqa: E731
        assert [pick("top_k", of_k(k)).name for k in (1, 1024, 1025, 0)] == ["cuda", "cuda", "xla", "xla"]
        assert pick("top_k", TopKArguments(floats(1, 262_145), ints(1), 3)).name == "pallas"
        small, v4 = (AppendArguments(floats(1, dim), kv_format("fp8", dim, 64)) for dim in (128, 512))
        assert (pick("append", v4).name, pick("append", small).name) == ("cuda", "pallas")

    def test_falls_through_what_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: f"no kernel of {op}")
        for op in OPS.values():
            for arguments in EXAMPLES[op.name]():
                if "xla" in op.chain:
                    assert pick(op.name, arguments).name in ("pallas", "xla")
                    continue
                with pytest.raises(
                    ImplementationError, match=f"{op.name}: .*'cuda' cannot run: no kernel of {op.name}"
                ):
                    pick(op.name, arguments)

    def test_says_once_that_there_is_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ffi._warn.cache_clear()
        monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: "no CUDA library at nowhere")
        of_k = TopKArguments(floats(1, 2000), ints(1), 3)
        with pytest.warns(PerformanceWarning, match="without the CUDA kernels: no CUDA library at nowhere") as caught:
            assert [pick("top_k", of_k).name for _ in range(2)] == ["pallas"] * 2
        assert len(caught) == 1 and "\n" not in str(caught[0].message)

    @pytest.mark.parametrize("case", ["named", "code for another device", "AMD"])
    def test_says_nothing_where_the_library_is_not_missed(self, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
        ffi._warn.cache_clear()
        whole = "none" if case != "code for another device" else None
        monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: "no kernel" if op else whole)
        if case == "AMD":
            monkeypatch.setattr(ffi, "_is_nvidia", lambda: False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            arguments = TopKArguments(floats(1, 2000), ints(1), 3)
            assert pick("top_k", arguments, "pallas" if case == "named" else None).name == "pallas"

    def test_what_must_be_asked_for_is_never_picked(self) -> None:
        assert all(not set(op.by_name) & {*op.gpu, *op.elsewhere} for op in OPS.values())
        assert {op.name: op.by_name for op in OPS.values() if op.by_name} == {"gather": ("triton",)}


def test_elsewhere_the_reference_is_picked() -> None:
    for op in OPS.values():
        if "xla" in op.names:
            assert {pick(op.name, arguments).name for arguments in EXAMPLES[op.name]()} == {"xla"}


def test_names_by_op() -> None:
    arguments = TopKArguments(floats(1, 4), ints(1), 2)
    for choice in ({"top_k": "pallas"}, {"top_k": "pallas", "attend": "cuda"}, (("top_k", "pallas"),)):
        assert pick("top_k", arguments, choice).name == "pallas"
    assert pick("top_k", arguments, {"attend": "pallas"}).name == "xla"
    assert frozen({"top_k": "pallas", "attend": "xla"}) == (("attend", "xla"), ("top_k", "pallas"))
    assert (frozen("cuda"), frozen(None)) == ("cuda", None)
    with pytest.raises(ImplementationError, match="unknown op 'topk', expected some of append"):
        top_k(floats(1, 4), ints(1), k=2, implementation={"topk": "xla"})
    with pytest.raises(ImplementationError, match="append: there is no Triton kernel for this op, use 'cuda' or"):
        frozen({"append": "triton"})


@pytest.mark.parametrize("op", OPS)
def test_unknown_names(op: str) -> None:
    with pytest.raises(ImplementationError, match=f"{op}: unknown implementation 'fast', expected 'xla', 'pallas'"):
        find(op, "fast")  # pyrefly: ignore
    for name in set(NAMES) - set(OPS[op].names):
        with pytest.raises(ImplementationError, match=f"{op}: there is no "):
            find(op, name)


def test_every_source_of_csrc_belongs_to_an_op() -> None:
    """CMake's list, the sources and the handlers they export are those of the registry, of swaps and sequences."""
    cuda = [find(op.name, "cuda") for op in OPS.values() if "cuda" in op.names]
    csrc = ROOT / "csrc"
    sources = {path.relative_to(csrc).as_posix(): path.read_text() for path in csrc.rglob("*.cu")}
    listed = re.findall(r"add_kernels\(\s*\w+\s+([^)]*)\)", (csrc / "cuda.cmake").read_text())
    assert sorted(" ".join(listed).split()) == sorted(sources)
    # Handlers of other modules: swaps, and the sequence, which calls the others.
    entered = re.findall(r"DSV4_HANDLER\(\s*(\w+),\s*(\w+)", "".join(sources.values()))
    assert {target for op, target in entered if op not in ("swap", "sequence")} == {
        target for implementation in cuda for target in implementation.targets
    }
    assert {implementation.op for implementation in cuda} <= {op for op, _ in entered}


def test_a_kernel_may_be_joined_unless_it_says_that_it_stands_alone() -> None:
    """So a new one is forgotten nowhere: what may be joined, and what may not, follows from the implementations."""
    joined, early = sequence._kernels()
    cuda = [find(op.name, "cuda") for op in OPS.values() if "cuda" in op.names]
    alone = {target for implementation in cuda for target in implementation.alone}
    assert alone == {"dsv4_exchange", "dsv4_sample_tokens"}
    assert joined | alone == {target for implementation in cuda for target in implementation.targets}
    assert early <= joined and not joined & alone


@pytest.mark.every_case
def test_ops_import_no_kernels() -> None:
    rooms = ("jax.experimental.pallas", "jax_triton", "triton", *(f"dsv4_jax.{room}" for room in NAMES))
    code = f"import sys, dsv4_jax.ops, dsv4_jax.cache; print([n for n in sys.modules if n.startswith({rooms})])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
