"""When each kernel of a decode step starts and ends, and what the host does: whole layers, weights as released.

    python benchmarks/step_timeline.py --layers 12 --batch 1 --context 8192 \\
        --variant "default" --variant "latency key_split=latency" \\
        --variant "apart key_split=latency sequences=false" --variant "two xla_gpu_graph_min_graph_size=1"

Each variant is a name and settings: fields of `StepOptions`, XLA options, `sequences` (false: every kernel a call of
its own), `early` (false: none starts before those before it have ended) or `lanes` (the most streams of a call). All
share one set of weights. Of each: the step's and the host's times; then, from a profile with command buffers left on,
the kernels of one layer in order of their starts (start and end since the layer's first kernel, time, time since the
last one's end, stream), how long no kernel ran in the step, and the host's longest events by name. A layer goes from
one hyper-connection to that two on. Profiling costs time, so the profiled step is longer than the timed one, and
kernels that wait for the one before count that wait. --json keeps all of it.
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

from dsv4_jax import ops
from dsv4_jax.bench import model
from dsv4_jax.bench.step import StepOptions
from dsv4_jax.model import init_params
from dsv4_jax.ops import in_sequence, lanes

CALLS = 3  # under the profiler, one after the other; the last is shown
OF_BLOCK = "hyper_connection"  # what a block begins with
PROFILED = ("xla_enable_command_buffers_during_profiling", True)  # else XLA launches kernel by kernel under a profiler
Kernel = tuple[float, float, str, str]  # start and end in us, name, stream
WORDS = {"true": True, "false": False}


def variant(text: str, base: StepOptions) -> tuple[str, StepOptions, Callable[..., Any], int]:
    """Its name, options, what joins kernels, and the most lanes."""
    name, *settings = text.split()
    joined = ops.in_sequence
    if "sequences=false" in settings:
        joined = lambda function, **_: function  # noqa: E731
    elif "early=false" in settings:
        joined = lambda function, **_: in_sequence(function, early=())  # noqa: E731
    fields = {field.name for field in dataclasses.fields(StepOptions)}
    own, xla = {}, {}
    for key, _, value in (setting.partition("=") for setting in settings):
        if key in ("sequences", "early", "lanes"):
            continue
        if key in fields:
            own[key] = int(value) if value.isdigit() else value
        else:
            xla[key] = WORDS.get(value, value)
    most = next((int(setting[len("lanes=") :]) for setting in settings if setting.startswith("lanes=")), lanes.MOST)
    return name, dataclasses.replace(base, xla=tuple(xla.items()), **own), joined, most


def read_trace(folder: pathlib.Path) -> tuple[dict[str, list[Kernel]], dict[str, dict[str, list[float]]]]:
    """Kernels of each device by start, and of each host thread its events' durations in us."""
    kernels: dict[str, list[Kernel]] = collections.defaultdict(list)
    host: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    if plane.name.startswith("/device:GPU"):
                        if line.name.startswith("Stream"):
                            end = event.start_ns + event.duration_ns
                            kernels[plane.name].append((event.start_ns / 1e3, end / 1e3, short(event.name), line.name))
                    elif plane.name.startswith("/host"):
                        host[line.name][event.name[:80]].append(event.duration_ns / 1e3)
    return {name: sorted(found) for name, found in sorted(kernels.items())}, host


def short(name: str) -> str:
    return name.removeprefix("void ").replace("dsv4::", "").replace("(anonymous namespace)::", "")[:60]


def idle(kernels: list[tuple[float, float, str, str]]) -> float:
    """us between the first start and the last end in which no kernel ran."""
    total, end = 0.0, kernels[0][1]
    for start, stop, *_ in kernels:
        total += max(start - end, 0.0)
        end = max(end, stop)
    return total


def layers_of(kernels: list[tuple[float, float, str, str]], layers: int) -> list[list[tuple[float, float, str, str]]]:
    """Of the last call: two hyper-connections a layer, and the head's."""
    starts = [i for i, kernel in enumerate(kernels) if OF_BLOCK in kernel[2]][-2 * layers - 1 :: 2]
    return [kernels[first:last] for first, last in itertools.pairwise(starts)]


def show(name: str, count: int, shown: list[int], folder: pathlib.Path) -> dict[str, Any]:
    devices, threads = read_trace(folder)
    kernels = sorted(itertools.chain.from_iterable(devices.values()))
    if not kernels:
        return {}
    host: dict[str, list[float]] = collections.defaultdict(list)
    for events in threads.values():
        for event, times in events.items():
            host[event] += times
    layers = layers_of(kernels, count)
    took, each = kernels[-1][1] - kernels[0][0], " ".join(f"{layer[-1][1] - layer[0][0]:.0f}" for layer in layers)
    print(f"{name}: {len(kernels)} kernels, {took:.0f} us, none ran for {idle(kernels):.0f} us; layers {each}")
    for index in (i for i in shown if i < len(layers)):
        print(f"  layer {index}")
        zero, before = layers[index][0][0], layers[index][0][0]
        for start, end, kernel, stream in layers[index]:
            times = f"{start - zero:7.1f} {end - zero:7.1f} {end - start:6.1f} {start - before:+6.1f}"
            print(f"  {times} {stream:12.12} {kernel}")
            before = end
    longest = sorted(host, key=lambda event: -sum(host[event]))[:25]
    for event in longest:
        print(f"  host {sum(host[event]):9.1f} us in {len(host[event]):4} {event}")
    return {"kernels": kernels, "host": {event: [len(host[event]), sum(host[event])] for event in longest}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--show", type=int, action="append", help="layers to list (default: 1, 6 and 7)")
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME SETTING=VALUE ...'")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    base = StepOptions(args.model, args.batch, args.context, layers=args.layers)
    params = init_params(model.model_config(base), 0, "released", packed=True)
    jax.block_until_ready(params)
    found = {}
    longest = model.longest_kernels

    def several(run: Callable[[], jax.Array], loop: int, keep: pathlib.Path | None) -> dict[str, Any]:
        return longest(lambda: [run() for _ in range(CALLS)][-1], CALLS * loop, keep)

    for name, options, joined, most in (variant(text, base) for text in args.variant or ["default"]):
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(model, "longest_kernels", several))
            patched.enter_context(mock.patch.object(ops, "in_sequence", joined))
            patched.enter_context(mock.patch.object(lanes, "MOST", most))
            profile = None if args.no_profile else pathlib.Path(temporary)
            try:
                chosen = dataclasses.replace(options, profile=profile, xla=(*options.xla, PROFILED))
                report = model.measure_model(chosen, params, None)
            except Exception as error:  # one variant that XLA refuses must not cost the others
                print(f"== {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            said = ("step_ms", "dispatch_us", "first_dispatch_us", "launches", "kernel_ms")
            print(f"== {name} {options.xla} batch {options.batch} {options.key_split} loop {options.loop}: "
                  f"{', '.join(f'{key} {report[key]}' for key in said)}", flush=True)  # fmt: skip
            shown = show(name, report["layers"], args.show or [1, 6, 7], profile) if profile else {}
            found[name] = report | shown
    if args.json:
        args.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
