"""The block swap against the copy ceiling of the same run, and against the schemes it replaces.

    python benchmarks/bench_swap.py                        # on a GPU, with csrc/ built: a minute or two
    python benchmarks/bench_swap.py --json swap.json --plot swap.png
    python benchmarks/bench_swap.py --quick                # tiny sizes, any backend: does it run?
    python benchmarks/bench_swap.py --sizes 16,256 --only ours,step

A block record of DeepSeek-V4 Flash is 450,048 bytes in 165 pieces. First printed is the prediction: bytes over the
ceiling, which is one contiguous copy between pinned memory and the device (without nvcc: one device_put). Then, for
each direction, number of blocks, and scattered or consecutive ids:

    ours   swap_out/swap_in, one native call (`ffi`); calls in a row, one wait at the end, so that a small swap may be
           limited by dispatch: `latency` is one call and its wait, `kernel` what the profiler says of the kernel
    xla    the same from plain XLA operations
    memcpy per piece           a cudaMemcpyAsync for every layer and leaf of every block
    launch per layer and leaf  FastDeploy's scheme: one warp a block piece, 8-byte accesses; consecutive ids by memcpy

and last a step of bandwidth-bound matrix products with 8 blocks out, in, or both: staged (`tiers.overlapped_swap`),
so that the copy overlaps, or swapped in place, so that it does not. What was copied is compared byte by byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import dsv4_jax as dsv4
from dsv4_jax.bench.timing import profiled
from dsv4_jax.cli.values import picture_file
from dsv4_jax.plan import SwapPlan
from dsv4_jax.plotting import LIMIT, figure, legend_below, look, model_title, save, style, tick
from dsv4_jax.records import block_record
from dsv4_jax.tiers import record_copy, swap
from dsv4_jax.tiers.overlapped_swap import gather_from_host, pack_blocks, scatter_to_host, unpack_blocks

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import swap_baselines
from harness import Recorder, jax_device, parser

TARGETS = {16: 0.70, 64: 0.70, 256: 0.90, 1024: 0.90}  # blocks -> share of the ceiling
STEP_TARGET = 0.03
PARTS = ("ours", "xla", "baselines", "step")
STEP_BLOCKS = 8
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

swap_out = jax.jit(swap.swap_out, donate_argnums=1, static_argnames="implementation")
swap_in = jax.jit(swap.swap_in, donate_argnums=0, static_argnames="implementation")
commit = jax.jit(scatter_to_host, donate_argnums=0, static_argnames="implementation")


@jax.jit
def blocks_and_records(cache: dsv4.KVCache, host: dsv4.HostCache, plan: SwapPlan) -> tuple[jax.Array, jax.Array]:
    """What a plan names on both sides, in device memory: a NumPy view of pinned memory would forbid donating it."""
    records = jax.device_put(gather_from_host(host, plan, implementation="xla"), DEVICE)
    return pack_blocks(cache, plan, implementation="xla"), records


@dataclasses.dataclass
class Row:
    """One measurement. `seconds` per swap; `ratio`: of the ceiling; `problem` instead of numbers."""

    name: str
    direction: str
    blocks: int
    ids: str
    seconds: float | None = None
    gb_per_s: float | None = None
    ratio: float | None = None
    target: float | None = None
    latency: float | None = None
    kernel: float | None = None  # seconds
    problem: str | None = None


@dataclasses.dataclass
class Bench:
    """Holds the arrays that all cases share, and the rows so far."""

    cache: dsv4.KVCache
    host: dsv4.HostCache
    pool: int
    budget: float  # seconds a measurement
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)  # direction -> bytes a second
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def record_bytes(self) -> int:
        return self.host.pages.shape[1]

    def ids(self, blocks: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns distinct device and host ids, int32 [blocks]."""
        if kind == "consecutive":
            return np.arange(1, blocks + 1, dtype=np.int32), np.arange(
                self.pool - blocks + 1, self.pool + 1, dtype=np.int32
            )
        rng = np.random.default_rng(blocks)
        device, host = (1 + rng.permutation(self.pool)[:blocks].astype(np.int32) for _ in range(2))
        return device, host

    def add(self, row: Row) -> None:
        if row.seconds is not None:
            row.gb_per_s = row.blocks * self.record_bytes / row.seconds / 1e9
            row.ratio = row.gb_per_s * 1e9 / self.ceilings[row.direction]
            row.target = TARGETS.get(row.blocks) if row.name == "ours" else None
        self.rows.append(row)
        said = row.problem or f"{row.gb_per_s:7.2f} GB/s {row.ratio:6.1%} of the ceiling" + (
            f" (target {row.target:.0%})" if row.target else ""
        )
        late = f", latency {row.latency * 1e6:.0f} us" if row.latency else ""
        if row.kernel:
            share = row.blocks * self.record_bytes / row.kernel / self.ceilings[row.direction]
            late += f", kernel {row.kernel * 1e6:.0f} us ({share:.1%})"
        print(f"{row.direction:3} {row.blocks:5} {row.ids:11} {row.name:26} {said}{late}", flush=True)


