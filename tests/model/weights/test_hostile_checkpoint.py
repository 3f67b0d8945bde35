"""Checkpoints that somebody made to break the loader: each is refused in one typed line before anything big is made."""

from __future__ import annotations

import json
import os
import pathlib
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from dsv4_jax import AttentionType, DSV4Config, model
from dsv4_jax.errors import CheckpointError, ConfigError, FileError
from dsv4_jax.model.weights import deferred, sources
from dsv4_jax.model.weights.params import param_specs
from dsv4_jax.model.weights.safetensors import Later, read_safetensors, write_safetensors

CFG = DSV4Config.tiny(layer_types=(AttentionType.SWA,), num_mtp_layers=1)
LAYER = "model.layers.0."
NORM, TABLE, WQ_A = "model.norm.weight", f"{LAYER}mlp.gate.tid2eid", f"{LAYER}self_attn.q_a_proj.weight"
SMALL = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int16),
    "c": np.ones((), np.uint8),
}
MISSING: Any = ...


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(CFG, seed=4)


@pytest.fixture
def saved(params, tmp_path) -> pathlib.Path:
    model.save_hf(CFG, params, tmp_path)
    return tmp_path


@pytest.fixture
def nothing_is_made(monkeypatch) -> None:
    """A checkpoint that is refused is refused before its first parameter is made."""

    def made(array: deferred.Deferred, *_: object) -> None:
        raise AssertionError(f"made a parameter: {array.shape}")

    monkeypatch.setattr("dsv4_jax.model.weights.deferred._made", made)


