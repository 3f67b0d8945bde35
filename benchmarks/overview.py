"""The first page of results: how fast whole models run, as tables and as a picture, made from records. Imports no jax.

What users ask: tokens a second and milliseconds a step on one GPU and on two, prefill, the first token, and how the
kernels stand beside the best of other projects. Every number is a record's, or a quotient of two of one row's.
"""

from __future__ import annotations

import textwrap
import xml.sax.saxutils
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tables import columns_of, context
from targets import PEERS

__all__ = ["DEVICE", "PICTURE", "overview", "picture"]

PICTURE = "whole_models.svg"
FULL = {"flash": 43, "pro": 61}  # layers of each model
NAMES = {"flash": "V4-Flash", "pro": "V4-Pro"}
DEVICE = "NVIDIA H200"
# Kernels beside peers': what a decode step of V4-Flash calls, for one request and for 64. Shape -> what it is, and what
# the peer's does otherwise.
BESIDE = {
    ("attend", "csa-flash"): ("attention of a CSA layer", ""),
    ("index_scores", "fp8-128k"): ("index scores of 128 Ki, fp8 keys", ""),
    ("top_k", "flash-128k"): ("top-k of 128 Ki", ", not sorted"),
    ("append", "fused"): ("append with norm and RoPE", ", the queries, too"),
    ("moe", "flash"): ("experts of a layer, FP4", ", without SwiGLU"),
    ("dense_fp8", "32768x1024"): ("dense product, FP8, 32768 x 1024", ", rows in FP8"),
}
# Of the decode table's rows with drafts.
DSPARK = (
    " By DSpark as many tokens a step are taken as are published of V4-Pro: 3.08 with three drafts, 3.74 with five."
)
REAL = " (2) If as many are accepted as of the trained model of `checkpoints/small` on held-out text, greedy."
INK, MUTED, BAR, FLOOR, FASTER, SLOWER = "#1d2733", "#5b6b7d", "#0072B2", "#D55E00", "#009E73", "#CC79A7"


class _Bar(NamedTuple):
    """A bar of the picture: its name, the length of its bar, where a mark stands on it, and what is written behind."""

    name: str
    value: float
    text: str
    mark: float | None = None
    colour: str = BAR


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _rate(row: dict[str, Any]) -> float:
    """Returns tokens a second of a decode step, or of a step with drafts of which the assumed share is accepted."""
    return 1e3 * row["batch"] / (row.get("token_ms") or row["step_ms"])