def make(model: str, pool: int, budget: float) -> Bench:
    layout = dsv4.CacheLayout(getattr(dsv4.DSV4Config, model)())
    size = dsv4.CacheSize(num_blocks=pool, num_slots=1, max_blocks_per_request=1)
    rng, arrays = np.random.default_rng(0), {}
    for leaf in layout.leaves:
        # Random bytes, so that a copy of the wrong block shows; committed, as records are (see tiers/swap.py).
        rows, width = layout.leaf_shape(leaf, size)
        data = rng.integers(0, 256, (rows, width * np.dtype(leaf.dtype).itemsize), np.uint8)
        arrays[leaf.name] = jax.device_put(data.view(leaf.dtype), jax.devices()[0])
    cache = dsv4.KVCache(arrays, layout)
    return Bench(cache, dsv4.init_host_cache(layout, pool), pool, budget)


def timed(call: Callable[[], object], budget: float) -> tuple[float, float]:
    """Returns seconds a call when called in a row, and of one call with its wait: medians of three."""

    def run(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n - 1):
            call()
        jax.block_until_ready(call())
        return (time.perf_counter() - start) / n

    run(2)
    latency = statistics.median(run(1) for _ in range(3))
    n = int(min(200, max(1, budget / 3 / latency)))
    return statistics.median(run(n) for _ in range(3)), latency


def kernel_seconds(call: Callable[[], object], calls: int = 5) -> float | None:
    """Returns the device seconds of a call's swap kernel; None where the profiler sees none."""

    def several() -> object:
        for _ in range(calls - 1):
            call()
        return call()

    times = profiled(several)
    return sum(us for name, us in times.items() if "swap_kernel" in name) / calls / 1e6 or None


def measure_ceiling(bench: Bench, baselines: swap_baselines.Baselines | None, size: int) -> str:
    """Fills `bench.ceilings`; says how."""
    if baselines is not None:
        for direction in ("out", "in"):
            bench.ceilings[direction] = size / baselines.ceiling(direction, size)
        return f"cudaMemcpyAsync of {size >> 20} MiB"
    device = bench.host.pages.sharding.with_memory_kind("device")
    x = jax.block_until_ready(jax.device_put(np.ones(size, np.uint8), device))
    for direction, target in (("out", bench.host.pages.sharding), ("in", device)):
        source = x if direction == "out" else jax.device_put(x, bench.host.pages.sharding)
        call = functools.partial(jax.device_put, source, target, may_alias=False)
        bench.ceilings[direction] = size / timed(call, bench.budget)[1]
    return f"device_put of {size >> 20} MiB (allocation included)"


def predict(bench: Bench, sizes: list[int]) -> list[dict]:
    """Prints what each swap must take if only the ceiling limits it."""
    out = []
    for blocks in sizes:
        total = blocks * bench.record_bytes
        floors = {f"{way}_us": total / rate * 1e6 for way, rate in bench.ceilings.items()}
        out.append({"blocks": blocks, "bytes": total, **floors})
        floors_us = f"out >= {floors['out_us']:9.1f} us, in >= {floors['in_us']:9.1f} us"
        print(f"predicted {blocks:5} blocks {total:12,} bytes: {floors_us}")
    return out


def check(bench: Bench, plan: SwapPlan, what: str) -> None:
    """Compares the host records of a plan with the blocks they were made of."""
    want, got = map(np.asarray, blocks_and_records(bench.cache, bench.host, plan))
    if not np.array_equal(want, got):
        raise SystemExit(f"{what}: wrong bytes")


