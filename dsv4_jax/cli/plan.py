"""`plan`: what fits: device memory, concurrent requests, context per request; any two give the third."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..capacity import SNAPSHOT_FRACTION, Capacity, capacity
from ..errors import OptionError
from .models import add_model, model_config, model_file
from .options import LAYOUT_FIELDS, add_command, add_json, add_layout, layout_from, naming, refuse_same
from .plan_plot import draw
from .printing import present
from .values import byte_count, fraction, natural, picture_file, positive, token_count
from .weights import FORMS, taken

__all__ = ["add_parser", "human", "run"]

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
    parser.add_argument("--hbm", type=byte_count, metavar="BYTES", help="device memory to use, such as 80GiB or 80e9")
    parser.add_argument("--requests", type=positive, metavar="N", help="live at once, on all devices")
    parser.add_argument("--context", type=token_count, metavar="TOKENS", help="of one request, such as 8192, 128K, 1M")
    states = parser.add_mutually_exclusive_group()
    states.add_argument("--snapshots", type=natural, metavar="N", help="extra slots for states that prefix hits end at")
    states.add_argument(
        "--snapshot-fraction",
        type=fraction,
        metavar="F",
        help=f"of the bytes of blocks and snapshots (default: {SNAPSHOT_FRACTION})",
    )
    parser.add_argument("--plot", type=picture_file, metavar="PNG", help="draw requests over context for this memory")
    parser.add_argument(
        "--weights",
        choices=FORMS,
        help="--hbm is for the model's weights too, without MTP layers, in this dtype or as released (default: "
        "for the cache alone)",
    )
    parser.add_argument(
        "--devices",
        type=positive,
        default=1,
        metavar="N",
        help="that share the weights, each of them with --hbm bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor",
        type=positive,
        default=1,
        metavar="N",
        help="of them, have the same requests and share the heads (default: %(default)s)",
    )
    parser.add_argument(
        "--pool-ranks",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        metavar="N",
        help="devices that share each request's blocks, each with --hbm bytes: 1, 2, 4 or 8; with --devices those of "
        "--tensor (default: %(default)s)",
    )
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
    layout = layout_from(args, cfg)
    weights = taken(cfg, args.weights, args.devices, args.tensor) if args.weights else 0
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
        draw(answer, args.model, human(answer.hbm_bytes or answer.total_bytes), args.plot, **states)
    held = {"weights": args.weights, "devices": args.devices, "tensor": args.tensor} if args.weights else {}
    report = {"model": args.model, **held, **answer.as_dict()}
    present(report, args.json, lambda console: console.print(_table(answer, args.model, args.devices, shards)))
    return 0


def human(count: float) -> str:
    """Bytes in IEC units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def _table(answer: Capacity, model: str, devices: int, shards: int) -> Table:
    layout, size, weights = answer.layout, answer.size, answer.weight_bytes
    formats = f"{layout.kv_row.name} rows, {layout.index_row.name} index keys"
    title = f"{escape(model)}: {formats}, blocks of {layout.block_tokens} tokens"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    rows: list[tuple[str, Any]] = [
        *([("pool ranks", f"{size.pool_ranks}: bytes are those of each")] if size.pool_ranks > 1 else []),
        *([("devices", f"{shards} x {devices // shards}: what follows is of each")] if devices > 1 else []),
        ("concurrent requests", f"{answer.max_requests:,}"),
        ("context per request", f"{answer.max_context:,} tokens"),
        ("at that context at once", f"{answer.full_requests:,} requests"),
        ("tokens in all blocks", f"{answer.total_tokens:,}"),
        ("states for prefix hits", f"{answer.size.num_snapshots:,}"),
        ("limited by", _LIMITS[answer.limited_by]),
    ]
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for pool, count in answer.bytes_by_pool.items():
        table.add_row(pool, human(count))
    table.add_row("total", f"{human(answer.total_bytes)} ({answer.total_bytes:,} bytes)")
    if answer.leftover_bytes is not None:
        table.add_row("left over", human(answer.leftover_bytes))
    if weights:
        table.add_row("weights", human(weights))
        table.add_row("weights and cache", human(weights + answer.total_bytes))
    table.add_section()
    table.add_row("per token (paged)", f"{layout.bytes_per_token:,.2f} bytes")
    table.add_row("per block", human(layout.bytes_per_block))
    table.add_row("per request, at any length", human(layout.bytes_per_slot))
    table.add_row("per request, at full context", human(answer.full_request_bytes))
    return table