def _whole(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns decode steps of whole models, the fastest of those with the same requests, context and drafts."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if row["table"] == "models" and row["layers"] == FULL.get(row["model"]) and (row.get("chunk") or 1) == 1:
            key = row["model"], row.get("devices") or 1, row["context"], row["batch"], _head(row)
            if key not in found or _rate(row) > _rate(found[key]):
                found[key] = row
    return [found[key] for key in sorted(found, key=lambda key: (key[:2], key[3], key[2], key[4]))]


def _head(row: dict[str, Any]) -> str:
    """What drafts in a step; "" for none."""
    return (row.get("draft_head") or "mtp") if row.get("drafts") else ""


def _drafts(row: dict[str, Any]) -> str:
    """How many drafts a step has, and by what if not by an MTP layer."""
    return _plural(row["drafts"], "draft") + " by DSpark" * (_head(row) == "dspark")


def _accepted(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Returns tokens of a step by (what drafts, how many) as measured on the trained model's held-out text, greedy."""
    return {
        (row.get("head") or "mtp", row["draft"]): row["tokens_a_step"]
        for row in rows
        if row["table"] == "acceptance" and not row["temperature"]
    }


def _some_layers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns decode steps of a model's first layers, on one device, without drafts."""
    found = (row for row in rows if row["table"] == "models" and not row.get("drafts"))
    return [row for row in found if row["layers"] < FULL.get(row["model"], 0) and (row.get("chunk") or 1) == 1]


def _prefills(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["table"] in ("steps", "models") and (row.get("chunk") or 1) > 1]


def _peers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of the kernels of `BESIDE`, of the default implementation: CUDA graphs, one request and 64; `what`
    they are, `whose` the peer is and what it does otherwise, and the `ratio` of times.
    """
    timed = {
        (row["op"], row["shape"], row["batch"]): row
        for row in rows
        if row["table"] == "ops" and row.get("timer") == "graph" and not row.get("variant") and row.get("peer_us")
    }
    return [
        row | {"what": what, "whose": PEERS[op] + otherwise, "ratio": row["kernel_us"] / row["peer_us"]}
        for (op, shape), (what, otherwise) in BESIDE.items()
        for batch in (1, 64)
        if (row := timed.get((op, shape, batch)))
    ]


def _hits(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns loads on which others' rules were tried, too: of each `trace` what every policy finds, by its name."""
    loads: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["table"] == "simulate":
            loads.setdefault(row["trace"], {"trace": row["trace"]})[row["policy"]] = row["of_endless"]
    return [load for load in loads.values() if "SGLang's rules" in load]


def _gpus(row: dict[str, Any]) -> str:
    devices, tensor = row.get("devices") or 1, row.get("tensor") or 1
    return f"{devices} ({'experts split' if tensor == 1 else 'heads and experts split'})" if devices > 1 else "1"


def _chunk_rate(row: dict[str, Any]) -> float:
    return 1e3 * row["batch"] * row["chunk"] / row["step_ms"]


def _requests(row: dict[str, Any]) -> str:
    return f"{row['batch']:,}" + (f", {_drafts(row)} (1)" if row.get("drafts") else "")


def overview(rows: Sequence[dict[str, Any]]) -> str:
    """Writes the page as Markdown; `rows` of the newest records of one kind of device."""
    parts = [f"![Milliseconds a step, prefill, and kernels beside those of other projects]({PICTURE})\n"]
    if whole := _whole(rows):
        accepted = _accepted(rows)
        whole = [row | {"given": accepted.get((_head(row), row.get("drafts") or 0))} for row in whole]
        parts.append(
            "**Decode, the whole model** (random weights in the released formats, FP8 rows, FP4 index keys):\n"
        )
        parts.append(columns_of(whole, WHOLE, MADE))
        parts.append(
            _text(
                "(1) Random weights accept no draft; 47.2 % of those whose predecessors were accepted are "
                "taken to be, as another project saw on real text."
                + DSPARK * any(_head(row) == "dspark" for row in whole)
                + REAL * any(row["given"] for row in whole)
            )
        )
    if some := _some_layers(rows):
        parts.append("**Decode on one GPU, as many layers as its memory and the time allowed:**\n")
        parts.append(columns_of(some, SOME_LAYERS, MADE))
    if prefills := _prefills(rows):
        parts.append("**Prefill, one GPU, one request:**\n")
        parts.append(columns_of(prefills, PREFILLS, MADE))
    hits = _hits(rows)
    waits = [row for row in rows if row["table"] == "simulate" and row["policy"] == "the default"]
    if waits := [row for row in waits if row["trace"] not in [load["trace"] for load in hits]]:
        said = "; ".join(
            f"{row['trace']}: {row['first_token_mean_s']:.2f} s on average, {row['first_token_p99_s']:.2f} s for 99 %, "
            f"{100 * row['hit_rate']:.0f} % of prompts found in the cache"
            for row in waits
        )
        parts.append(
            _text(
                f"**First token.** Not measured on a whole model yet. In the simulator, whose steps are those "
                f"of attention alone ({said})."
            )
        )
    if hits:
        parts.append("**Prompts found in the cache**, of what an endless cache finds (the simulator, made-up loads):\n")
        parts.append(columns_of(hits, HITS, MADE))
    if peers := _peers(rows):
        parts.append("**Kernels beside other projects'** (us in CUDA graphs, the same GPU; below 1 ours is shorter):\n")
        parts.append(columns_of(peers, KERNELS, MADE))
    return "\n".join(parts)


def _prefilled(row: dict[str, Any]) -> str:
    if row["table"] == "steps":
        return f"{NAMES[row['model']]}, attention of all layers"
    return f"{NAMES[row['model']]}, {row['layers']} whole layers of {FULL[row['model']]}"


# The page's tables, as `tables.columns_of` reads them.
MADE: dict[str, Callable[[Any], str]] = {
    "name": lambda row: NAMES[row["model"]],
    "gpus": _gpus,
    "requests": _requests,
    "rate": lambda row: f"{_rate(row):,.0f}",
    "real rate": lambda row: f"{1e3 * row['batch'] * row['given'] / row['step_ms']:,.0f}" if row["given"] else "",
    "layers": lambda row: f"{row['layers']} of {FULL[row['model']]}",
    "prefilled": _prefilled,
    "chunk rate": lambda row: f"{_chunk_rate(row):,.0f}",
}
WHOLE = (
    "model = @name | GPUs = @gpus | requests = @requests | context = context:tokens | ms a step = step_ms:.2f | "
    "tokens/s = @rate | tokens/s (2) = @real rate | over the floor = over_floor:times"
)
SOME_LAYERS = (
    "model = @name | layers = @layers | requests = batch:, | context = context:tokens | ms a step = step_ms:.2f | "
    "ms a layer = layer_ms:.2f | over the floor = over_floor:times"
)
PREFILLS = (
    "what = @prefilled | chunk = chunk:, | end of context = context:tokens | ms = step_ms:.1f | tokens/s = @chunk rate"
)
HITS = (
    "load, memory = trace | the default = the default:percent | states in blocks = states in blocks:percent | "
    "SGLang's rules = SGLang's rules:percent | vLLM's rules = vLLM's rules:percent"
)
KERNELS = "kernel = what | requests = batch | ours = kernel_us:.1f | peer = peer_us:.1f | = whose | ratio = ratio:.2f"


def _text(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


# The picture: bars of three panels, as plain SVG


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Draws the page's figures as an SVG, 900 pixels wide."""
    whole, prefills, peers = _whole(rows), _prefills(rows), _peers(rows)
    steps = [
        _Bar(
            f"{_plural(row['batch'], 'request')} of {context(row['context'])}"
            + (f", {_drafts(row)}" if row.get("drafts") else ""),
            row["step_ms"],
            f"{row['step_ms']:.2f} ms, {_rate(row):,.0f} tokens/s",
            row.get("floor_ms"),
        )
        for row in whole
    ]
    chunks = [
        _Bar(
            f"{_prefilled(row).partition(', ')[2]}, {context(row['context'])}",
            row["step_ms"],
            f"{row['step_ms']:.0f} ms, {_chunk_rate(row):,.0f} tokens/s",
            row.get("floor_ms"),
        )
        for row in prefills
    ]
    beside = [
        _Bar(
            f"{row['what']}, {_plural(row['batch'], 'request')}",
            row["ratio"],
            f"{row['ratio']:.2f} of {PEERS[row['op']]}'s time",
            1.0,
            FASTER if row["ratio"] <= 1 else SLOWER,
        )
        for row in peers
    ]
    model = f"{NAMES[whole[0]['model']]}, all {whole[0]['layers']} layers, " if whole else ""
    devices = f"{whole[0].get('devices') or 1} x {DEVICE}" if whole else DEVICE
    panels = [
        (f"Decode: {model}{devices} (orange: what its bytes and products take at least)", steps),
        (f"Prefill: 4,096 tokens of one request, V4-Flash, 1 x {DEVICE}", chunks),
        (f"Kernels beside those of other projects, 1 x {DEVICE} (shorter is faster)", beside),
    ]
    shapes: list[str] = []
    y = 20
    for title, lines in panels:
        if lines:
            y = _panel(shapes, y, title, lines) + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y}" viewBox="0 0 900 {y}" role="img"'
    title = "<title>How fast whole models and kernels run</title>"
    back = f'<rect width="900" height="{y}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="sans-serif">', title, back, *shapes, "</svg>", ""])


def _panel(shapes: list[str], y: int, title: str, lines: Sequence[_Bar]) -> int:
    left, width, height = 320, 330, 21

    def text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, style: str = "") -> None:
        escaped = xml.sax.saxutils.escape(text)
        shapes.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" {style}>{escaped}</text>')

    text(16, y, title, size=14, style=f'font-weight="bold" fill="{INK}"')
    scale = width / max(max(line.value, line.mark or 0) for line in lines)
    for i, line in enumerate(lines):
        top = y + 14 + i * height
        text(left - 10, top + 12, line.name, anchor="end", style=f'fill="{INK}"')
        length = max(line.value * scale, 1)
        shapes.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="15" rx="2" fill="{line.colour}"/>')
        if line.mark is not None:
            x = left + line.mark * scale
            shapes.append(f'<rect x="{x - 1.5:.1f}" y="{top - 2}" width="3" height="19" fill="{FLOOR}"/>')
        end = left + max(line.value, line.mark or 0) * scale
        text(end + 8, top + 12, line.text, style=f'fill="{MUTED}"')
    return y + 14 + len(lines) * height
