"""Every picture, at sizes small and large: readable, nothing empty, legends beside the data, ticks in plain numbers."""

from __future__ import annotations

import json
import pathlib
import runpy

import matplotlib.colors
import numpy as np
import pytest

from dsv4_jax import CacheLayout, DSV4Config, plotting
from dsv4_jax.bench import plot as bench_plot
from dsv4_jax.bench.records import Measurement
from dsv4_jax.bench.shapes import CASES
from dsv4_jax.bench.timing import Ceilings
from dsv4_jax.capacity import capacity
from dsv4_jax.cli import main, plan
from dsv4_jax.errors import OptionError
from dsv4_jax.simulate import plot as simulate_plot

from . import pictures

H200 = Ceilings(copy=4.27e12, matmul=780e12)
SWAP = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "benchmarks" / "bench_swap.py"))


# The style


def test_series_differ_without_colours() -> None:
    looks = [plotting.look(i, markers=True) for i in range(24)]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 24
    assert len({str(look["linestyle"]) for look in looks[:4]}) == 4 and len({look["marker"] for look in looks[:6]}) == 6


def test_colours_differ_to_people_without_red_or_green_cones() -> None:
    """Simulated by Viénot's matrices (linear RGB, protan and deutan); distances in CIE Lab."""
    protan = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
    deutan = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])
    linear = np.array([matplotlib.colors.to_rgb(colour) for colour in plotting.COLOURS]) ** 2.2
    for seen in (linear, linear @ protan.T, linear @ deutan.T):
        lab = _lab(np.clip(seen, 0, 1))
        for i, one in enumerate(lab):
            assert all(np.linalg.norm(one - other) > 12 for other in lab[:i])


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(linear @ to_xyz.T / [0.9505, 1.0, 1.089]).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0"), (128, "128"), (1024, "1K"), (131072, "128K"), (1 << 20, "1M"), (100_000, "100,000")]
)
def test_tokens_are_said_as_people_say_them(count: int, said: str) -> None:
    assert plotting.binary(count) == said


def test_long_names_are_cut_and_formulas_are_text() -> None:
    with plotting.style():
        figure = plotting.figure("/a/path/" * 40, "$\\frac{$" * 40, 3)
        axes = figure.subplots()
        axes.plot([1, 2], [1, 2])
        axes.set_title("a")
    shown = pictures.words(figure)
    assert any(word.startswith("/a/path/") and len(word) <= 80 for word in shown)
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)


