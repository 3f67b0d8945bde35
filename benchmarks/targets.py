"""What each op must reach on one H200 (required), should reach (goal), and what the best peer needs. Microseconds.

Peers (`PEERS`) were measured on the same kind of machine with CUDA graphs. Where the goal is to be below the peer, it
is the peer's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = [
    "MESH_TARGETS",
    "MODEL_TARGETS",
    "PEERS",
    "STEP_TARGETS",
    "TARGETS",
    "Target",
    "elsewhere",
    "judged",
    "judged_model",
    "verdict",
]


@dataclasses.dataclass(frozen=True)
class Target:
    """Times in us, or shares of the copy ceiling; None where nothing was set or measured."""

    required: float | None = None
    goal: float | None = None
    peer: float | None = None
    required_of_copy: float | None = None
    goal_of_copy: float | None = None

    def limits(self, bytes_moved: int, copy_rate: float) -> tuple[float | None, float | None]:
        """Returns (required, goal) in us, for a copy ceiling in bytes per second."""

        def us(share: float | None) -> float | None:
            return None if share is None else 1e6 * bytes_moved / (share * copy_rate)

        return self.required or us(self.required_of_copy), self.goal or us(self.goal_of_copy)


def verdict(us: float | None, required: float | None, goal: float | None) -> str | None:
    """ "goal", "required" or "missed"; None if there is no target or no time. If only a goal is set, it decides."""
    if us is None or (required is None and goal is None):
        return None
    if goal is not None and us <= goal:
        return "goal"
    return "required" if required is not None and us <= required else "missed"


def elsewhere(row: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Returns a row as the record of a run on `device` has it.

    Elsewhere than on an H200 without the times set for one, the verdicts on them and the peer's time, which is that
    of one. Shares of a device's own ceilings, and what they say, stay.
    """
    if "H200" in device or row.get("table") not in ("ops", "steps", "models"):
        return dict(row)
    shares = ("required_of_copy", "goal_of_copy", "required_over_floor", "goal_over_floor")
    dropped = {"peer_us"}
    if all(row.get(name) is None for name in shares):
        dropped |= {"required_us", "goal_us", "required_ms", "goal_ms", "verdict"}
    return {name: None if name in dropped else value for name, value in row.items()}


PEERS = {
    "append": "vLLM",
    "compress_csa": "vLLM",
    "compress_index": "vLLM",
    "compress_hca": "vLLM",
    "top_k": "vLLM",
    "attend": "FlashMLA",
    "index_scores": "DeepGEMM",
    "moe": "Marlin",
    "dense_fp8": "DeepGEMM",
}


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """Returns a report of `step.measure_step` with what is required of it, if anything is and it has a floor."""
    shape = report["model"], report["batch"], report["context"]
    if report.get("chunk"):
        times = PREFILL_TARGETS.get((*shape, report["chunk"]))
        return _in_time(report, times) if times and "over_floor" in report else report
    return _judged(report, STEP_TARGETS.get(shape))


def judged_model(report: dict[str, Any]) -> dict[str, Any]:
    """Judges a report of `model.measure_model` in the same way."""
    place = tuple(report.get(name) for name in ("model", "layers", "devices", "batch", "context"))
    if report.get("drafts"):
        return _in_time(report, DRAFT_TARGETS[place], "token_ms") if place in DRAFT_TARGETS else report
    times = MESH_TARGETS.get(place)
    if times is None:
        alone = report.get("devices", 1) == 1
        return _judged(
            report, MODEL_TARGETS.get((report["model"], report["layers"], report["batch"])) if alone else None
        )
    return _in_time(report, times)


def _in_time(report: dict[str, Any], times: tuple[float, float], what: str = "step_ms") -> dict[str, Any]:
    required, goal = times
    found = {"required_ms": required, "goal_ms": goal}
    return report | found | {"verdict": verdict(report[what], required, goal)}


def _judged(report: dict[str, Any], limits: tuple[float, float] | None) -> dict[str, Any]:
    if limits is None or "over_floor" not in report:
        return report
    required, goal = limits
    found = {"required_over_floor": required, "goal_over_floor": goal}
    return report | found | {"verdict": verdict(report["over_floor"], required, goal)}


def _peers(op: str, name: str, **times: float) -> dict[tuple[str, str, int], Target]:
    """Makes targets of peers' times alone: b1=13.0 is batch 1."""
    return {(op, name, int(batch[1:])): Target(peer=us) for batch, us in times.items()}