def measure_ours(bench: Bench, implementation: Literal["ffi", "xla"], blocks: int, kind: str) -> None:
    name = "ours" if implementation == "ffi" else "xla"
    plan = SwapPlan(*bench.ids(blocks, kind))

    def go_out() -> jax.Array:
        bench.host = swap_out(bench.cache, bench.host, plan, implementation=implementation)
        return bench.host.pages

    def go_in() -> dsv4.KVCache:
        bench.cache = swap_in(bench.cache, bench.host, plan, implementation=implementation)
        return bench.cache

    go_out()
    check(bench, plan, f"{name} out")
    for direction, call in (("out", go_out), ("in", go_in)):
        seconds, latency = timed(call, bench.budget)
        kernel = kernel_seconds(call) if implementation == "ffi" and jax.default_backend() == "gpu" else None
        bench.add(Row(name, direction, blocks, kind, seconds, latency=latency, kernel=kernel))
    check(bench, plan, f"{name} in")


def measure_baselines(bench: Bench, baselines: swap_baselines.Baselines, blocks: int, kind: str) -> None:
    device, host = bench.ids(blocks, kind)
    for scheme in swap_baselines.SCHEMES:
        for direction in ("out", "in"):
            bench.add(Row(scheme, direction, blocks, kind, baselines.swap(scheme, direction, device, host)))
        record = np.asarray(pack_blocks(bench.cache, SwapPlan(device[:1], host[:1]), implementation="xla"))[0]
        want = b"".join(
            record[p.offset + layer * p.stride :][: p.bytes].tobytes()
            for p in block_record(bench.cache.layout).pieces
            for layer in range(p.layers)
        )
        if baselines.record(int(host[0])) != want:
            raise SystemExit(f"{scheme}: wrong bytes")


def executable_memory(bench: Bench, implementation: Literal["ffi", "xla"]) -> dict[str, dict[str, int]]:
    """Returns what XLA says of the two executables: every byte of the destination aliased, no temporary of its size."""
    plan = SwapPlan(*bench.ids(STEP_BLOCKS, "scattered"))
    out: dict[str, dict[str, int]] = {}
    for name, call in (("swap_out", swap_out), ("swap_in", swap_in)):
        lowered = call.lower(bench.cache, bench.host, plan, implementation=implementation)
        stats = lowered.compile().memory_analysis()
        fields = ("alias_size_in_bytes", "host_alias_size_in_bytes", "temp_size_in_bytes", "host_temp_size_in_bytes")
        out[name] = {field: int(getattr(stats, field, -1)) for field in fields}
    out["expected"] = {
        "host_pool": bench.host.pages.nbytes,
        "cache": sum(x.nbytes for x in bench.cache.arrays.values()),
    }
    return out


