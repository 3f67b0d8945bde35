"""Named shapes: byte and FLOP counts against counts by hand, and what a selection keeps."""

from __future__ import annotations

import pytest
from targets import TARGETS, judged, verdict

from dsv4_jax.bench.shapes import CASES, OPS, QUICK, CompressShape, select
from dsv4_jax.errors import OptionError
from dsv4_jax.formats import index_format, kv_format


def shape(op: str, name: str, batch: int):
    (case,) = [c for c in CASES if (c.op, c.name) == (op, name)]
    return case.make(batch)


def test_key_splits_are_of_attention_alone():
    cases = [case.with_key_split("latency") for case in QUICK]
    assert [(case.op, case.name, case.batches) for case in cases] == [(c.op, c.name, c.batches) for c in QUICK]
    changed = [(new.make(2), old.make(2)) for new, old in zip(cases, QUICK, strict=True) if new.make(2) != old.make(2)]
    assert [(new.key_split, old.key_split) for new, old in changed] == [("latency", "throughput")]


@pytest.mark.parametrize(
    ("op", "name", "batch", "bytes_moved", "flops"),
    [
        # rows: 448 + 128 + 8 = 584 bytes; ids of 4
        ("append", "fused", 64, 64 * (512 * 2 + 4 + 584), 0),
        ("gather", "rows", 1 << 18, (1 << 18) * (4 + 584 + 1024), 0),
        ("gather", "topk-flash", 64, 64 * 512 * 1612, 0),
        # 640 keys of 584 + 4; 64 heads of 512: 2-byte queries, 4-byte outputs, a 4-byte log-sum-exp
        ("attend", "csa-flash", 64, 64 * (640 * 588 + 64 * (512 * 6 + 4)), 64 * 4 * 64 * 512 * 640),
        ("attend", "hca-flash-128k", 1, 1152 * 588 + 64 * 3076, 4 * 64 * 512 * 1152),
        ("attend", "csa-pro", 2, 2 * (1152 * 588 + 128 * 3076), 2 * 4 * 128 * 512 * 1152),
        # 32,768 keys of 132 (fp8) or 68 (fp4) bytes, a 4-byte score each; 1024 block ids; queries and weights
        ("index_scores", "fp8-128k", 64, 64 * (32768 * 136 + 4096 + 64 * 260), 64 * 2 * 64 * 128 * 32768),
        ("index_scores", "fp4-1m", 1, 262144 * 72 + 8192 * 4 + 64 * 260, 2 * 64 * 128 * 262144),
        ("top_k", "flash-1m", 1, 262144 * 4 + 512 * 4, 0),
        # kv and score of 2 x 512 float32; 7 older half rows of 2 x 2 x 512 float32; a state row; an entry
        ("compress_csa", "decode", 16, 16 * (8192 + 7 * 4096 + 8192 + 584), 0),
        ("compress_csa", "decode-both", 2, 2 * (45640 + 11332), 0),
        ("compress_csa", "prefill", 8192, 8192 * 8192 + 8 * 8192 + 2048 * 584, 0),
        ("compress_index", "decode", 1, 2048 + 7 * 1024 + 2048 + 68, 0),
        # kv and score of 512 float32; the triple read and written
        ("compress_hca", "decode", 64, 64 * (4096 + 2 * 6144 + 584), 0),
        ("compress_hca", "decode-raw", 1, 4096 + 127 * 4096 + 4096 + 584, 0),
        ("compress_hca", "prefill", 65536, 65536 * 4096 + 6144 + 512 * 584, 0),
        # K and V of 8 heads of 128: 2048 bytes each, in and out, or 1024 and a scale out; an id
        ("kv_store", "bf16", 65536, 65536 * (4 * 2048 + 4), 0),
        ("kv_store", "fp8", 64, 64 * (2 * 2048 + 2 * 1028 + 4), 0),
    ],
)
def test_counts_equal_those_by_hand(op, name, batch, bytes_moved, flops):
    found = shape(op, name, batch)
    assert (found.bytes_moved, found.flops) == (bytes_moved, flops)


def test_state_widths_are_the_layouts():
    """Ring rows and widths of the compressors' state, as `CacheLayout` allocates them."""
    from dsv4_jax import CacheLayout, DSV4Config

    kv, key = kv_format("fp8", 512, 64), index_format("fp4", 128)
    for mode in ("online", "raw"):
        layout = CacheLayout(DSV4Config.flash(), hca_state=mode)
        leaves = {leaf.pool: leaf for leaf in layout.leaves if leaf.pool.endswith("_state")}
        kinds = {"csa_state": ("csa", kv), "index_state": ("index", key)}
        kinds["hca_state"] = ("hca" if mode == "online" else "hca_raw", kv)
        for pool, (kind, fmt) in kinds.items():
            got = CompressShape(kind, 1, fmt)
            assert (got.ring, got.state_width) == (leaves[pool].rows, leaves[pool].width)


def test_names_are_unique_and_every_target_has_its_shape():
    for cases in (CASES, QUICK):
        assert len({(c.op, c.name) for c in cases}) == len(cases) and {c.op for c in cases} == set(OPS)
    measured = {(c.op, c.name, batch) for c in CASES for batch in c.batches}
    by_other_scripts = {"moe", "dense_fp8", "exchange", "route"}
    only_in_graphs = ("flash-32k", "fp4-32k", "fp8-32k", "fp4-32k-prefill", "fp4-128k-prefill")
    measured |= {target for target in TARGETS if target[0] in by_other_scripts or target[1] in only_in_graphs}
    assert set(TARGETS) <= measured, set(TARGETS) - measured
    assert {1, 16, 64, 256} <= {batch for c in CASES if c.op == "attend" for batch in c.batches}


def test_select():
    def names(*args, **kwargs):
        return [(c.name, batch) for c, batch in select(CASES, *args, **kwargs)]

    assert names(["attend"], name="csa-flash") == [("csa-flash", b) for b in (1, 16, 64, 128, 256)]
    assert names(["attend"], name="attend/csa-flash", batches=[7]) == [("csa-flash", 7)]
    assert names(["top_k"], contexts=[8192], batches=[3]) == [("flash-8k", 3)]
    assert {name for name, _ in names(["append"], contexts=[8192])} == {"fused", "plain"}  # those have no context
    with pytest.raises(OptionError, match="unknown op 'bake'"):
        select(CASES, ["bake"])
    with pytest.raises(OptionError, match="no shape of gather is left"):
        select(CASES, ["gather"], name="attend")


def test_verdict():
    assert [verdict(us, 15, 13) for us in (12, 13, 14, 15, 16)] == ["goal", "goal", "required", "required", "missed"]
    assert verdict(None, 15, 13) is None and verdict(5, None, None) is None
    assert verdict(5, None, 4) == "missed" and verdict(5, 6, None) == "required"
    row = {"table": "ops", "op": "kv_store", "shape": "fp8", "batch": 65536, "bytes": 4_000_000, "us": 1.2}
    made = judged(row, 4e12)
    assert (made["required_us"], made["goal_us"]) == (pytest.approx(1.25), pytest.approx(1 / 0.9))
    assert made["verdict"] == "required" and "verdict" not in judged(row)
