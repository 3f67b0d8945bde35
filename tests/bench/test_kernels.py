"""benchmarks/kernels.py: cases run at tiny sizes, handlers are timed as ops call them, wrong results are seen."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import graphs
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import problems
import pytest
import records
from targets import TARGETS

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, init_cache
from dsv4_jax.bench.ops import Problem, problem
from dsv4_jax.bench.shapes import GatherShape
from dsv4_jax.formats import kv_format
from dsv4_jax.records import block_record
from dsv4_jax.tiers import record_copy

from .. import native


def test_every_target_is_timed_and_names_are_unique() -> None:
    made = [(kernel.op, kernel.name, kernel.variant) for kernel in problems.KERNELS]
    assert len(set(made)) == len(made)
    cases = {(kernel.op, kernel.name, batch) for kernel in problems.KERNELS for batch in kernel.batches}
    required = {key for key, target in TARGETS.items() if target.required and key[0] != "exchange"}
    assert required <= cases, required - cases
    assert {kernel.op for kernel in problems.TINY} >= set(problems.OPS) - {"compress_csa", "compress_index"}


def test_a_run_records_what_it_measured(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    assert kernels.main(["route", "gather", "--tiny", "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    rows = {(row["op"], row["shape"]): row for row in made["rows"]}
    assert set(rows) == {("route", "tiny"), ("gather", "rows")} and made["quick"]
    assert all(row["timer"] == "graph" and row["correct"] and row["kernel_us"] > 0 for row in rows.values())
    assert records.check(made | {"quick": False, "commit": "0123abc"})
    assert capsys.readouterr().out.count("error 0.0e+00") == 2


def test_a_wrong_result_and_a_missing_kernel_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "relative_error", lambda got, want: 0.5)
    assert kernels.main(["route", "--tiny"]) == 1 and "5.0e-01 WRONG" in capsys.readouterr().out
    assert kernels.main(["route", "--tiny", "--implementation", "triton"]) == 1
    assert "route tiny: triton: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kernels.main(["bake"])


def test_cases_can_be_listed_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["attend", "--shapes", "csa-flash", "--batch", "64", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "attend csa-flash, 64: 5 calls, 183 MB",
        "attend csa-flash, latency, 64: 5 calls, 183 MB",
    ]


def test_handlers_are_called_as_the_op_calls_them() -> None:
    """Calls that copy blocks into records: a handler that overwrites one operand, and whose ids the op makes."""
    native.load_cpu()
    layout = CacheLayout(DSV4Config.tiny())
    record = block_record(layout)
    arrays = init_cache(layout, CacheSize(4, 1, 4)).arrays
    leaves = tuple(
        jnp.asarray(np.random.default_rng(i).integers(0, 100, arrays[leaf.name].shape), leaf.dtype)
        for i, leaf in enumerate(record.leaves)
    )
    records_there = jnp.zeros((4, record.bytes), jnp.uint8)
    record_copy.choose_implementation("ffi")

    def apply(shared, carry, call, implementation):
        ids = record_copy.Ids(call, record_copy.positions(call), first_record=0)
        return record_copy.native_out(shared, carry, ids, record.descriptors), None

    calls = [jnp.array([1, 3], jnp.int32), jnp.array([2, 2], jnp.int32)]
    problem = Problem(leaves, lambda: records_there, calls, apply, lambda *_: (), 0.0)
    ((target, body),) = graphs.handlers(problem, "ffi").items()
    assert target == "dsv4_swap_out" and body.calls == 2 and len(body.state()) == 1
    state, _ = graphs.timed_loop(body, 3)(body.fixed, body.state())
    (copied,) = state.values()
    want = apply(leaves, apply(leaves, records_there, calls[0], "ffi")[0], calls[1], "ffi")[0]
    np.testing.assert_array_equal(copied, want)
    assert np.asarray(want).any() and graphs.graph_us(body, 2) > 0


def test_a_loop_gives_what_its_calls_give() -> None:
    (kernel,) = (kernel for kernel in problems.TINY if kernel.op == "append")
    made = kernel.make(3, 2, 64).problem
    assert graphs.handlers(made, "xla") == {}
    body = graphs.whole_call(made, "xla")
    pools, results = graphs.timed_loop(body, 2)(body.fixed, body.state())
    want, _ = jax.jit(body.run)(body.fixed, body.state())
    assert len(results) == body.calls == 2
    for got, expected in zip(pools, want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_batch_dependence_is_seen():
    """A call whose rows depend on how many there are."""
    inputs = problem(GatherShape(64, kv_format("fp8", 512, 64)), 1, pool_rows=128)
    dependent = dataclasses.replace(
        inputs, apply=lambda shared, carry, ids, _: ((), jnp.full(ids.shape, np.float32(1) / len(ids)))
    )
    assert kernels.is_batch_invariant(inputs, "xla", 64)
    assert not kernels.is_batch_invariant(dependent, "xla", 64)


def test_peers_times_are_found_by_shape(tmp_path: pathlib.Path) -> None:
    files = {
        "fp8_dense": [{"n": 8192, "k": 4096, "m": 16, "deepgemm_us": 13.6}],
        "marlin_moe": [{"m": 4, "experts": 128, "gemms_us": 123.0}],
        "topk": [
            {"op": "torch", "b": 1, "n": 32768, "k": 512, "us": 1.0},
            {"op": "per_row", "b": 1, "n": 32768, "k": 512, "us": 9.5},
            {"op": "cooperative", "b": 1, "n": 32768, "k": 512, "us": 8.9},
        ],
        "indexer_sdg": [{"check": "b3 ragged", "rel_l2": 0.1}, {"b": 64, "n": 2048, "us": 8.4}],
        "flashmla": [{"case": "SWA-only-Flash", "b": 1, "us": 11.6}, {"case": "CSA-Flash", "check_b": 1}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    assert kernels.peer_times(tmp_path) == {
        ("dense_fp8", "8192x4096/8", 16): 13.6,
        ("moe", "flash, half of the experts", 4): 123.0,
        ("top_k", "flash-128k", 1): 8.9,
        ("index_scores", "fp8-8k", 64): 8.4,
        ("index_scores", "fp4-8k", 64): 8.4,
        ("attend", "swa-flash", 1): 11.6,
    }
    assert kernels.peer_times(tmp_path / "none") == {}
