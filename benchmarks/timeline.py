"""When each kernel of a decode step starts and ends, and what the host does: whole layers, weights as released.

    python benchmarks/timeline.py --layers 12 --batch 1 --context 8192 \\
        --variant "default" --variant "latency key_split=latency" \\
        --variant "apart key_split=latency sequences=false" --variant "two xla_gpu_graph_min_graph_size=1"
    python benchmarks/timeline.py --devices 2 --layers 12 --json timeline.json

Each variant is a name and settings: fields of `StepOptions`, XLA options, `sequences` (false: every kernel a call of
its own), `early` (false: none starts before those before it have ended) or `lanes` (the most streams of a call); all
share one set of weights. With several devices there are two instead: heads split, one request; experts split, 64.

Of each: the step's and the host's times; then, from a profile with command buffers left on, the kernels of some layers
in order of their starts (start and end since the layer's first kernel, time, time since the last one's end, stream),
how long no kernel ran in the step, and the host's longest events. Of several devices also for how long exchanges ran,
for how long of it nothing else did (they wait for the other devices, which is in it), and what ran beside them. A layer
goes from one hyper-connection to that two on. Profiling costs time, so the profiled step is longer than the timed one,
and kernels that wait for the one before count that wait. --json keeps all of it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from harness import parser

from dsv4_jax import ops
from dsv4_jax.bench import model
from dsv4_jax.bench.model import mesh_of
from dsv4_jax.bench.step import StepOptions
from dsv4_jax.model import init_params
from dsv4_jax.ops import in_sequence, lanes

CALLS = 3  # under the profiler, one after the other; the last is shown
OF_BLOCK = "hyper_connection"  # what a block begins with
EXCHANGE = ("exchange_kernel", "nccl", "ncclDevKernel")
PROFILED = ("xla_enable_command_buffers_during_profiling", True)  # else XLA launches kernel by kernel under a profiler
WORDS = {"true": True, "false": False}
Kernel = tuple[float, float, str, str]  # start and end in us, name, stream


def variant(text: str, base: StepOptions) -> tuple[str, StepOptions, Callable[..., Any], int]:
    """Parses a variant: its name, options, what joins kernels, and how many streams a call may have."""
    name, *settings = text.split()
    joined = ops.in_sequence
    if "sequences=false" in settings:
        joined = lambda function, **_: function  # noqa: E731
    elif "early=false" in settings:
        joined = lambda function, **_: in_sequence(function, early=())  # noqa: E731
    fields = {field.name for field in dataclasses.fields(StepOptions)}
    own, xla, streams = {}, {}, lanes.MAX_LANES
    for key, _, value in (setting.partition("=") for setting in settings):
        if key == "lanes":
            streams = int(value)
        elif key in fields:
            own[key] = int(value) if value.isdigit() else value
        elif key not in ("sequences", "early"):
            xla[key] = WORDS.get(value, value)
    return name, dataclasses.replace(base, xla=tuple(xla.items()), **own), joined, streams


def read_trace(folder: pathlib.Path) -> tuple[dict[str, list[Kernel]], dict[str, list[float]]]:
    """Reads kernels of each device by start, and of each event of the host its durations in us."""
    kernels: dict[str, list[Kernel]] = collections.defaultdict(list)
    host: dict[str, list[float]] = collections.defaultdict(list)
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    if plane.name.startswith("/device:GPU"):
                        if line.name.startswith("Stream"):
                            end = event.start_ns + event.duration_ns
                            kernels[plane.name].append((event.start_ns / 1e3, end / 1e3, short(event.name), line.name))
                    elif plane.name.startswith("/host"):
                        host[event.name[:80]].append(event.duration_ns / 1e3)
    return {name: sorted(found) for name, found in sorted(kernels.items())}, host


def short(name: str) -> str:
    """Returns a kernel's name without what all of them have."""
    return name.removeprefix("void ").replace("dsv4::", "").replace("(anonymous namespace)::", "")[:60]


def idle(kernels: list[Kernel]) -> float:
    """Returns us between the first start and the last end in which no kernel ran."""
    total, end = 0.0, kernels[0][1]
    for start, stop, *_ in kernels:
        total += max(start - end, 0.0)
        end = max(end, stop)
    return total


def beside(kernels: list[Kernel]) -> dict[str, Any]:
    """Counts exchanges, us of them, us in which nothing else ran, and us of others beside them, by name."""
    total, alone, count = 0.0, 0.0, 0
    others: dict[str, float] = collections.defaultdict(float)
    for start, end, name, _ in kernels:
        if not name.startswith(EXCHANGE):
            continue
        count, total, covered = count + 1, total + end - start, start
        for first, last, other, _ in kernels:
            low, high = max(first, start), min(last, end)
            if low >= high or other.startswith(EXCHANGE):
                continue
            others[other] += high - low
            alone += max(low - covered, 0.0)
            covered = max(covered, high)
        alone += end - covered
    longest = dict(sorted(others.items(), key=lambda pair: -pair[1])[:8])
    return {"exchanges": count, "exchange_us": total, "alone_us": alone, "beside_us": longest}