def assert_refused(load: Callable[[], object], problem: str, most_bytes: int = 2**20) -> None:
    """With a `CheckpointError` of one line, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=problem) as error:
            load()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert is_one_line(error.value)


def is_one_line(error: Exception) -> bool:
    return str(error).isprintable() and 0 < len(str(error).encode()) < 2000


def write_raw(path: pathlib.Path, header: Any, body: bytes = b"", aligned: bool = True) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if aligned else 0)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def header_of(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


# What "a" (bytes 0..24, float32 [2, 3]), "b" (24..32, int16 [4]) and "c" (32..33, one uint8) are said to be.
ENTRIES = [
    ("dtype", MISSING, "'a' has unsupported dtype None"),
    ("dtype", 5, "unsupported dtype 5"),
    ("dtype", ["F32"], "unsupported dtype"),
    ("dtype", "F4", "unsupported dtype 'F4'"),
    ("dtype", "x" * 10**6, "unsupported dtype 'xxx"),
    ("shape", MISSING, "no possible shape: None"),
    ("shape", 6, "no possible shape: 6"),
    ("shape", "23", "no possible shape: '23'"),
    ("shape", [2.0, 3], "no possible shape"),
    ("shape", ["2", 3], "no possible shape"),
    ("shape", [True, 6], "no possible shape"),
    ("shape", [-2, -3], "no possible shape"),
    ("shape", [None, 6], "no possible shape"),
    ("shape", [[6]], "no possible shape"),
    ("shape", {"0": 6}, "no possible shape"),
    ("shape", [6] + [1] * 40, "no possible shape"),
    ("shape", [0, 2**62, 2**62], "no possible shape"),
    ("shape", [10**4000], "no possible shape"),
    ("shape", [2, 4], "'a' does not fit the file: float32"),
    ("shape", [], "does not fit the file"),
    ("data_offsets", MISSING, "no possible data_offsets: None"),
    ("data_offsets", 24, "no possible data_offsets"),
    ("data_offsets", [0], "no possible data_offsets"),
    ("data_offsets", [0, 24, 24], "no possible data_offsets"),
    ("data_offsets", [0.0, 24.0], "no possible data_offsets"),
    ("data_offsets", ["0", "24"], "no possible data_offsets"),
    ("data_offsets", [False, 24], "no possible data_offsets"),
    ("data_offsets", [-24, 0], "no possible data_offsets"),
    ("data_offsets", [24, 0], "does not fit the file"),
    ("data_offsets", [0, 25], "does not fit the file"),
    ("data_offsets", [2**64, 2**64 + 24], "does not fit the file"),
    ("data_offsets", [10**4000, 10**4000 + 24], "does not fit the file"),
    ("data_offsets", [8, 32], "starts at byte 8, where the one before it ends at 0"),
    ("data_offsets", [1, 25], "is misaligned: float32 at byte"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "problem"), ENTRIES, ids=lambda value: ascii(value)[:30])
def test_entries_of_the_header(tmp_path, field, value, problem):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, SMALL)
    header, body = header_of(path)
    assert header["a"]["data_offsets"] == [0, 24] and len(body) == 33
    header["a"][field] = value
    if value is MISSING:
        del header["a"][field]
    write_raw(path, header, body)
    assert_refused(lambda: read_safetensors(path), problem, most_bytes=2**23)


def entry(start: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    size = {"U8": 1, "I16": 2, "F32": 4}[dtype]
    return {"dtype": dtype, "shape": [(end - start) // size], "data_offsets": [start, end]}


FILES = [
    ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' starts at byte 4, where the one before it ends at 8"),
    ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "'b' starts at byte 0, where the one before it ends at 8"),
    ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "'b' starts at byte 12, where the one before it ends at 8"),
    ({"a": entry(0, 8)}, 12, "4 bytes after the last tensor"),
    ({}, 12, "12 bytes after the last tensor"),
    ({"a": entry(0, 1), "b": entry(1, 9, "F32")}, 9, "'b' is misaligned: float32 at byte"),
    ({"a": [0, 8]}, 8, "unsupported dtype None"),
    ({"a": None}, 8, "unsupported dtype None"),
    ({"a\n\ud800" * 300: None}, 8, "unsupported dtype None"),
    ({"__metadata__": [1]}, 0, "no JSON object"),
    ([entry(0, 8)], 8, "no JSON object"),
    (b'{"a": {}, "a": {}}', 0, "the header is not JSON: the key 'a' is given twice"),
    (b'{"a": {"dtype": "U8", "dtype": "F32"}}', 0, "the key 'dtype' is given twice"),
    (b'{"\xff": 1}', 0, "the header is not JSON: 'utf-8' codec"),
    (b'{"a": ' + b"[" * 200000, 0, "the header is not JSON: nested too deep"),
    (b'{"a": ' + b'{"a": ' * 100000, 0, "the header is not JSON: nested too deep"),
    (b'{"a": ' + b"9" * 5000 + b"}", 0, "the header is not JSON: Exceeds the limit"),
    (b"\0" * 64, 0, "the header is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "size", "problem"), FILES, ids=range(len(FILES)))
def test_headers(tmp_path, header, size, problem):
    path = tmp_path / "x.safetensors"
    write_raw(path, header, bytes(size))
    assert_refused(lambda: read_safetensors(path), problem, most_bytes=2**24)


def test_a_misaligned_body(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} ', b"four", aligned=False)
    assert_refused(lambda: read_safetensors(path), "'a' is misaligned: float32 at byte 63")


@pytest.mark.parametrize("length", [60 * 10**6, 2**40, 2**63, 2**64 - 1])
def test_no_more_of_a_header_is_read_than_a_checkpoint_needs(tmp_path, length):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(2**41)
    problem = "truncated header" if length > 2**41 else f"a header of {length} bytes, at most"
    assert_refused(lambda: read_safetensors(path), problem)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("fifo", "loop", ".", "x" * 5000, "a\0b"):
        with pytest.raises(CheckpointError, match="no such file"):
            read_safetensors(tmp_path / name)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150)
def test_damaged_headers(tmp_path_factory, data):
    """Any JSON anywhere in the header, or any byte changed, moved or cut: tensors as they fit, or one line."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_safetensors(path, SMALL)
    header, body = header_of(path)
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-9, 40)
        | st.sampled_from([2**31, 2**63, 2**70, 10**400, 1.5, "F32", ""])
    )
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(["a", "b", "c", "d", "__metadata__"]))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
        value = data.draw(scalars | st.lists(scalars, max_size=3))
        header[name] = value if field is None else {**(header.get(name) or {}), field: value}
        write_raw(path, header, body)
    else:
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        tensors = read_safetensors(path)
    except CheckpointError as error:
        assert is_one_line(error)
    else:
        size = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        assert sum(tensor.nbytes for tensor in tensors.values()) == size


