"""A whole model over two GPUs or more: timed at full size, and equal to one, bit by bit. Needs that many devices.

    python benchmarks/bench_mesh.py --json mesh.json [--devices N] [--stages tensor,more,data] [--limit 250]

`tensor`, `more`, `data`: all layers, as `bench model` times them: heads and experts split, one request, plain and
with one to three drafts in loops of eight steps; the same in a loop, eight requests, single steps with a draft;
experts split. `first`: of these what matters most. `dspark`: loops with five and three drafts of DSpark's stages,
then with one of the MTP layer, whose weights are drawn anew. `mixed`: two data shards, each of which splits heads.
`prefill`: chunks of 4,096 tokens at the end and at the beginning of 65,536. Weights are drawn once for each split and
draft head. `equal`: first layers, decode and wide steps, all splits: logits and cache bytes against one device. The
file is written after every measurement; when so many seconds have gone by, nothing more is begun. With `--brief` the
steps' times alone are taken: no floors, no kernels.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Recorder, jax_device, parser
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from targets import judged

from dsv4_jax.bench.model import exchanges, jitted_over, measure_model, mesh_of, model_config, spread_cache
from dsv4_jax.bench.step import StepOptions, cache_shape, random_cache
from dsv4_jax.bench.timing import measure_ceilings
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.model import forward, init_params
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS
from dsv4_jax.model.weights.placement import device_bytes
from dsv4_jax.model.weights.split import DATA, TENSOR
from dsv4_jax.ops.exchange import Peers, using
from dsv4_jax.sharding import stack_plans

EQUAL_LAYERS = 4  # of Flash: window, window, CSA, HCA; by table, the last by score
ROUND = 128 * 1024
IN_A_ROW = 40  # exchanges of an executable, each of what the one before gave


def held() -> list[int]:
    return [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.devices()]


def draw(options: StepOptions, recorder: Recorder, mtp: bool = False) -> Any:
    cfg, start, before = model_config(options), time.perf_counter(), held()
    params = init_params(cfg, 0, "released", packed=True, drafts=mtp, mesh=mesh_of(options))
    jax.block_until_ready(params)
    head = "MTP" if cfg.dspark is None else "DSpark"
    name = f"{cfg.num_layers} layers{f' and {head}' * mtp} over {options.devices} devices, tensor {options.tensor}"
    recorder.fact("mesh", f"weights drawn, {name}", time.perf_counter() - start, "s")
    recorder.fact(
        "mesh", f"predicted for a device, {name}", device_bytes(cfg, split=options.split, drafts=mtp), "bytes"
    )
    after = held()
    if after[0]:
        each = [b - a for a, b in zip(before, after, strict=True)][: options.devices]
        recorder.fact("mesh", f"allocated on the fullest device, {name}", max(each), "bytes")
    return params


def step_inputs(options: StepOptions, width: int) -> tuple[Any, Any, Any, np.ndarray]:
    """Returns layout, size, plan of a data shard, and all tokens: `width` of each request, at its context's end."""
    cfg = model_config(options)
    layout, size = cache_shape(cfg, options)
    rows = [StepSequence(slot + 1, options.context - width, width) for slot in range(size.num_slots)]
    plan = build_plan(layout, rows, shape_for(layout, rows), size=size)
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=options.batch * width).astype(np.int32)
    return layout, size, plan, tokens


def run_once(options: StepOptions, params: Any, width: int) -> tuple[np.ndarray, Any]:
    layout, size, plan, tokens = step_inputs(options, width)
    mesh, data = mesh_of(options), options.split.data
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    stacked, tokens = jax.device_put((stack_plans([plan] * data), tokens), where)
    cache = spread_cache(layout, size, mesh) if mesh else random_cache(layout, size, jax.random.key(1))
    with exchanges(options) as opened:
        step = jitted_over(mesh, forward, GPU_DECODE_OPTIONS, [exchange.peers for exchange in opened])
        logits, cache = jax.block_until_ready(step(params, cache, stacked, tokens))
        for exchange in opened:
            exchange.check()
    return np.asarray(logits), cache


