"""The layout record: the published memory table to the byte, ring sizes, and prediction = allocation."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.cache import init_cache
from dsv4_jax.config import AttentionType, DSparkHead, DSV4Config, LayerSpec, build_schedule
from dsv4_jax.errors import LayoutError
from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS
from dsv4_jax.layout import MAX_LEAVES, CacheLayout, CacheSize
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.ops.append import ring_row
from dsv4_jax.records import record_format, snapshot_record
from dsv4_jax.schema import build_schema
from dsv4_jax.serialization import layout_from_json, layout_to_json

SWA, CSA, HCA = AttentionType.SWA, AttentionType.CSA, AttentionType.HCA
MODELS = {"flash": DSV4Config.flash(), "pro": DSV4Config.pro()}
MIB = 2**20

# (kv, index) -> entry bytes, index key bytes; layers of a kind: CSA, HCA. Published sizes.
ROWS = {("bf16", "bf16"): (1024, 256), ("fp8", "fp8"): (584, 132), ("fp8", "fp4"): (584, 68)}
LAYERS = {"flash": (21, 20), "pro": (30, 31)}
PER_TOKEN = {  # bytes per token, as published (two decimals)
    ("flash", "bf16", "bf16"): 6880.00,
    ("pro", "bf16", "bf16"): 9848.00,
    ("flash", "fp8", "fp8"): 3850.25,
    ("pro", "fp8", "fp8"): 5511.44,
    ("flash", "fp8", "fp4"): 3514.25,
    ("pro", "fp8", "fp4"): 5031.44,
}
AT_128K = {  # MiB
    ("flash", "bf16", "bf16"): 860,
    ("pro", "bf16", "bf16"): 1231,
    ("flash", "fp8", "fp8"): 481,
    ("pro", "fp8", "fp8"): 689,
    ("flash", "fp8", "fp4"): 439,
    ("pro", "fp8", "fp4"): 629,
}
AT_1M = {  # GiB
    ("flash", "bf16", "bf16"): 6.719,
    ("pro", "bf16", "bf16"): 9.617,
    ("flash", "fp8", "fp8"): 3.760,
    ("pro", "fp8", "fp8"): 5.382,
    ("flash", "fp8", "fp4"): 3.432,
    ("pro", "fp8", "fp4"): 4.914,
}


@pytest.mark.parametrize(("model", "kv", "index"), PER_TOKEN)
def test_memory_table(model: str, kv: str, index: str) -> None:
    layout = CacheLayout(MODELS[model], kv, index)
    entry, key = ROWS[kv, index]
    csa, hca = LAYERS[model]
    exact = csa * Fraction(entry + key, 4) + hca * Fraction(entry, 128)
    assert Fraction(layout.bytes_per_block, 128) == exact
    assert layout.bytes_per_token == float(exact)
    assert round(layout.bytes_per_token, 2) == PER_TOKEN[model, kv, index]
    paged = {tokens: layout.request_bytes(tokens) - layout.bytes_per_slot for tokens in (2**17, 2**20)}
    assert paged == {tokens: exact * tokens for tokens in paged}
    assert round(paged[2**17] / MIB) == AT_128K[model, kv, index]
    assert round(paged[2**20] / 2**30, 3) == AT_1M[model, kv, index]


@pytest.mark.parametrize(
    ("model", "kv", "mtp", "window"),
    [
        ("flash", "bf16", False, 43 * 128 * 1024),
        ("flash", "fp8", False, 43 * 128 * 584),
        ("pro", "bf16", False, 61 * 128 * 1024),
        ("pro", "fp8", False, 61 * 128 * 584),
        ("flash", "bf16", True, 44 * 128 * 1024),
        ("flash", "fp8", True, 44 * 128 * 584),
    ],
)
def test_window_bytes(model: str, kv: str, mtp: bool, window: int) -> None:
    assert CacheLayout(MODELS[model], kv, include_drafts=mtp).window_bytes_per_request == window


def test_mtp_keeps_a_residual_of_four_streams_a_token() -> None:
    """Beside its window: 64 KiB each of the last token's, of the step's, and one more for every draft."""
    for drafts in (0, 3):
        layouts = [CacheLayout(MODELS["flash"], draft_tokens=drafts, include_drafts=mtp) for mtp in (False, True)]
        sizes = [layout.bytes_per_slot for layout in layouts]
        assert sizes[1] - sizes[0] == (128 + drafts) * 584 + (2 + drafts) * 4 * 4096 * 4


@pytest.mark.parametrize(("model", "snapshot"), [("flash", 3_868_672), ("pro", 5_398_528)])
def test_stages_keep_windows_in_a_piece_of_their_own(model: str, snapshot: int) -> None:
    """Behind what a record holds without them, so that the one begins as the other does."""
    head = DSparkHead(5, 128799, tuple(range(MODELS[model].num_layers))[-3:], 256)
    cfg = dataclasses.replace(MODELS[model], num_mtp_layers=0, dspark=head)
    without, layout = (CacheLayout(cfg, draft_tokens=5, include_drafts=mtp) for mtp in (False, True))
    assert layout.bytes_per_slot - without.bytes_per_slot == 3 * (128 + 5) * 584 == 233_016
    assert layout.window_bytes_per_request - without.window_bytes_per_request == 233_016
    bare, full = snapshot_record(without), snapshot_record(layout)
    assert (full.bytes, full.bytes - bare.bytes) == (snapshot, 224_256)
    assert full.descriptors[: len(bare.descriptors)] == bare.descriptors
    assert {piece.leaf.pool for piece in full.pieces[len(bare.pieces) :]} == {"draft"}
    assert layout.snapshot_fingerprint != without.snapshot_fingerprint
    assert layout.block_fingerprint == without.block_fingerprint
    assert layout_from_json(layout_to_json(layout)) == layout


def test_window_megabytes_as_published() -> None:
    sizes = [CacheLayout(MODELS[m], f).window_bytes_per_request / MIB for m in MODELS for f in ("bf16", "fp8")]
    assert [round(s, 3) for s in sizes] == [5.375, 3.065, 7.625, 4.349]


@pytest.mark.parametrize(("model", "raw_mib", "online_hca"), [("flash", 11.64, 20), ("pro", 17.84, 31)])
def test_compressor_state_bytes(model: str, raw_mib: float, online_hca: int) -> None:
    csa, hca = LAYERS[model]
    csa_ring = 8 * (4 * 512 + 4 * 128) * 4  # eight rows of main and index [kv | score], both halves
    raw = CacheLayout(MODELS[model], hca_state="raw")
    online = CacheLayout(MODELS[model])
    assert raw.state_bytes_per_request == csa * csa_ring + hca * 128 * 2 * 512 * 4
    assert online.state_bytes_per_request == csa * csa_ring + hca * 3 * 512 * 4
    # Published: 8 rows of 64 KiB and 16 KiB per CSA layer, 512 KiB per HCA layer.
    assert round(raw.state_bytes_per_request / MIB, 2) == raw_mib
    assert hca == online_hca


@pytest.mark.parametrize("model", MODELS)
def test_a_host_record_of_flash_is_half_a_megabyte(model: str) -> None:
    layout = CacheLayout(MODELS[model])
    csa, hca = LAYERS[model]
    assert layout.bytes_per_block == csa * 32 * (584 + 68) + hca * 584


def test_few_leaves_at_any_depth() -> None:
    layouts = [
        CacheLayout(cfg, kv, index, hca_state=state, include_drafts=True)
        for cfg in (*MODELS.values(), DSV4Config.tiny())
        for kv in KV_FORMATS
        for index in INDEX_FORMATS
        for state in ("online", "raw")
    ]
    assert max(len(layout.leaves) for layout in layouts) <= MAX_LEAVES == 24
    deep = DSV4Config.tiny(layer_types=(SWA, CSA, HCA, CSA) * 100)
    assert len(CacheLayout(deep).leaves) == len(CacheLayout(DSV4Config.tiny()).leaves)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(AttentionType), min_size=1, max_size=6),
    kv=st.sampled_from(sorted(KV_FORMATS)),
    index=st.sampled_from(sorted(INDEX_FORMATS)),
    ratio=st.sampled_from([6, 16, 128]),
    blocks=st.integers(1, 9),
    slots=st.integers(1, 4),
    columns=st.integers(1, 5),
    snapshots=st.integers(0, 2),
    multiple=st.integers(1, 3),
    draft=st.integers(0, 4),
    raw=st.booleans(),
    mtp=st.integers(0, 2),
)
def test_predicted_bytes_are_allocated_bytes(
    kinds, kv, index, ratio, blocks, slots, columns, snapshots, multiple, draft, raw, mtp
) -> None:
    cfg = DSV4Config.tiny(layer_types=tuple(kinds), hca_ratio=ratio, num_mtp_layers=mtp)
    lcm = math.lcm(*[{CSA: 4, HCA: ratio}[k] for k in kinds if k is not SWA])
    layout = CacheLayout(
        cfg, kv, index, lcm * multiple, draft, hca_state="raw" if raw else "online", include_drafts=bool(mtp)
    )
    size = CacheSize(blocks, slots, columns, snapshots)
    # Shapes only: each new shape would be a compile. `test_allocation` allocates.
    cache = jax.eval_shape(lambda: init_cache(layout, size))
    arrays = cache.arrays.values()
    assert sum(a.size * a.dtype.itemsize for a in arrays) == layout.total_bytes(size)
    slot_units, block_units = slots + snapshots + 1, blocks + 1
    assert layout.total_bytes(size) == (
        layout.bytes_per_slot * slot_units + layout.bytes_per_block * block_units + 4 * slot_units * columns
    )
    assert (cache.slot_units, cache.block_units) == (slot_units, block_units if set(kinds) - {SWA} else 1)
    assert len(arrays) == len(layout.leaves) <= MAX_LEAVES
    assert all(a.dtype.kind in "ui" or a.dtype == np.float32 for a in arrays)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_allocation(kv: str) -> None:
    layout = CacheLayout(DSV4Config.tiny(), kv, draft_tokens=2)
    size = CacheSize(3, 2, 4, num_snapshots=1)
    cache = init_cache(layout, size)
    assert sum(a.nbytes for a in cache.arrays.values()) == layout.total_bytes(size)
    assert not any(np.asarray(a).any() for a in cache.arrays.values())


def test_schema_of_every_kind() -> None:
    layers = build_schedule(DSV4Config.flash())
    swa, csa, hca = (build_schema(DSV4Config.flash(), layers[i]) for i in (0, 2, 3))
    facts = [
        (s.block_tokens, s.entries_per_block, s.indexer_entries_per_block, s.tail_buffer_size, s.overlap_rows)
        for s in (swa, csa, hca)
    ]
    assert facts == [(128, 0, 0, 0, 0), (128, 32, 32, 3, 4), (128, 1, 0, 127, 0)]
    assert {(s.swa_window_size, s.entry_head_dim) for s in (swa, csa, hca)} == {(128, 512)}
    assert [s.attn for s in (swa, csa, hca)] == [SWA, CSA, HCA]


@pytest.mark.parametrize(("tokens", "csa", "hca"), [(128, 32, 1), (256, 64, 2), (384, 96, 3)])
def test_schema_of_larger_blocks(tokens: int, csa: int, hca: int) -> None:
    cfg = DSV4Config.flash()
    layers = build_schedule(cfg)
    assert build_schema(cfg, layers[2], block_tokens=tokens).entries_per_block == csa
    assert build_schema(cfg, layers[3], block_tokens=tokens).entries_per_block == hca
    layout = CacheLayout(cfg, block_tokens=tokens)
    assert [layout.schema(i).entries_per_block for i in (0, 2, 3)] == [0, csa, hca]
    assert layout.bytes_per_token == CacheLayout(cfg).bytes_per_token


@settings(max_examples=80, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(AttentionType), min_size=1, max_size=7),
    kv=st.sampled_from(sorted(KV_FORMATS)),
    index=st.sampled_from(sorted(INDEX_FORMATS)),
    ratios=st.tuples(st.integers(2, 12), st.integers(2, 200)).filter(lambda ratios: ratios[0] != ratios[1]),
    multiple=st.integers(0, 3),
    draft=st.integers(0, 4),
    state=st.sampled_from(["online", "raw"]),
    mtp=st.integers(0, 2),
)
def test_layers_add_up_to_the_leaves(kinds, kv, index, ratios, multiple, draft, state, mtp) -> None:
    """The schema of a layer is the one source: `build_schema` gives it, leaves are made of it, bytes are its sums."""
    cfg = DSV4Config.tiny(layer_types=tuple(kinds), csa_ratio=ratios[0], hca_ratio=ratios[1], num_mtp_layers=mtp)
    lcm = math.lcm(*[cfg.ratio(kind) for kind in kinds if kind is not SWA])
    tokens = lcm * multiple or None
    layout = CacheLayout(cfg, kv, index, tokens, draft, hca_state=state, include_drafts=bool(mtp))
    assert layout.block_tokens % lcm == 0 and (tokens or layout.block_tokens - lcm < 128 <= layout.block_tokens)
    choices = dict(block_tokens=tokens, draft_tokens=draft, hca_state=state)
    assert layout.schemas == tuple(build_schema(cfg, spec, **choices) for spec in layout.schedule)
    assert len(layout.schemas) == len(kinds) + mtp
    per_unit, rows, places = {"block": 0, "slot": 0}, dict.fromkeys((leaf.name for leaf in layout.leaves), 0), set()
    for i, schema in enumerate(layout.schemas):
        kind = (*kinds, *[SWA] * mtp)[i]
        assert layout.schema(i) is schema and (schema.layer_idx, schema.owner, schema.selector) == (i, i, i)
        assert schema.attn is kind and schema.ratio == cfg.ratio(kind)
        assert schema.entries_per_block * max(schema.ratio, 1) == (layout.block_tokens if schema.ratio else 0)
        assert schema.indexer_entries_per_block == (schema.entries_per_block if kind is CSA else 0)
        assert {pool.pool for pool in schema.pools} - {"residual"} == {
            SWA: {"swa"},
            CSA: {"swa", "csa", "index", "csa_state", "index_state"},
            HCA: {"swa", "hca", "hca_state"},
        }[kind]
        is_mtp = i >= len(kinds)
        assert (schema.residual is not None, schema.first_position) == (is_mtp, is_mtp)
        for pool in schema.pools:
            row_bytes = 4 * pool.width if pool.row == "state" else layout.row_format(pool).row_bytes
            per_unit[pool.scope] += pool.rows * row_bytes
            for leaf in layout.leaves:
                if leaf.pool == pool.pool:
                    assert (leaf.scope, leaf.rows) == (pool.scope, pool.rows)
                    rows[leaf.name] += pool.rows
            places.add((pool.pool, pool.ordinal))
            assert pool.base(5) == pool.ordinal * 5 * pool.rows
    assert per_unit == {"block": layout.bytes_per_block, "slot": layout.bytes_per_slot}
    assert all(rows[leaf.name] == leaf.layers * leaf.rows for leaf in layout.leaves if leaf.scope != "table")
    pools = {leaf.pool: leaf.layers for leaf in layout.leaves if leaf.scope != "table"}
    assert places == {(name, i) for name, layers in pools.items() for i in range(layers)}


def test_a_ratio_that_no_layer_has_counts_for_nothing() -> None:
    cfg = DSV4Config.tiny(layer_types=(CSA,), hca_ratio=96)
    schema = build_schema(cfg, build_schedule(cfg)[0])
    assert schema == CacheLayout(cfg).schema(0) and (schema.block_tokens, schema.entries_per_block) == (128, 32)
    both = DSV4Config.tiny(layer_types=(CSA, HCA), hca_ratio=96)
    assert build_schema(both, build_schedule(both)[0]).block_tokens == CacheLayout(both).block_tokens == 192


def test_a_schema_is_of_a_layer_of_the_model() -> None:
    cfg = DSV4Config.tiny(num_mtp_layers=1)
    assert build_schema(cfg, build_schedule(cfg, include_drafts=True)[4]) == CacheLayout(
        cfg, include_drafts=True
    ).schema(4)
    for layer in (LayerSpec(5, SWA), LayerSpec(-1, CSA), LayerSpec(0, CSA)):
        with pytest.raises(LayoutError, match=f"layer {layer.layer_idx} of kind {layer.attn.name} is none of"):
            build_schema(cfg, layer)
    with pytest.raises(LayoutError, match="hca_state"):
        build_schema(cfg, build_schedule(cfg)[0], hca_state="both")


def test_state_has_no_row_format() -> None:
    layout = CacheLayout(DSV4Config.tiny(), "bf16", "fp8")
    csa = layout.schema(1)
    formats = {pool.pool: layout.row_format(pool).name for pool in csa.pools if pool.row != "state"}
    assert formats == {"swa": "bf16", "csa": "bf16", "index": "fp8"}
    with pytest.raises(LayoutError, match="pool 'csa_state' holds state"):
        layout.row_format(csa.entry_state)


def test_plans_list_tokens_by_the_ratios_of_the_layers() -> None:
    layout = CacheLayout(DSV4Config.tiny(csa_ratio=8, hca_ratio=32))
    assert (layout.flush_ratio, layout.group_ratio) == (8, 32)
    swa = CacheLayout(DSV4Config.tiny(layer_types=(SWA,), hca_ratio=32))
    assert (swa.flush_ratio, swa.group_ratio) == (4, 32)


def test_stored_records_of_earlier_versions_stay_readable() -> None:
    """Fingerprints name what files and other hosts hold."""
    flash, tiny = DSV4Config.flash(), DSV4Config.tiny
    layouts = {
        "8ec0cd2ea9b022cd": CacheLayout(flash),
        "fb93dcc9ccb114b0": CacheLayout(DSV4Config.pro()),
        "3d417128133079ab": CacheLayout(flash, "bf16", "bf16", 256, 3, hca_state="raw", include_drafts=True),
        "65b8d4a9cfc8f950": CacheLayout(tiny(layer_types=(CSA,), hca_ratio=96)),
        "767be243cbdbb166": CacheLayout(tiny(layer_types=(SWA,)), draft_tokens=2),
        "21c3a62c9fd32027": CacheLayout(tiny(), "f32", "f32"),
        "5ba5e44fd9a4c778": CacheLayout(tiny(hca_ratio=6), "fp8_per_entry", "fp8", draft_tokens=1),
    }
    assert [layout.fingerprint[:16] for layout in layouts.values()] == [*layouts]
    assert [layout.block_fingerprint[:16] for layout in layouts.values()] == [
        "a84bf196599b8e6b",
        "45080e451bc29c89",
        "52c7a01d686cfc96",
        "4799686ae32a45cd",
        "02562caadac44de3",
        "eeb76cfde39040f6",
        "f8fc2419e0665bce",
    ]
    assert [layout.snapshot_fingerprint[:16] for layout in layouts.values()] == [
        "f3f2fe2a0809c245",
        "9d3bcd80f8873c44",
        "eeb628a7ec586038",
        "4550b421ddca6adf",
        "852aab92d4789ab2",
        "2f31f2517bf76bb0",
        "d1812fca42577a9d",
    ]


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_records_are_shared_by_layouts_that_differ_in_nothing_they_hold(kv_format: str) -> None:
    """Blocks and snapshots by what each holds; whole caches by every array."""
    flash, swa = DSV4Config.flash(), DSV4Config.tiny(layer_types=(SWA,))
    layout, make = CacheLayout(flash, kv_format), functools.partial(CacheLayout, flash, kv_format)
    for other, blocks, snapshots in (
        (make(draft_tokens=3), True, True),
        (make(include_drafts=True), True, False),
        (make(block_tokens=256), False, True),
        (make(index_format="fp8"), False, True),
        (make(hca_state="raw"), False, False),
        (make(numerics="released"), False, False),
        (CacheLayout(flash, "fp8_per_entry"), False, False),
        (CacheLayout(dataclasses.replace(flash, sliding_window=64), kv_format), True, False),
        (CacheLayout(DSV4Config.pro(), kv_format), False, False),
    ):
        assert (layout.block_fingerprint == other.block_fingerprint) == blocks, other
        assert (layout.snapshot_fingerprint == other.snapshot_fingerprint) == snapshots, other
        assert layout.fingerprint != other.fingerprint
        same = record_format(layout, "block").descriptors == record_format(other, "block").descriptors
        assert same or not blocks
    split = make(key_split="latency")
    assert split.block_fingerprint == layout.block_fingerprint
    assert split.snapshot_fingerprint == layout.snapshot_fingerprint
    assert layout.block_fingerprint != layout.snapshot_fingerprint
    # Without HCA layers there is no state of theirs.
    assert CacheLayout(swa).snapshot_fingerprint == CacheLayout(swa, hca_state="raw").snapshot_fingerprint


@pytest.mark.parametrize("tokens", [0, -128, 1, 64, 130, 127])
def test_impossible_block_sizes(tokens: int) -> None:
    cfg = DSV4Config.flash()
    with pytest.raises(LayoutError, match=f"128, got {tokens}"):
        CacheLayout(cfg, block_tokens=tokens)
    with pytest.raises(LayoutError, match="block_tokens"):
        build_schema(cfg, build_schedule(cfg)[3], block_tokens=tokens)


def test_block_tokens_need_only_fit_the_kinds_present() -> None:
    assert CacheLayout(DSV4Config.tiny(layer_types=(CSA,)), block_tokens=4).schema(0).entries_per_block == 1
    assert CacheLayout(DSV4Config.tiny(layer_types=(SWA,)), block_tokens=7).blocks_for(8) == 2
    assert CacheLayout(DSV4Config.tiny(hca_ratio=6)).block_tokens == 132  # lcm 12, at least 128
    assert CacheLayout(DSV4Config.tiny(hca_ratio=256)).block_tokens == 256


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_draft_tokens_size_the_rings(n: int) -> None:
    """A verify step writes 1 + n positions; what the oldest survivor needs must still be there after it.

    Survivor: only the first token accepted. Its window reaches back W - 1; the entry it may still
    wait for needs 2m (CSA) or r (HCA) rows up to a position at or after the next token.
    """
    cfg = DSV4Config.flash()
    raw, online = CacheLayout(cfg, draft_tokens=n, hca_state="raw"), CacheLayout(cfg, draft_tokens=n)
    assert raw.schema(0).window.rows >= 128 + n
    for state in (raw.schema(2).entry_state, raw.schema(2).index_state):
        assert state is not None and state.rows >= 2 * 4 + n - 1
    ring, banks = raw.schema(3).entry_state, online.schema(3).entry_state
    assert ring is not None and ring.rows >= 128 + n - 1
    # Online banks: the state before the step and after each of its 1 + n tokens.
    assert banks is not None and banks.rows == (n + 2 if n else 1)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_format": "fp16"}, "fp16"),
        ({"index_format": "int4"}, "int4"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"hca_state": "both"}, "hca_state"),
        ({"key_split": "balanced"}, "key_split .* 'balanced'"),
        ({"key_split": None}, "key_split"),
        ({"numerics": "exact"}, "numerics .* 'plain', 'released', got 'exact'"),
    ],
)
def test_unknown_options_are_named(options: dict, name: str) -> None:
    with pytest.raises(LayoutError, match=name):
        CacheLayout(DSV4Config.tiny(), **options)


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, -1), (1.0, 1, 1), (True, 1, 1)])
def test_impossible_sizes(size: tuple) -> None:
    with pytest.raises(LayoutError, match="CacheSize"):
        CacheSize(*size)


ODD = [True, np.True_, 1.5, 128.0, np.float32(128), float("nan"), "128", [128], np.array([128]), 2**31, 10**5000, -1]
names_of_types = pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)


@names_of_types
def test_options_of_odd_types(value) -> None:
    swa = DSV4Config.tiny(layer_types=(SWA,))
    for make in (
        lambda: CacheLayout(swa, block_tokens=value),
        lambda: CacheLayout(swa, draft_tokens=value),
        *(lambda layer=layer: build_schema(swa, layer, block_tokens=value) for layer in build_schedule(swa)),
        lambda: build_schema(DSV4Config.flash(), build_schedule(DSV4Config.flash())[2], block_tokens=value),
        lambda: CacheSize(1, 1, 1, value),
        lambda: CacheSize(value, 1, 1),
        lambda: CacheLayout(swa).layer(value),
        lambda: CacheLayout(swa).schema(value),
    ):
        with pytest.raises(LayoutError):
            make()


def test_numpy_integers_are_integers() -> None:
    cfg = DSV4Config.tiny()
    assert CacheLayout(cfg, block_tokens=np.int64(128), draft_tokens=np.int8(2)) == CacheLayout(cfg, draft_tokens=2)
    assert build_schema(cfg, build_schedule(cfg)[2], block_tokens=np.int32(256)).block_tokens == 256
    # Products of its numbers are Python's: none wraps.
    size = CacheSize(np.int32(2**30), np.uint8(255), np.int16(4), np.int8(1))
    assert size == CacheSize(2**30, 255, 4, 1) and all(type(x) is int for x in (size.num_blocks, size.slot_units))


# Row ids are int32


def most_units(layout: CacheLayout, scope: str) -> int:
    """The most units (the null unit included) of which every row has an int32 number, and one more is left."""
    return min((2**31 - 1) // (leaf.layers * leaf.rows) for leaf in layout.leaves if leaf.scope == scope)


@pytest.mark.parametrize("model", [*MODELS.values(), DSV4Config.tiny()], ids=[*MODELS, "tiny"])
@pytest.mark.parametrize(
    "options", [{}, dict(hca_state="raw", draft_tokens=7, block_tokens=256)], ids=["default", "raw"]
)
def test_row_ids_fit_int32(model, options) -> None:
    layout = CacheLayout(model, **options)
    blocks, slots = most_units(layout, "block") - 1, most_units(layout, "slot") - 1
    layout.check_size(CacheSize(blocks, slots, 1))
    layout.check_size(CacheSize(blocks, 1, 1, slots - 1))
    for size, pool in (
        (CacheSize(blocks + 1, 1, 1), "csa"),
        (CacheSize(1, slots + 1, 1), "swa"),
        (CacheSize(1, 1, 1, slots), "swa"),
    ):
        message = f"pool '{pool}': .* rows, row ids are int32 and reach 2147483646"
        with pytest.raises(LayoutError, match=message):
            layout.check_size(size)
        with pytest.raises(LayoutError, match=message):
            init_cache(layout, size)
        with pytest.raises(LayoutError, match=message):
            KVCacheManager(layout, size)


def test_the_largest_row_id_is_what_the_ops_make_of_it() -> None:
    """The row past the last one, which stands for no row, is an int32 too, and the products on the way do not wrap."""
    layout = CacheLayout(DSV4Config.flash())
    assert f"{most_units(layout, 'block') * 128 // 10**6} million tokens" in CacheLayout.check_size.__doc__
    slots = most_units(layout, "slot")
    ring = layout.schema(42).window
    last = ring_row(ring.ordinal, slots, ring.rows, np.int32(slots - 1), np.int32(ring.rows - 1))
    assert last.dtype == np.int32 and last == 43 * slots * ring.rows - 1 < 2**31 - 1


@pytest.mark.parametrize("field", ["num_blocks", "num_slots", "max_blocks_per_request", "num_snapshots"])
def test_unit_ids_fit_int32(field: str) -> None:
    size = dict(num_blocks=1, num_slots=1, max_blocks_per_request=1)
    with pytest.raises(LayoutError, match=f"CacheSize.{field} must be an integer from [01] to 2147483646"):
        CacheSize(**size | {field: 2**31 - 1})
    with pytest.raises(LayoutError, match="num_slots and num_snapshots"):
        CacheSize(1, 2**30, 1, 2**30)


def test_layouts_are_values() -> None:
    a, b = CacheLayout(DSV4Config.flash()), CacheLayout(DSV4Config.flash())
    assert a == b and hash(a) == hash(b) and a.fingerprint == b.fingerprint
    others = [
        CacheLayout(DSV4Config.flash(), "bf16"),
        CacheLayout(DSV4Config.flash(), "fp8", "fp8"),
        CacheLayout(DSV4Config.flash(), block_tokens=256),
        CacheLayout(DSV4Config.flash(), hca_state="raw"),
        CacheLayout(DSV4Config.flash(), draft_tokens=1),
        CacheLayout(DSV4Config.flash(), numerics="released"),
        CacheLayout(DSV4Config.pro()),
    ]
    assert len({x.fingerprint for x in (a, *others)}) == len({a, *others}) == 8


def test_key_splits_are_other_steps_over_the_same_blocks() -> None:
    """Other layouts: a step compiled for one is not that of the other. One fingerprint: stored blocks serve both."""
    a, b = (CacheLayout(DSV4Config.flash(), key_split=split) for split in ("throughput", "latency"))
    assert a == CacheLayout(DSV4Config.flash()) != b and "key_split='latency'" in repr(b)
    assert a.leaves == b.leaves and a.fingerprint == b.fingerprint


def test_layer_out_of_range() -> None:
    layout = CacheLayout(DSV4Config.tiny())
    for bad in (-1, 4):
        with pytest.raises(LayoutError, match=f"layer {bad} out of range"):
            layout.layer(bad)
        with pytest.raises(LayoutError, match=f"layer {bad} out of range"):
            layout.schema(bad)
