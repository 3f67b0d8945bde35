"""`plan`: what fits: device memory, concurrent requests, context per request; any two give the third."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from ..capacity import SNAPSHOT_FRACTION, Capacity, capacity
from ..errors import CapacityError, OptionError
from ..plotting import COLOURS, binary, figure, legends_above, model_title, plain_log, save, style, token_ticks
from .models import add_model, add_weights, devices_that_hold, model_config, model_file, weight_bytes
from .options import LAYOUT_FIELDS, add_command, add_json, add_layout, layout_from, naming, option, refuse_same
from .printing import facts, human, present
from .values import byte_count, fraction, natural, picture_file, positive, token_count

__all__ = ["add_parser", "picture", "run"]

_EXAMPLES = """
  dsv4-jax plan --model flash --hbm 80GiB --context 128K        how many requests?
  dsv4-jax plan --model pro --hbm 100GiB --requests 64          how long a context?
  dsv4-jax plan --model flash --requests 256 --context 8192     how much memory?
  dsv4-jax plan --model flash --hbm 80GiB --context 128K --snapshots 0    without prefix caching
  dsv4-jax plan --model flash --hbm 141GB --context 128K --weights released --devices 2    each of two H200s
  dsv4-jax plan --model flash --hbm 80GiB --context 1M --pool-ranks 4    a request's blocks over four devices
  dsv4-jax plan --model ckpt --hbm 40e9 --requests 32 --context 1M --kv-format bf16 --index-format bf16 --json