def rewrite(path: pathlib.Path, **changes: np.ndarray | None) -> None:
    tensors = {name: np.array(x) for name, x in read_safetensors(path / "model.safetensors").items()} | changes
    write_safetensors(path / "model.safetensors", {name: x for name, x in tensors.items() if x is not None})


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (NORM, np.ones(64, np.int32), "norm.weight has dtype int32, expected one of float32, float16, bfloat16"),
        (NORM, np.full(64, 1e300), "norm.weight has dtype float64, expected one of float32"),
        (NORM, np.ones(64, np.bool_), "norm.weight has dtype bool"),
        (NORM, np.ones(64, ml_dtypes.float8_e5m2), "norm.weight has dtype float8_e5m2"),
        (NORM, np.ones((64, 1), np.float32), r"norm.weight has shape \(64, 1\), expected \(64,\)"),
        (TABLE, np.ones((256, 2), np.float32), "tid2eid has dtype float32, expected integers"),
        (TABLE, np.ones((256, 2), np.bool_), "tid2eid has dtype bool, expected integers"),
        (TABLE, np.full((256, 2), 4), r"tid2eid holds experts 4..4, the model has 0..3"),
        (TABLE, np.full((256, 2), -1, np.int8), r"tid2eid holds experts -1..-1"),
        (TABLE, np.full((256, 2), 2**32), r"tid2eid holds experts 4294967296"),
        (TABLE, np.array([[0, 1]] * 5 + [[3, 3]] * 251), r"tid2eid gives token 5 the experts \[3, 3\]: one twice"),
        ("norm.weight", np.ones(64, np.float32), "tensor norm.weight is there twice, with and without 'model.'"),
        ("a\nb\x1b[2J", np.ones(64, np.float32), r"not part of the model, such as 'a\\nb\\x1b\[2J'"),
        ("x" * 10**5, np.ones(64, np.float32), "not part of the model, such as 'xxx"),
        ("layers.2.norm.weight", np.ones(64, np.float32), "not part of the model, such as layers.2.norm"),
        (f"layers.{'9' * 5000}.x", np.ones(64, np.float32), "not part of the model, such as 'layers.999"),
    ],
    ids=range(16),
)
def test_tensors(saved, nothing_is_made, name, tensor, problem):
    rewrite(saved, **{name: tensor})
    assert_refused(lambda: model.load_hf(saved), problem)


def test_fp8_that_is_no_matrix_or_has_no_possible_scales(saved, nothing_is_made):
    norm, matrix = (np.ones(shape, ml_dtypes.float8_e4m3fn) for shape in (64, (32, 64)))
    rewrite(saved, **{NORM: norm, f"{NORM}_scale_inv": np.ones(1, np.float32)})
    assert_refused(lambda: model.load_hf(saved), "norm.weight is e4m3 but no matrix")
    floats = {NORM: np.ones(64, np.float32), f"{NORM}_scale_inv": None}
    rewrite(saved, **floats, **{WQ_A: matrix, f"{WQ_A}_scale_inv": np.ones((1, 1), np.int32)})
    assert_refused(lambda: model.load_hf(saved), "q_a_proj.weight_scale_inv has dtype int32, expected one of float32")
    for scale in (np.nan, np.inf, -np.inf, 1e36):
        rewrite(saved, **{f"{WQ_A}_scale_inv": np.full((1, 1), scale, np.float32)})
        assert_refused(lambda: model.load_hf(saved), "q_a_proj.weight_scale_inv holds the scale")