def test_the_same_picture_is_the_same_file(tmp_path: pathlib.Path) -> None:
    for name in ("a.svg", "b.svg"):
        plotting.save(plan.picture(_plan("flash", "80GiB"), "flash"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "V4-Flash: what fits in 80 GiB of cache" in (tmp_path / "a.svg").read_text()


# plan


def _plan(model: str, memory: str, **what: int):
    layout = CacheLayout(getattr(DSV4Config, model)(), "fp8", "fp4")
    return capacity(layout, hbm_bytes=int(float(memory[:-3]) * 2**30), **(what or {"max_context": 128 * 1024}))


@pytest.mark.parametrize(
    ("model", "memory", "what"),
    [
        ("flash", "80GiB", {"max_context": 128 * 1024}),
        ("pro", "3GiB", {"max_context": 100_000}),
        ("flash", "80GiB", {"max_context": 1 << 20}),
        ("flash", "1GiB", {"max_context": 128}),
        ("tiny", "0.001GiB", {"max_requests": 2}),
        ("tiny", "80GiB", {"max_requests": 4}),
    ],
)
def test_plan(model: str, memory: str, what: dict[str, int]) -> None:
    answer = _plan(model, memory, **what)
    figure = plan.picture(answer, model)
    pictures.check(figure)
    shown = pictures.words(figure)
    size = {"80GiB": "80 GiB", "3GiB": "3 GiB", "1GiB": "1 GiB", "0.001GiB": "1.02 MiB"}[memory]
    assert f"{plotting.model_title(model)}: what fits in {size} of cache" in shown
    assert f"this plan: {answer.full_requests:,} requests of {plotting.binary(answer.max_context)} tokens" in shown
    if model == "flash" and memory == "80GiB":
        assert {"128", "1K", "128K", "1M", "1,000"} <= set(shown)


def test_a_plan_with_weights_is_titled_by_what_they_leave() -> None:
    """And over several ranks each point is what this plan would be at that context."""
    answer = _plan("flash", "240GiB", max_context=128 * 1024, weight_bytes=145 << 30)
    shown = pictures.words(plan.picture(answer, "flash", num_snapshots=0))
    assert "V4-Flash: what fits in 95 GiB of cache" in shown
    assert any("145 GiB of the 240 GiB are weights" in word for word in shown)
    ranks = _plan("flash", "10GiB", max_context=1 << 20, pool_ranks=2, num_snapshots=0)
    axes = plan.picture(ranks, "flash", num_snapshots=0).axes[0]
    assert dict(zip(*axes.lines[0].get_data(), strict=True))[1 << 20] == ranks.max_requests


# simulate


CHATS = "chats=12,seed=2,system=300,question=60,answer=40,turns=3,tenants=2,rate=4,pause=1"
POLICIES = ("none", "write_back", "write_through")
SIMULATED = {
    "one": ["--blocks", "40", "--snapshots", "6", "--bound"],
    "with a host": ["--blocks", "40", "--snapshots", "6", "--host", "1MiB", "--bound"],
    "nothing evicted": ["--blocks", "4000", "--snapshots", "400"],
    "several": ["--blocks", "40", *(word for name in POLICIES for word in ("--compare", f"{name}: --policy {name}"))],
}


@pytest.mark.parametrize("name", SIMULATED)
def test_simulate(capsys: pytest.CaptureFixture[str], name: str) -> None:
    argv = ["simulate", "--generate", CHATS, "--model", "tiny", "--max-requests", "4", *SIMULATED[name], "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    figure = simulate_plot.picture(result)
    pictures.check(figure)
    shown = pictures.words(figure)
    assert any(word.startswith("Tiny model: ") for word in shown)
    assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
    hits, pools = figure.axes[:2]
    assert hits.get_ylim() == (0, 100) and (name == "several" or pools.get_ylim() == (0, 102))
    if name == "nothing evicted":
        assert "Evicted" not in shown and "Time to the first token (nothing was evicted)" in shown
    if name == "several":
        for run in result["runs"]:
            assert any(word.startswith(f"{run['name']}: ") for word in pictures.labels(figure))


# bench


def _measured(share: float = 0.5) -> list[Measurement]:
    """Every case of the benchmark, by two implementations."""
    found = []
    for case in CASES:
        for batch in case.batches[:2]:
            shape = case.make(batch)
            floor = H200.floor_us(shape.bytes_moved, shape.flops)
            for i, name in enumerate(("cuda", "xla")):
                found.append(
                    Measurement(
                        case.op,
                        case.name,
                        batch,
                        name,
                        bytes=shape.bytes_moved,
                        flops=shape.flops,
                        floor_us=floor,
                        us=floor / share * (1 + i),
                    )
                )
    return found


@pytest.mark.parametrize("op", [None, "attend", "append", "compress_csa"])
@pytest.mark.parametrize("quick", [False, True])
def test_bench(op: str | None, quick: bool) -> None:
    records = [r for r in _measured() if op in (None, r.op)]
    figure = bench_plot.picture(records, None if quick else H200, device="NVIDIA H200")
    pictures.check(figure)
    shown = pictures.words(figure)
    assert any("NVIDIA H200" in word for word in shown)
    assert any("%" in word for word in shown) is not quick
    # No roofline where nothing multiplies.
    assert len(figure.axes) == (2 if any(r.flops for r in records) and not quick else 1)
    assert set(pictures.labels(figure)) >= ({"cuda", "xla"} if quick else {"cuda"})


def test_bench_without_floors_draws_times() -> None:
    figure = bench_plot.picture([Measurement("top_k", "x", 4, "xla", us=3.0)], H200, device="cpu")
    pictures.check(figure)
    assert not any("%" in word for word in pictures.words(figure))


def test_bench_of_nothing() -> None:
    with pytest.raises(OptionError, match="nothing was measured"):
        bench_plot.picture([Measurement("top_k", "x", 4, "xla")], H200, device="cpu")


# benchmarks/bench_swap.py


@pytest.mark.parametrize("quick", [False, True])
def test_swap(quick: bool) -> None:
    names, sizes = ("ours", "xla", "launch per layer and leaf", "memcpy per piece"), (1, 16, 64, 256, 1024)
    rows = [
        {"name": name, "direction": way, "blocks": blocks, "ids": ids, "gb_per_s": 50 / (1 + i) * blocks / (blocks + 4)}
        for i, name in enumerate(names)
        for way in ("out", "in")
        for ids in ("scattered", "consecutive")
        for blocks in sizes
        if name != "xla" or (ids == "scattered" and blocks < 500)
    ]
    rows.append({"name": "never ran", "direction": "out", "blocks": 1, "ids": "scattered", "gb_per_s": None})
    report = {
        "device": "NVIDIA H200",
        "model": "flash",
        "record_bytes": 450_048,
        "ceiling": "a copy of 256 MiB",
        "ceiling_bytes_per_s": {"out": 55.4e9, "in": 55.5e9},
        "rows": rows,
        "quick": quick,
    }
    figure = SWAP["picture"](report)
    pictures.check(figure)
    shown = pictures.words(figure)
    assert "V4-Flash: blocks to host memory and back" in shown and {"16", "256", "1,024"} <= set(shown)
    assert not any("never ran" in word for word in shown) and ("ceiling" in shown) is not quick
    out, in_ = figure.axes
    assert out.get_ylim() == in_.get_ylim() and out.get_ylim()[0] == 0
