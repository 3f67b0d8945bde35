"""What README and docstrings promise, held against the code."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
import re
import shlex
import tomllib

import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager, errors, init_cache
from dsv4_jax.cli import _COMMANDS, _arguments
from dsv4_jax.errors import LayoutError, PlanError, PoolError
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.allocator import BlockAllocator

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
SIZE = CacheSize(num_blocks=3, num_slots=2, max_blocks_per_request=2)


# The pages


def test_a_short_readme() -> None:
    assert README.count("\n") < 150


def test_memory_table() -> None:
    rows = re.findall(r"^\| (Flash|Pro), `(\w+)` / `(\w+)` \| (.*) \|$", FORMATS, re.M)
    assert len(rows) == 6
    for model, kv, index, cells in rows:
        layout = CacheLayout(getattr(DSV4Config, model.lower())(), kv, index)
        paged = layout.bytes_per_token
        assert cells.split(" | ") == [
            f"{paged:,.2f}",
            f"{paged * 2**17 / 2**20:,.0f} MiB",
            f"{paged * 2**20 / 2**30:.3f} GiB",
            f"{layout.window_bytes_per_request / 2**20:.3f} MiB",
            f"{layout.state_bytes_per_request / 2**20:.3f} MiB",
        ]


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    (more,) = re.findall(r"Further extras: ([^.]*)\.", page)
    named = re.findall(r"'\.\[(\w+)\]'", page) + re.findall(r"`(\w+)`", more)
    assert set(named) == set(extras)


def test_commands_are_understood(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "FILE", "trace.jsonl", "tokens.npy"):
        (tmp_path / name).touch()
    commands = re.findall(r"^(?:\$ )?(?:python -m dsv4_jax|dsv4-jax) (.*)", re.sub(r"\\\n", " ", PAGES), re.M)
    assert len(commands) > 8
    for command in commands:
        _arguments(shlex.split(command, comments=True))
    assert {shlex.split(command)[0] for command in commands} <= set(_COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_all_take_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        _arguments([command, "--help"])
    assert done.value.code == 0 and "--json" in capsys.readouterr().out


def test_programs_exist() -> None:
    for program in re.findall(r"^\$ python (\S+\.py)", PAGES, re.M):
        assert (ROOT / program).is_file(), program
    for path in re.findall(r"`((?:dsv4_jax|csrc|docs|examples|benchmarks|tests)/[\w./]+)`", PAGES):
        assert (ROOT / path).exists(), path


# The layout


def test_a_layout_is_immutable() -> None:
    layout = CacheLayout(DSV4Config.tiny())
    for name in ("block_tokens", "cfg", "leaves", "new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, name, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del layout.block_tokens
    for twin in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
        assert twin == layout and hash(twin) == hash(layout) and twin.leaves == layout.leaves


def test_errors_are_copied_and_pickled_as_they_are() -> None:
    for error in (
        errors.PeerError("them", "gone"),
        errors.RecordMismatchError("them", [3], [13]),
        errors.ContextLimitError("r", 9, 8),
        errors.TraceError("no tokens", "a.jsonl", 3),
        errors.FileError("no such file"),
        errors.OutOfBlocksError(3, 1, 8),
    ):
        for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(twin) is type(error) and str(twin) == str(error) and vars(twin) == vars(error)


@pytest.mark.parametrize("name", [[], {}, None, 1, np.array(["fp8"]), "FP8"], ids=lambda name: type(name).__name__)
def test_formats_of_odd_types(name) -> None:
    for option in ("kv_format", "index_format"):
        with pytest.raises(LayoutError, match=r"unknown .* format"):
            CacheLayout(DSV4Config.tiny(), **{option: name})


@pytest.mark.parametrize("flag", [None, 1, "no"], ids=repr)
def test_whether_mtp_layers_are_included_is_a_bool(flag) -> None:
    assert CacheLayout(DSV4Config.tiny(), include_drafts=np.True_).include_drafts is True
    with pytest.raises(LayoutError, match="include_drafts must be True or False"):
        CacheLayout(DSV4Config.tiny(), include_drafts=flag)


# The manager


@pytest.mark.parametrize("count", [-1, 1.0, True, "1", float("nan"), 2**40], ids=str)
def test_counts_of_a_pinned_shape(count) -> None:
    manager = KVCacheManager(CacheLayout(DSV4Config.tiny()), SIZE)
    for name in ("sequences", "tokens", "steps", "columns", "slot_copies", "block_copies"):
        with pytest.raises(PlanError):
            manager.pinned_shape(**dict(sequences=1) | {name: count})
    with pytest.raises(PlanError):
        StepShape.bound(manager.layout, count, 1, columns=1)
    assert manager.pinned_shape(np.int32(2), np.uint8(4)) == manager.pinned_shape(2, 4)
    assert all(type(n) in (int, bool) for n in dataclasses.astuple(manager.pinned_shape(np.int32(2), np.uint8(4))))


@pytest.mark.parametrize("ids", [5, None, np.array(1), 1.5], ids=repr)
def test_what_is_released_are_ids(ids) -> None:
    pool = BlockAllocator(3)
    pool.acquire(2)
    with pytest.raises(PoolError, match="not a list of ids"):
        pool.release(ids)
    assert pool.num_free == 1


# Layers of the cache


def test_layers_without_entries_say_so() -> None:
    layout = CacheLayout(DSV4Config.tiny())
    manager = KVCacheManager(layout, SIZE)
    plan = manager.plan_step([(manager.admit_request([1]), 1)])
    step = init_cache(layout, SIZE).begin(plan)
    swa = next(layer for layer in layout.schedule if not layout.cfg.ratio(layer.attn)).layer_idx
    handle = step.layer(swa)
    for call in (
        handle.visible_entries,
        handle.gather_all_compressed,
        lambda: handle.entry_rows(np.zeros((1, 1), np.int32)),
    ):
        with pytest.raises(LayoutError, match="is SWA: it has no compressed entries"):
            call()