@pytest.mark.parametrize("block", [[128, 100], [128], 128, "128", [128.5, 128], {}])
def test_scales_of_other_blocks(saved, block):
    """A matrix of 64 x 200 has two scales whether a block is 128 or 100 wide."""
    edit_config(saved, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    model.load_hf(saved)
    for quantised in ({"weight_block_size": block}, [block]):
        edit_config(saved, quantization_config=quantised)
        with pytest.raises(ConfigError, match="quantization_config") as error:
            model.load_hf(saved)
        assert is_one_line(error.value)


def edit_config(path: pathlib.Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 2**31 - 1},
        {"hidden_size": 2**31 - 1},
        {"n_routed_experts": 2**31 - 1},
        {"q_lora_rank": 2**30},
        {"moe_intermediate_size": 2**31 - 1},
        {"num_hidden_layers": 300, "layer_types": ["sliding_attention"] * 300, "mlp_layer_types": ["moe"] * 300},
        {"hc_mult": 2**31 - 1},
        {"num_nextn_predict_layers": 1024},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sizes_that_the_files_do_not_have(saved, nothing_is_made, fields):
    """Refused for a tensor's shape, or for one that is missing; more MTP layers than there are skip nothing more."""
    edit_config(saved, **fields)
    if "num_nextn_predict_layers" in fields:
        rewrite(saved, **{"layers.1025.x": np.ones(1, np.float32)})
    assert_refused(lambda: model.load_hf(saved), "has shape|missing tensor|not part of", most_bytes=2**25)


def test_unbounded_numbers_of_layers(saved):
    for fields in ({"num_nextn_predict_layers": 10**9}, {"num_hidden_layers": 10**9}):
        edit_config(saved, **fields)
        with pytest.raises(ConfigError) as error:
            model.load_hf(saved)
        assert is_one_line(error.value)
        edit_config(saved, num_nextn_predict_layers=1, num_hidden_layers=1)
    model.load_hf(saved)


@pytest.fixture
def sharded(saved) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    """A directory inside another that holds a copy of its second shard, and its index."""
    inside = saved / "checkpoint"
    inside.mkdir()
    tensors = read_safetensors(saved / "model.safetensors")
    names = sorted(tensors)
    placed = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in placed.items():
        write_safetensors(inside / file, {name: tensors[name] for name in part})
    (saved / "config.json").rename(inside / "config.json")
    (saved / "two.safetensors").write_bytes((inside / "two.safetensors").read_bytes())
    yield inside, {"weight_map": {name: file for file, part in placed.items() for name in part}}


def write_index(path: pathlib.Path, index: Any) -> None:
    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    (path / "model.safetensors.index.json").write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "../two.safetensors",
        "/etc/passwd",
        "./two.safetensors",
        "sub/../two.safetensors",
        "",
        ".",
        "..",
        "two\0",
        "a\\b",
        "C:two",
        "x" * 300,
        "\ud800",
        "two\n",
        5,
        None,
        True,
        1.5,
        ["two.safetensors"],
        {"a": 1},
    ],
    ids=ascii,
)
def test_files_that_an_index_must_not_name(sharded, monkeypatch, name):
    path, index = sharded
    index["weight_map"] = {
        tensor: name if file == "two.safetensors" else file for tensor, file in index["weight_map"].items()
    }
    write_index(path, index)

    def opened(file: pathlib.Path) -> None:
        raise AssertionError(f"opened {file}")

    monkeypatch.setattr(sources, "read_safetensors", opened)
    assert_refused(lambda: model.load_hf(path), "which is no plain file name")


INDICES = [
    (b"{", "is not JSON"),
    (b"[]", "holds no weight_map"),
    (b"{}", "holds no weight_map"),
    (b'{"weight_map": ["a"]}', "holds no weight_map"),
    (b'{"weight_map": "a"}', "holds no weight_map"),
    (b'{"weight_map": {}}', "missing tensor"),
    (b'{"weight_map": {"\xff": "a"}}', "is not JSON: 'utf-8' codec"),
    (b'{"weight_map": ' + b"[" * 200000, "is not JSON: nested too deep"),
    (b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "the key 'a' is given twice"),
    (b'{"weight_map": {"a": "three.safetensors"}}', "no such file: .*three.safetensors"),
    (b'{"weight_map": {"a": "one.safetensors"}}', "is in one.safetensors, where the index does not place it"),
]


@pytest.mark.parametrize(("index", "problem"), INDICES, ids=range(len(INDICES)))
def test_indices(sharded, nothing_is_made, index, problem):
    write_index(sharded[0], index)
    assert_refused(lambda: model.load_hf(sharded[0]), problem)


def test_shards_that_are_not_what_the_index_says(sharded, nothing_is_made):
    path, index = sharded
    where = index["weight_map"]
    first = next(name for name, file in where.items() if file == "one.safetensors")
    write_index(path, {"weight_map": where | {"a\nb": "one.safetensors"}})
    assert_refused(lambda: model.load_hf(path), r"missing tensor 'a\\nb': the index places it in one.safetensors")
    write_index(path, {"weight_map": where | {first: "two.safetensors"}})
    assert_refused(lambda: model.load_hf(path), f"{first} is in one.safetensors, where the index does not place it")
    write_index(path, index)
    tensors = {name: np.array(x) for name, x in read_safetensors(path / "two.safetensors").items()}
    write_safetensors(path / "two.safetensors", tensors | {first: np.ones(3, np.float32)})
    assert_refused(lambda: model.load_hf(path), f"{first} is in two.safetensors, where the index does not place it")
    (path / "two.safetensors").unlink()
    (path / "two.safetensors").mkdir()
    assert_refused(lambda: model.load_hf(path), "no such file: .*two.safetensors")


def test_no_more_of_an_index_is_read_than_a_checkpoint_needs(sharded):
    with (sharded[0] / "model.safetensors.index.json").open("wb") as file:
        file.truncate(2**40)
    assert_refused(lambda: model.load_hf(sharded[0]), "1099511627776 bytes, at most")


def test_links_of_a_download_cache(sharded, params):
    """Its snapshots link each file to a blob beside them; a link in the directory is its owner's, not the text's."""
    path, index = sharded
    write_index(path, index)
    snapshot = path.parent / "cache" / "snapshots" / "main"
    blobs = path.parent / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    cfg, loaded = model.load_hf(snapshot)
    assert cfg == CFG
    np.testing.assert_array_equal(loaded["embed"], params["embed"])