def steps(
    bench: Bench, implementation: Literal["ffi", "xla"], width: int, layers: int, repeat: int
) -> Iterator[tuple[str, float]]:
    """Yields (name, seconds) of a decode-like step: one plain, then with 8 blocks moved in several ways."""
    weights = jax.jit(lambda: jnp.full((layers, width, width), 1e-3, jnp.bfloat16))()
    plan = SwapPlan(*bench.ids(STEP_BLOCKS, "scattered"))
    choose: dict[str, Literal["ffi", "xla"]] = {"implementation": implementation}

    def compute(x: jax.Array, weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jax.lax.fori_loop(0, repeat, lambda _, x: jax.lax.scan(layer, x, weights)[0], x)

    # Every step takes and gives the cache and the records, both donated, as a decode step does.
    def plain(x, weights, cache, host, staged):
        return compute(x, weights), cache, host, None

    def staged_out(x, weights, cache, host, staged):
        return (
            compute(x, weights),
            cache,
            host,
            jax.device_put(pack_blocks(cache, plan, **choose), HOST),
        )

    def staged_in(x, weights, cache, host, staged):
        return (
            compute(x, weights),
            unpack_blocks(cache, jax.device_put(staged, DEVICE), plan, **choose),
            host,
            None,
        )

    def staged_both(x, weights, cache, host, staged):
        away = jax.device_put(pack_blocks(cache, plan, **choose), HOST)
        return (
            compute(x, weights),
            unpack_blocks(cache, jax.device_put(staged, DEVICE), plan, **choose),
            host,
            away,
        )

    def swapped_out(x, weights, cache, host, staged):
        return compute(x, weights), cache, swap.swap_out(cache, host, plan, **choose), None

    staged = jax.block_until_ready(jax.jit(functools.partial(gather_from_host, **choose))(bench.host, plan))
    x = jnp.ones((64, width), jnp.bfloat16)
    made = {
        "plain": plain,
        "8 out, staged": staged_out,
        "8 in, staged": staged_in,
        "8 out and 8 in, staged": staged_both,
        "8 out, staged and committed": staged_out,
        "8 out, in place": swapped_out,
    }
    compiled = {f: jax.jit(f, donate_argnums=(2, 3)) for f in made.values()}
    samples: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(3):  # rounds, so that a drift of the clocks meets all alike
        for name, function in made.items():

            def call(name: str = name, function: Callable = function) -> object:
                out, bench.cache, bench.host, away = compiled[function](x, weights, bench.cache, bench.host, staged)
                if name.endswith("committed"):
                    bench.host = commit(bench.host, away, plan, **choose)
                return out, away, bench.host.pages

            samples[name].append(timed(call, bench.budget)[0])
    yield from ((name, statistics.median(taken)) for name, taken in samples.items())


def measure_steps(bench: Bench, implementation: Literal["ffi", "xla"], quick: bool) -> list[dict]:
    # 4 GiB of weights, read twice: some milliseconds on an H200.
    out: list[dict] = []
    for name, seconds in steps(bench, implementation, *((64, 2, 1) if quick else (8192, 32, 2))):
        more = seconds / out[0]["seconds"] - 1 if out else 0.0
        out.append({"step": name, "seconds": seconds, "more": more})
        goal = f" (target <= {STEP_TARGET:.0%})" if name == "8 out, staged" else ""
        print(f"step {name:28} {seconds * 1e3:9.3f} ms {more:+7.1%}{goal}", flush=True)
    return out


def run(args: argparse.Namespace, folder: pathlib.Path) -> dict:
    bench = make(args.model, args.pool, args.budget)
    problem = swap_baselines.why_not()
    pieces = block_record(bench.cache.layout).pieces
    baselines = None
    if problem is None:
        leaves = tuple(bench.cache.arrays[piece.leaf.name] for piece in pieces)
        baselines = swap_baselines.Baselines(folder, leaves, pieces, args.pool + 1)
    how = measure_ceiling(bench, baselines, args.ceiling_mib << 20)
    rates = ", ".join(f"{way} {rate / 1e9:.2f} GB/s" for way, rate in bench.ceilings.items())
    print(f"{jax.devices()[0].device_kind}, ceiling ({how}): {rates}; record {bench.record_bytes:,} bytes")
    report: dict = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": args.model,
        "quick": args.quick,
        "record_bytes": bench.record_bytes,
        "ceiling": how,
        "ceiling_bytes_per_s": bench.ceilings,
        "predicted": predict(bench, args.sizes),
    }
    native = True
    try:
        record_copy.choose_implementation("ffi")
    except dsv4.errors.ImplementationError as error:
        native = False
        print(f"ours: not here: {error}")
    # The baselines hold pointers into the leaves: they go before anything is donated.
    for blocks in args.sizes if "baselines" in args.only else ():
        for kind in ("scattered", "consecutive"):
            if baselines is not None:
                measure_baselines(bench, baselines, blocks, kind)
            else:
                for scheme in swap_baselines.SCHEMES:
                    bench.add(Row(scheme, "out", blocks, kind, problem=problem))
    if baselines is not None:
        baselines.close()
    for blocks in args.sizes:
        for kind in ("scattered", "consecutive"):
            if "ours" in args.only and native:
                measure_ours(bench, "ffi", blocks, kind)
        if "xla" in args.only and blocks <= args.xla_blocks:
            measure_ours(bench, "xla", blocks, "scattered")
    choice = "ffi" if native else "xla"
    report["memory"] = executable_memory(bench, choice)
    print("memory:", report["memory"])
    report["steps"] = measure_steps(bench, choice, args.quick) if "step" in args.only else []
    report["rows"] = [dataclasses.asdict(row) for row in bench.rows]
    return report