"""
_FIELDS = {
    **LAYOUT_FIELDS,
    "hbm_bytes": "--hbm",
    "max_requests": "--requests",
    "max_context": "--context",
    "num_snapshots": "--snapshots",
    "snapshot_fraction": "--snapshot-fraction",
    "CacheSize": "the size",
    "CacheSize.num_blocks": "the number of blocks",
    "CacheSize.num_slots": "the number of slots",
    "CacheSize.num_snapshots": "the number of snapshots",
}
_LIMITS = {
    "blocks": "memory is used up, most of it by blocks: entries and index keys, which grow with the tokens",
    "slots": "memory is used up, most of it by slots: windows and compressor state, which grow with the requests",
    "context": "the model's own context limit",
    "none": "nothing: all of it fits",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "plan", "memory, requests and context: two give the third", __doc__, _EXAMPLES)
    add_model(parser)
    option(parser, "--hbm", byte_count, "SIZE", "memory of a device to use, such as 80GiB")
    option(parser, "--requests", positive, "N", "live at once, on all devices")
    option(parser, "--context", token_count, "TOKENS", "of one request, such as 8192, 128K, 1M")
    states = parser.add_mutually_exclusive_group()
    option(states, "--snapshots", natural, "N", "extra slots for states that prefix hits end at")
    share = f"of the bytes of blocks and snapshots (default: {SNAPSHOT_FRACTION})"
    option(states, "--snapshot-fraction", fraction, "F", share)
    option(parser, "--plot", picture_file, "PNG", "draw requests over context for this memory")
    drafts = "a step, by the model's own head (MTP or DSpark): with its state, and its weights (default: without)"
    option(parser, "--drafts", positive, "N", drafts)
    weights = "--hbm is for the model's weights too, in this dtype or as released"
    add_weights(parser, f"{weights} (default: for the cache alone)")
    option(parser, "--devices", positive, "N", "that share the weights, each of them with --hbm", default=1)
    option(parser, "--tensor", positive, "N", "of them, have the same requests and share the heads", default=1)
    ranks = "devices that share each request's blocks, each with --hbm: 1, 2, 4 or 8; with --devices those of --tensor"
    option(parser, "--pool-ranks", int, "N", ranks, choices=(1, 2, 4, 8), default=1)
    add_layout(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    refuse_same({"--model": model_file(args.model), "--plot": args.plot, "--json": args.json})
    cfg = model_config(args.model)
    if max(args.devices, args.tensor) > 1 and not args.weights:
        raise OptionError("--devices, --tensor: go with --weights: caches of several devices are caches of one")
    if args.weights and args.pool_ranks not in (1, args.tensor):
        raise OptionError(
            f"--pool-ranks: {args.pool_ranks} is not --tensor {args.tensor}: who shares blocks, shares heads"
        )
    mtp = args.drafts is not None
    if mtp:
        if args.draft_tokens:
            raise OptionError("--draft-tokens: --drafts has room for its own")
        if not cfg.num_draft_layers:
            raise OptionError("--drafts: the model has no layers that draft")
        args.draft_tokens = args.drafts
    layout = layout_from(args, cfg, include_drafts=mtp)
    weights = weight_bytes(cfg, args.weights, args.devices, args.tensor, drafts=mtp) if args.weights else 0
    if args.hbm is not None and weights >= args.hbm:
        fewest = devices_that_hold(cfg, args.weights, args.hbm, more_than=args.devices, drafts=mtp)
        raise OptionError(f"--hbm: {human(args.hbm)} are too few: weights take {human(weights)}{fewest}")
    shards = args.devices // args.tensor
    requests = None if args.requests is None else -(-args.requests // shards)
    states = {"num_snapshots": args.snapshots, "snapshot_fraction": args.snapshot_fraction}
    given = ", ".join(f"--{name}" for name in ("hbm", "requests", "context") if getattr(args, name) is not None)
    with naming(fields=_FIELDS | {"too large a cache": f"{given}: too large a cache"}):
        answer = capacity(
            layout,
            hbm_bytes=args.hbm,
            max_requests=requests,
            max_context=args.context,
            weight_bytes=weights,
            pool_ranks=args.pool_ranks,
            **states,
        )
    if args.plot:
        save(picture(answer, args.model, **states), args.plot)
    held = {"weights": args.weights, "devices": args.devices, "tensor": args.tensor} if args.weights else {}
    report = {"model": args.model, **held, **answer.as_dict()}
    present(report, args.json, lambda console: console.print(_table(answer, args.model, args.devices, shards)))
    return 0


def _table(answer: Capacity, model: str, devices: int, shards: int) -> Table:
    layout, size, weights, left = answer.layout, answer.size, answer.weight_bytes, answer.leftover_bytes
    found = {
        "pool ranks": f"{size.pool_ranks}: bytes are those of each" if size.pool_ranks > 1 else None,
        "devices": f"{shards} x {devices // shards}: what follows is of each" if devices > 1 else None,
        "concurrent requests": f"{answer.max_requests:,}",
        "context per request": f"{answer.max_context:,} tokens",
        "at that context at once": f"{answer.full_requests:,} requests",
        "tokens in all blocks": f"{answer.total_tokens:,}",
        "states for prefix hits": f"{size.num_snapshots:,}",
        "limited by": _LIMITS[answer.limited_by],
    }
    memory = {pool: human(count) for pool, count in answer.bytes_by_pool.items()} | {
        "total": f"{human(answer.total_bytes)} ({answer.total_bytes:,} bytes)",
        "left over": None if left is None else human(left),
        "weights": human(weights) if weights else None,
        "weights and cache": human(weights + answer.total_bytes) if weights else None,
    }
    each = {
        "per token (paged)": f"{layout.bytes_per_token:,.2f} bytes",
        "per block": human(layout.bytes_per_block),
        "per request, at any length": human(layout.bytes_per_slot),
        "per request, at full context": human(answer.full_request_bytes),
    }
    return facts(f"{model}: {_formats(answer)}", found, memory, each)


def _formats(answer: Capacity) -> str:
    layout = answer.layout
    return f"{layout.kv_row.name} rows, {layout.index_row.name} index keys, blocks of {layout.block_tokens} tokens"


def picture(answer: Capacity, model: str, **snapshots: Any) -> Any:
    """Draws how many requests of each context fit into the memory that this plan's cache has.

    Args:
        snapshots: their number or fraction, as `capacity` was given it.

    Returns:
        The `matplotlib.figure.Figure`: every number is written at its point, this plan's is marked.
    """
    weights = answer.weight_bytes
    memory = answer.hbm_bytes or answer.total_bytes + weights
    contexts, fits = _fits(answer, memory, **snapshots)
    details = [_formats(answer)]
    if weights:
        details.append(f"{human(weights)} of the {human(memory)} are weights".replace(".00 ", " "))
    if answer.size.pool_ranks > 1:
        details.append(f"each of {answer.size.pool_ranks} devices that share blocks")
    with style():
        title = f"{model_title(model)}: what fits in {human(memory - weights)} of cache"
        made = figure(title, "; ".join(details), 4.6)
        axes = made.subplots()
        axes.plot(contexts, fits, "o-", color=COLOURS[0], clip_on=False)
        plan = f"this plan: {answer.full_requests:,} requests of {binary(answer.max_context)} tokens"
        mark = {"color": COLOURS[1], "markersize": 8, "clip_on": False, "label": plan}
        axes.plot(answer.max_context, answer.full_requests, "D", **mark)
        axes.set(xscale="log", yscale="log", xlabel="context of each request, tokens", ylabel="requests at once")
        for context, fit in zip(contexts, fits, strict=True):
            if context != answer.max_context:
                axes.annotate(f"{fit:,}", (context, fit), (0, 6), textcoords="offset points", fontsize=8.5)
        token_ticks(axes.xaxis, contexts, 14)
        low, high = min(*fits, answer.full_requests), max(*fits, answer.full_requests)
        plain_log(axes.yaxis, low, high)
        axes.set(ylim=(low / 1.5, high * 1.8), title="Requests of each context that fit at once")
        legends_above([axes], 800)
    return made


def _fits(answer: Capacity, memory: int, **snapshots: Any) -> tuple[list[int], list[int]]:
    """Contexts, each twice the one before, and how many requests of each fit."""
    layout, contexts, fits = answer.layout, [], []
    same: dict[str, Any] = {"weight_bytes": answer.weight_bytes, "pool_ranks": answer.size.pool_ranks, **snapshots}
    context = layout.block_tokens
    while context <= layout.cfg.max_position_embeddings:
        try:
            fits.append(capacity(layout, hbm_bytes=memory, max_context=context, **same).max_requests)
        except CapacityError:
            break
        contexts.append(context)
        context *= 2
    return contexts, fits