def test_one_file_wins_over_an_index(sharded, params):
    """As in transformers; else a checkpoint saved over a sharded one would be read as the old one."""
    path, index = sharded
    write_index(path, index)
    model.save_hf(CFG, params | {"norm": jnp.full(64, 7.0)}, path)
    assert model.load_hf(path)[1]["norm"][0] == 7


def test_damaged_checkpoints(saved):
    """A random change of any file: what is loaded has the config's shapes, all else is refused in one line."""
    rng, loaded, refused = random.Random(0), 0, 0
    files = {name: (saved / name).read_bytes() for name in ("config.json", "model.safetensors")}
    for _ in range(150):
        name = rng.choice(list(files))
        data = bytearray(files[name])
        end = len(data) if name == "config.json" else 8 + int.from_bytes(data[:8], "little")
        at = rng.randrange(end)
        data[at : at + rng.choice((1, 1, 4, 30))] = rng.choice(
            (b"", b"9", b"-", b"[", b'"', b"\xff", b"null", b"1e999")
        )
        (saved / name).write_bytes(data)
        try:
            cfg, found = model.load_hf(saved)
        except (CheckpointError, ConfigError) as error:
            assert is_one_line(error)
            refused += 1
        else:
            specs = param_specs(cfg)
            assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in jax.tree.leaves(specs)]
            loaded += 1
        (saved / name).write_bytes(files[name])
    assert loaded > 5 and refused > 50


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"n_shared_experts": 0}, "'n_shared_experts': only 1 is supported"),
        ({"num_hash_layers": 5}, "config field 'num_hash_layers': 5 would be read back as 1"),
    ],
)
def test_save_refuses_a_config_that_would_not_be_read_back(tmp_path, changes, problem):
    cfg = DSV4Config.tiny(layer_types=(AttentionType.SWA,), **changes)
    with pytest.raises(CheckpointError, match=problem):
        model.save_hf(cfg, model.init_params(cfg), tmp_path)
    assert not list(tmp_path.iterdir())


def test_save_refuses_foreign_dtypes(params, tmp_path):
    with pytest.raises(CheckpointError, match="norm: has dtype int32, expected float32"):
        model.save_hf(CFG, params | {"norm": jnp.ones(64, jnp.int32)}, tmp_path)
    with pytest.raises(CheckpointError, match="tensor a has dtype uint32, which safetensors files do not hold"):
        write_safetensors(tmp_path / "x", {"a": np.ones(1, np.uint32)})
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight has dtype float8_e4m3b11fnuz"):
        model.save_hf(CFG, params | {"norm": params["norm"].astype(jnp.float8_e4m3b11fnuz)}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_save_says_where_no_directory_can_be_made(params, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/x", "a" * 300, "a\0b"):
        with pytest.raises(FileError, match=r"file|aaa|a\\x00b"):
            model.save_hf(CFG, params, tmp_path / place)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


@pytest.mark.parametrize("weights", ["nope", None, 5, [1], np.int32, "RELEASED"], ids=str)
def test_weights_are_a_dtype_of_floats_or_released(saved, weights, nothing_is_made):
    with pytest.raises(ConfigError, match=r"'weights': expected a dtype of floats or 'released'"):
        model.load_hf(saved, weights=weights)


def test_a_checkpoint_is_replaced_whole_or_not_at_all(tmp_path):
    place = tmp_path / "x"
    write_safetensors(place, {"a": np.ones(2, np.float32)})
    mapped = read_safetensors(place)["a"]

    def fails():
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match="No space left"):
        write_safetensors(place, {"b": Later(np.dtype(np.float32), (3,), fails)})
    assert read_safetensors(place)["a"].tolist() == [1, 1]
    write_safetensors(place, {"a": np.zeros(0, np.float32)})
    assert mapped.tolist() == [1, 1] and [*tmp_path.iterdir()] == [place], "who has the old one mapped keeps it"


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(22, 6), (47, 6), (49, 32), (45, 26)])
def test_save_keeps_the_rotated_dims(tmp_path, head_dim, rope_dim):
    cfg = DSV4Config.tiny(layer_types=(AttentionType.SWA,), head_dim=head_dim, rope_dim=rope_dim, index_head_dim=64)
    model.save_hf(cfg, model.init_params(cfg), tmp_path)
    assert model.load_hf(tmp_path)[0] == cfg