def layers_of(kernels: list[Kernel], layers: int) -> list[list[Kernel]]:
    """Cuts the last call into layers: two hyper-connections each, and the head's."""
    starts = [i for i, kernel in enumerate(kernels) if OF_BLOCK in kernel[2]][-2 * layers - 1 :: 2]
    return [kernels[first:last] for first, last in itertools.pairwise(starts)]


def show(name: str, count: int, shown: list[int], folder: pathlib.Path) -> dict[str, Any]:
    """Prints what a trace of CALLS calls of `count` layers holds, and returns it."""
    devices, host = read_trace(folder)
    found: dict[str, Any] = {}
    for device, every in devices.items():
        layers = layers_of(every, count)
        call = [kernel for layer in layers for kernel in layer]
        if not call:
            continue
        took, each = call[-1][1] - call[0][0], " ".join(f"{layer[-1][1] - layer[0][0]:.0f}" for layer in layers)
        print(f"{name} {device}: {len(call)} kernels, {took:.0f} us, none ran for {idle(call):.0f} us; layers {each}")
        found[device] = {"us": took, "kernels": every}
        if len(devices) > 1:
            found[device] |= (exchanged := beside(call))
            print("  " + ", ".join(f"{what} {us}" for what, us in exchanged.items()))
        for index in (i for i in shown if i < len(layers) and device == min(devices)):
            print(f"  layer {index}")
            zero = before = layers[index][0][0]
            for start, end, kernel, stream in layers[index]:
                times = f"{start - zero:7.1f} {end - zero:7.1f} {end - start:6.1f} {start - before:+6.1f}"
                print(f"  {times} {stream:12.12} {kernel}")
                before = end
    for event in sorted(host, key=lambda event: -sum(host[event]))[:25]:
        print(f"  host {sum(host[event]) / CALLS:9.1f} us a call, {len(host[event]) / CALLS:5.1f} times, {event}")
        found[f"host {event}"] = [len(host[event]) / CALLS, sum(host[event]) / CALLS]
    return found


def cases(args: argparse.Namespace) -> list[tuple[str, StepOptions, Callable[..., Any], int]]:
    """Returns the variants that are profiled: name, options, what joins kernels, the most lanes."""
    context = args.context or (8192 if args.model != "tiny" else 200)
    base = StepOptions(args.model, args.batch, context, layers=args.layers)
    if args.devices == 1:
        return [variant(text, base) for text in args.variant or ["default"]]
    base = dataclasses.replace(base, devices=args.devices, brief=True)
    heads = dataclasses.replace(base, batch=1, tensor=args.devices, key_split="latency")
    rows = dataclasses.replace(base, batch=64 if args.model != "tiny" else 4)
    return [(name, each, ops.in_sequence, lanes.MAX_LANES) for name, each in {"heads": heads, "experts": rows}.items()]


def main() -> None:
    """Runs the command line."""
    command = parser(__doc__)
    command.add_argument("--model", default="flash")
    command.add_argument("--layers", type=int, default=12)
    command.add_argument("--devices", type=int, default=1)
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--context", type=int, help="(default: 8192, of the tiny model 200)")
    command.add_argument("--show", type=int, action="append", help="layers to list (default: 1, 6 and 7)")
    command.add_argument("--variant", action="append", default=[], metavar="'NAME SETTING=VALUE ...'")
    args = command.parse_args()
    found, longest, split = dict[str, Any](), model.longest_kernels, None
    params: Any = None

    def several(run: Callable[[], jax.Array], loop: int, keep: pathlib.Path | None) -> dict[str, Any]:
        return longest(lambda: [run() for _ in range(CALLS)][-1], CALLS * loop, keep)

    for name, options, joined, streams in cases(args):
        if options.split != split:
            split, params = options.split, None
            params = init_params(model.model_config(options), 0, "released", packed=True, mesh=mesh_of(options))
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(model, "longest_kernels", several))
            patched.enter_context(mock.patch.object(ops, "in_sequence", joined))
            patched.enter_context(mock.patch.object(lanes, "MOST", streams))
            folder = pathlib.Path(temporary)
            try:
                chosen = dataclasses.replace(options, profile=folder, xla=(*options.xla, PROFILED))
                report = model.measure_model(chosen, params, None)
            except Exception as error:  # one variant that XLA refuses must not cost the others
                print(f"== {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            said = ("step_ms", "dispatch_us", "first_dispatch_us", "launches", "kernel_ms")
            print(
                f"== {name} {options.xla} batch {options.batch} {options.key_split} loop {options.loop}: "
                f"{', '.join(f'{key} {report[key]}' for key in said)}",
                flush=True,
            )
            found[name] = report | show(name, report["layers"], args.show or [1, 6, 7], folder)
        if args.json:
            args.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