TARGETS: dict[tuple[str, str, int], Target] = {
    # The peer's kernel also normalises and rotates the queries.
    ("append", "fused", 1): Target(3, 2, 2.2),
    ("append", "fused", 64): Target(5, 3, 7.3),
    ("append", "fused", 1024): Target(20, 12, 46.9),
    ("compress_csa", "decode", 1): Target(6, 4.2, 4.2),
    ("compress_csa", "decode", 64): Target(9, 6.6, 6.6),
    ("compress_csa", "decode", 256): Target(peer=7.9),
    ("compress_csa", "prefill", 8192): Target(peer=30.0),
    ("compress_csa", "prefill", 65536): Target(peer=199.0, required_of_copy=0.6, goal_of_copy=0.8),
    ("compress_index", "decode", 1): Target(3.5, 3, 3.6),
    ("compress_index", "decode", 64): Target(4, 3.5, 4.1),
    ("compress_index", "decode", 256): Target(peer=5.5),
    ("compress_index", "prefill", 8192): Target(peer=15.6),
    ("compress_index", "prefill", 65536): Target(required_of_copy=0.6, goal_of_copy=0.8),
    ("compress_hca", "decode", 64): Target(12, 12, 36.0),
    ("compress_hca", "prefill", 8192): Target(peer=95.0),
    ("compress_hca", "prefill", 65536): Target(required_of_copy=0.6, goal_of_copy=0.8),
    ("gather", "rows", 1 << 18): Target(required_of_copy=0.75, goal_of_copy=0.85),
    ("gather", "rows", 1 << 20): Target(required_of_copy=0.85, goal_of_copy=0.9),
    ("kv_store", "bf16", 1 << 16): Target(required_of_copy=0.8),
    ("kv_store", "fp8", 1 << 16): Target(required_of_copy=0.8, goal_of_copy=0.9),
    # The peer's keys are fp8.
    ("index_scores", "fp4-8k", 64): Target(8, 6, 8.4),
    ("index_scores", "fp4-32k", 1): Target(3.8, 3, 3.8),
    ("index_scores", "fp4-128k", 1): Target(4.3, 3.6, 4.3),
    ("index_scores", "fp4-128k", 64): Target(55, 42, 70.5),
    ("index_scores", "fp4-32k-prefill", 4096): Target(600, 450, 500),
    ("index_scores", "fp4-128k-prefill", 4096): Target(2400, 1900, 2250),
    **_peers("index_scores", "fp8-8k", b1=3.3, b64=8.4),
    ("index_scores", "fp8-32k", 1): Target(4.2, 3.5, 3.8),
    **_peers("index_scores", "fp8-128k", b1=4.3, b16=22.0),
    ("index_scores", "fp8-128k", 64): Target(74, 68, 70.5),
    ("index_scores", "fp8-128k", 256): Target(275, 255, 262.9),
    ("index_scores", "fp8-1m", 1): Target(13.5, 11, 13.0),
    **_peers("index_scores", "fp8-1m", b16=135.2),
    ("top_k", "flash-8k", 1): Target(4.5, 3, 3.09),
    ("top_k", "flash-8k", 64): Target(4.5, 3.5, 3.52),
    ("top_k", "flash-32k", 1): Target(6, 4, 4.46),  # benchmarks/kernels.py alone
    ("top_k", "flash-128k", 1): Target(9.5, 7, 8.90),
    ("top_k", "flash-128k", 16): Target(peer=10.8),
    ("top_k", "flash-128k", 64): Target(12.5, 10, 12.7),
    ("top_k", "flash-128k", 256): Target(28, 22, 26.9),
    ("top_k", "flash-1m", 1): Target(16, 12, 15.3),
    ("top_k", "flash-1m", 16): Target(28, 22, 26.5),
    **_peers("top_k", "pro-128k", b64=13.3),
    **_peers("top_k", "pro-1m", b1=15.7),
    **_peers("attend", "swa-flash", b1=11.5, b64=14.0, b256=29.4),
    **_peers("attend", "hca-flash-1m", b1=28.8, b16=82.9, b64=244.5),
    **_peers("attend", "hca-pro-128k", b1=14.6, b64=53.2, b256=200.5),
    **_peers("attend", "hca-flash-128k", b16=22.6),
    **_peers("attend", "csa-pro", b16=28.0),
    ("attend", "csa-flash", 1): Target(15, 13.0, 13.0),
    ("attend", "csa-flash", 16): Target(25, 18.2, 18.2),
    ("attend", "csa-flash", 64): Target(50, 44.5, 44.5),
    ("attend", "csa-flash", 128): Target(80, 46.2, 46.2),
    ("attend", "csa-flash", 256): Target(150, 88.6, 88.6),
    ("attend", "hca-flash-128k", 1): Target(18, 15.1, 15.1),
    ("attend", "hca-flash-128k", 64): Target(75, 60.2, 60.2),
    ("attend", "hca-flash-128k", 256): Target(250, 141.5, 141.5),
    ("attend", "csa-pro", 1): Target(20, 14.7, 14.7),
    ("attend", "csa-pro", 64): Target(100, 53.3, 53.3),
    ("attend", "csa-pro", 256): Target(380, 201.0, 201.0),
    # benchmarks/kernels.py
    ("moe", "flash", 1): Target(40, 27, 45.3),
    ("moe", "flash", 16): Target(370, 310, 412),
    ("moe", "flash", 64): Target(860, 750, 972),
    ("moe", "flash", 256): Target(1250, 980, 1440),
    ("moe", "flash", 1024): Target(1900, 1400, 2023),
    ("moe", "flash, half of the experts", 64): Target(542, 473, 613),
    ("moe", "flash, half of the experts", 256): Target(670, 525, 772),
    ("moe", "flash, half of the experts", 1024): Target(1499, 1104, 1596),
    ("route", "flash", 64): Target(6.0),
    # benchmarks/bench_exchange.py
    ("exchange", "sum_to_all, 512 KiB", 2): Target(10.0, 6.0),
    ("exchange", "all_gather, sum_to_owner, 512 KiB", 2): Target(10.0, 6.0),
    # DeepGEMM quantises rows beforehand. Goals: 75 % of a read of the weights.
    ("dense_fp8", "32768x1024", 1): Target(14.0, 10.0, 14.0),
    ("dense_fp8", "32768x1024", 16): Target(14.7, 10.0, 14.7),
    ("dense_fp8", "32768x1024", 64): Target(15.1, 10.0, 15.1),
    ("dense_fp8", "4096x8192", 1): Target(18.6, 10.0, 18.6),
    ("dense_fp8", "4096x8192", 16): Target(15.5, 10.0, 15.5),
    ("dense_fp8", "4096x8192", 64): Target(15.5, 10.0, 15.5),
    ("dense_fp8", "8192x4096/8", 1): Target(14.2, 10.0, 14.2),
    ("dense_fp8", "8192x4096/8", 16): Target(13.6, 10.0, 13.6),
    ("dense_fp8", "8192x4096/8", 64): Target(13.7, 10.0, 13.7),
    ("dense_fp8", "1536x4096", 1): Target(10.0, peer=10.0),
    ("dense_fp8", "1536x4096", 16): Target(8.8, peer=8.8),
    ("dense_fp8", "1536x4096", 64): Target(8.6, peer=8.6),
    **_peers("dense_fp8", "32768x1024", b256=22.7),
    **_peers("dense_fp8", "4096x8192", b256=22.3),
    **_peers("dense_fp8", "8192x4096/8", b256=18.1),
    **_peers("dense_fp8", "1536x4096", b256=9.7),
}