def equal(model: str, devices: int, recorder: Recorder) -> None:
    """Compares each data shard alone on one device with all of them together."""
    tiny = model == "tiny"
    base = StepOptions(model=model, layers=2 if tiny else EQUAL_LAYERS, context=200 if tiny else 2048)
    alone, params, split = draw(base, recorder), None, None
    splits = [(devices, 1), (devices, 8), (1, 64)] + [(devices // 2, 8)] * (devices > 2)
    for tensor, batch in ((devices, 1), (1, 4)) if tiny else splits:
        options = dataclasses.replace(base, devices=devices, tensor=tensor, batch=batch)
        if options.split != split:
            split, params = options.split, None
            params = draw(options, recorder)
        for width in (1, 4) if batch in (4, 8, 64) else (1,):
            start = time.perf_counter()
            logits, cache = run_once(options, params, width)
            data = options.split.data
            shard_batch = batch // data
            one = dataclasses.replace(base, batch=shard_batch)
            layout, size, plan, _ = step_inputs(one, width)
            tokens = step_inputs(options, width)[3].reshape(data, -1)
            different, leaves = 0, 0
            step = jitted_over(None, forward, GPU_DECODE_OPTIONS)
            for shard in range(data):
                fresh = random_cache(layout, size, jax.random.key(1))
                expected, after = step(alone, fresh, jax.device_put(stack_plans([plan])), tokens[shard])
                got = logits.reshape(data, -1, logits.shape[-1])[shard]
                different += int((np.asarray(expected) != got).any(-1).sum())
                for leaf in layout.leaves:
                    rows = layout.leaf_shape(leaf, size)[0]
                    want = np.asarray(after.arrays[leaf.name])
                    for part in cache.arrays[leaf.name].addressable_shards:
                        if (part.index[0].start or 0) // rows == shard:
                            leaves += not np.array_equal(part.data, want)
            name = f"tensor {tensor}, {batch} requests, {width} tokens each"
            assert np.isfinite(logits).all() and np.ptp(logits) > 0.1
            recorder.fact("mesh", f"rows of logits that differ from one device's, {name}", different)
            recorder.fact("mesh", f"cache leaves that differ from one device's, {name}", leaves)
            print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def exchange_times(options: StepOptions) -> dict[str, float]:
    """Times each exchange of a layer, in us: many in one executable, with the copies that `Split` makes for them."""
    cfg, split, mesh = model_config(options), options.split, mesh_of(options)
    assert mesh is not None
    tokens, hidden, top = options.batch * options.fed // split.data, cfg.hidden_size, cfg.num_experts_per_tok
    latent = cfg.o_groups // split.tensor * cfg.o_lora_rank

    def all_tokens(x: jax.Array, chosen: jax.Array, share: jax.Array) -> Any:
        return tuple(rows[: x.shape[0]] for rows in split.all_tokens(x, chosen, share))

    def own_sums(x: jax.Array) -> Any:
        return (jnp.tile(split.own_sums(x), (split.data, 1)),)

    def all_columns(x: jax.Array) -> Any:
        return (split.all_columns(x)[:, : x.shape[1]],)

    cases: dict[str, tuple[Callable[..., Any], list[tuple[int, int, Any]]]] = {}
    if split.data > 1:
        rows = [(tokens, hidden, jnp.bfloat16), (tokens, top, jnp.int32), (tokens, top, jnp.float32)]
        cases["all_tokens"] = all_tokens, rows
    cases["own_sums"] = own_sums, [(split.data * tokens, hidden, jnp.float32)]
    if split.tensor > 1:
        cases["all_columns"] = all_columns, [(tokens, latent, jnp.bfloat16)]
    with exchanges(options) as opened:
        peers = [exchange.peers for exchange in opened]
        times = {name: chain_us(mesh, peers, *case) for name, case in cases.items()}
        for exchange in opened:
            exchange.check()
    return times


def chain_us(
    mesh: Mesh, peers: Sequence[Peers], exchange: Callable[..., Any], shapes: list[tuple[int, int, Any]]
) -> float:
    """Returns the us of an exchange, of many in one executable, each of what the one before gave."""

    def run(*rows: jax.Array) -> Any:
        with using(*peers):
            for _ in range(IN_A_ROW):
                rows = exchange(*rows)
        return rows

    spec = PartitionSpec((DATA, TENSOR))
    called = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    total = mesh.devices.size
    rows = tuple(
        jax.device_put(np.zeros((total * count, width), dtype), NamedSharding(mesh, spec))
        for count, width, dtype in shapes
    )
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(called(*rows))
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / IN_A_ROW


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--devices", type=int, default=jax.device_count(), help="of all, how many")
    command.add_argument("--stages", default="tensor,more,data")
    command.add_argument("--model", default="flash")
    command.add_argument("--layers", type=int)
    command.add_argument("--limit", type=float, default=600.0)
    command.add_argument("--brief", action="store_true")
    args = command.parse_args()
    stages, tiny, begun = args.stages.split(","), args.model == "tiny", time.perf_counter()
    top = measure_ceilings(quick=tiny or args.brief)

    recorder = Recorder(args.json, **jax_device(), ceilings={} if args.brief else top.as_dict())

    def attempt(name: str, call: Any) -> None:
        start = time.perf_counter()
        if start - begun > args.limit:
            print(f"== {name}: no time left", flush=True)
            return
        try:
            call()
        except Exception:  # the other stages still count
            print(f"{name} failed\n{traceback.format_exc()[-1500:]}", flush=True)
        print(f"== {name}: {time.perf_counter() - start:.1f} s of {time.perf_counter() - begun:.0f}", flush=True)

    high = StepOptions(
        model=args.model,
        devices=args.devices,
        layers=2 if tiny else args.layers,
        context=8192,
        steps=2 if tiny else 20,
        brief=args.brief,
    )
    change = dataclasses.replace
    low, long = change(high, tensor=args.devices, batch=1, key_split="latency"), change(high, batch=64, context=ROUND)
    few = change(low, brief=True)
    chunk, half = change(few, chunk=4096, context=4096), args.devices // 2
    cases = {
        "first": [few, change(few, batch=8), change(few, loop=8, drafts=1)],
        "mixed": [change(high, tensor=half, batch=batch, brief=True) for batch in (8, 64)] if half > 1 else [],
        "prefill": [change(chunk, context=1 << 16), chunk],
        "tensor": [low, *(change(few, loop=8, drafts=drafts) for drafts in (1, 3, 2))],
        "dspark": [
            *(change(few, loop=8, drafts=drafts, draft_head="dspark") for drafts in (5, 3)),
            change(few, loop=8, drafts=1),
        ],
        "more": [change(few, loop=8), change(few, batch=8), change(few, drafts=1)],
        "data": [change(high, batch=256), long, change(long, exchange=False, brief=True)],
    }
    params: dict[Any, Any] = {}

    def one(options: StepOptions, mtp: bool) -> None:
        if (key := (options.split, options.draft_head, mtp)) not in params:
            params.clear()
            params[key] = draw(options, recorder, mtp)
        report = measure_model(options, params[key], top)
        if not (options.brief or options.drafts):
            report["exchange_us"] = exchange_times(options)
            report["exchange_ms"] = report["layers"] * sum(report["exchange_us"].values()) / 1e3
        report = judged({"table": "models"} | report)
        recorder.add(**report)
        us = {name: round(value, 1) for name, value in report.get("exchange_us", {}).items()}
        floor = f" = {report['over_floor']:.2f} of {report['floor_ms']:.2f}" if "over_floor" in report else ""
        token = f", {report['token_ms']:.2f} ms a token" if "token_ms" in report else ""
        print(
            f"{report['step_ms']:.2f} ms{floor}{token}, exchanges {report.get('exchange_ms') or 0:.2f} by "
            f"{report['exchange']} {us}, host {report['dispatch_us']:.0f} us, first {report['first_dispatch_us']:.0f}, "
            f"kernels {report['kernel_ms'] or 0:.2f} ms, compiled in {report['compile_s']:.0f} s",
            flush=True,
        )

    for stage in stages:
        if stage == "equal":
            params.clear()
            attempt("equal", lambda: equal(args.model, args.devices, recorder))
        for case in cases.get(stage, ()):
            options = case
            if tiny:
                options = change(case, context=256, batch=min(case.batch, 4), chunk=min(case.chunk, 64))
            mtp = options.tensor > 1
            what = f"{options.batch} requests of {options.context}, loop {options.loop}, "
            what += f"{options.drafts} drafts by {options.draft_head}"
            attempt(f"{stage}: {what}, ours {options.exchange}", lambda o=options, mtp=mtp: one(o, mtp))


if __name__ == "__main__":
    main()