def write_record(report: dict, path: pathlib.Path | None) -> None:
    """Writes the record of a run: the swaps, and what a step takes more for its blocks."""
    rates = {f"copy_{way}_gb_per_s": rate / 1e9 for way, rate in report["ceiling_bytes_per_s"].items()}
    recorder = Recorder(
        path, **jax_device(), ceilings=rates, quick=report["quick"], note=f"Ceiling: {report['ceiling']}."
    )
    for row in report["rows"]:
        moved = row["blocks"] * report["record_bytes"] / report["ceiling_bytes_per_s"][row["direction"]]
        us = {name: 1e6 * row[name] if row[name] else None for name in ("seconds", "latency", "kernel")}
        recorder.add(
            "swap",
            blocks=row["blocks"],
            ids=row["ids"],
            direction=row["direction"],
            implementation=row["name"],
            us=us["seconds"],
            latency_us=us["latency"],
            kernel_us=us["kernel"],
            gb_per_s=row["gb_per_s"],
            of_copy=row["ratio"],
            required_of_copy=row["target"],
            problem=row["problem"],
            kernel_of_copy=moved / row["kernel"] if row["kernel"] else None,
        )
    for step in report["steps"][1:]:
        limit = 100 * STEP_TARGET if step["step"] == "8 out, staged" else None
        recorder.fact("swap", f"a step with {step['step']}, longer by", 100 * step["more"], "%", at_most=limit)


def draw(report: dict, path: pathlib.Path) -> None:
    """Draws GB/s over blocks, one panel a direction. Raises `FileError`."""
    save(picture(report), path)


def picture(report: dict) -> Any:
    """Draws a `matplotlib.figure.Figure`: a colour a scheme; scattered ids solid, consecutive ones dashed.

    A quick run has no ceiling: at its sizes a copy says nothing.
    """
    timed = [row for row in report["rows"] if row["gb_per_s"]]
    names = list(dict.fromkeys(row["name"] for row in timed))
    sizes = sorted({row["blocks"] for row in timed})
    with style():
        ceiling = "tiny sizes: does it run?" if report["quick"] else f"ceiling: {report['ceiling']}"
        detail = f"{report['device']}; records of {report['record_bytes']:,} bytes; {ceiling}"
        made = figure(f"{model_title(report['model'])}: blocks to host memory and back", detail, 4.6)
        panels = made.subplots(1, 2, sharey=True)
        for axes, way, title in zip(panels, ("out", "in"), ("Out: device to host", "In: host to device"), strict=True):
            if not report["quick"]:
                axes.axhline(report["ceiling_bytes_per_s"][way] / 1e9, color=LIMIT, linewidth=1.2, label="ceiling")
            for i, name in enumerate(names):
                for kind, line in (("scattered", "-"), ("consecutive", (0, (4, 1.5)))):
                    points = [
                        (row["blocks"], row["gb_per_s"])
                        for row in timed
                        if (row["name"], row["direction"], row["ids"]) == (name, way, kind)
                    ]
                    if points:
                        label, shape = f"{name}, {kind}", look(i, markers=True) | {"linestyle": line}
                        axes.plot(*zip(*sorted(points), strict=True), **shape, label=label)
            axes.set(
                xscale="log",
                xlabel="blocks of a swap",
                title=title,
            )
            tick(axes.xaxis, sizes)
        panels[0].set(ylabel="GB/s", ylim=(0, None))
        legend_below(made, panels)
    return made


def main(argv: list[str] | None = None) -> dict:
    command = parser(__doc__)
    sizes = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    command.add_argument("--sizes", type=sizes, default=[1, 16, 64, 256, 1024], help="blocks a swap: 1,16,64,256,1024")
    command.add_argument("--model", choices=("flash", "pro", "tiny"), default="flash")
    command.add_argument("--pool", type=int, default=2048, help="blocks on the device, and records on the host")
    command.add_argument("--ceiling-mib", type=int, default=256, help="size of the ceiling's copy")
    command.add_argument("--budget", type=float, default=0.6, help="seconds a measurement, about")
    command.add_argument("--xla-blocks", type=int, default=256, help="most blocks for the XLA form, which is slow")
    command.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    command.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    command.add_argument("--plot", type=picture_file, help="where to write a picture (needs matplotlib)")
    args = command.parse_args(argv)
    if args.quick:
        args.sizes, args.pool, args.ceiling_mib, args.budget = [1, 8], 16, 1, 0.003
    if unknown := set(args.only) - set(PARTS):
        command.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if max(args.sizes) > args.pool or min(args.sizes) < 1 or args.pool < STEP_BLOCKS:
        command.error(f"sizes must be in 1..{args.pool} (--pool, at least {STEP_BLOCKS})")
    with tempfile.TemporaryDirectory() as folder:
        report = run(args, pathlib.Path(folder))
    write_record(report, args.json)
    if args.plot:
        draw(report, args.plot)
    return report


if __name__ == "__main__":
    main()