# Time over the floor of a whole step: (required, goal) of (model, batch, context).
STEP_TARGETS: dict[tuple[str, int, int], tuple[float, float]] = {
    ("flash", 64, 128 * 1024): (1.5, 1.3),
    ("flash", 1, 1 << 20): (1.6, 1.4),
    ("flash", 256, 8 * 1024): (1.6, 1.4),
}
# ms of a prefill step: (required, goal) of (model, batch, context, chunk).
PREFILL_TARGETS: dict[tuple[str, int, int, int], tuple[float, float]] = {
    ("flash", 1, 128 * 1024, 4096): (160, 125),
    ("flash", 1, 8 * 1024, 4096): (90, 75),
}
# The same of whole layers: of (model, layers, batch).
MODEL_TARGETS: dict[tuple[str, int, int], tuple[float, float]] = {
    ("flash", 12, batch): (1.7, 1.4) for batch in (1, 64, 256)
}
# ms of a step on several devices: (required, goal) of (model, layers, devices, batch, context).
MESH_TARGETS: dict[tuple, tuple[float, float]] = {
    ("flash", 43, 2, 1, 8192): (7.0, 4.5),
    ("flash", 43, 2, 64, 128 * 1024): (32.0, 24.0),
    ("flash", 43, 2, 256, 8192): (42.0, 30.0),
}
# The same of steps with drafts, ms of a token that is emitted.
DRAFT_TARGETS: dict[tuple, tuple[float, float]] = {("flash", 43, 2, 1, 8192): (4.2, 2.7)}
