"""What each op and each step must reach on one H200 (required), should reach (goal), and what the best peer needs.

Peers (`PEERS`) were measured on the same kind of machine with CUDA graphs. Where the goal is to be below the peer, it
is the peer's time. Imports no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["PEERS", "TARGETS", "Target", "elsewhere", "judged", "verdict"]


@dataclasses.dataclass(frozen=True)
class Target:
    """Times in us, or shares of the copy ceiling; None where nothing was set or measured."""

    required: float | None = None
    goal: float | None = None
    peer: float | None = None
    required_of_copy: float | None = None
    goal_of_copy: float | None = None


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
# op | shape | batch: required goal peer, in us or, with a per cent sign, as a share of the copy ceiling; "-": none.
# append: the peer's kernel also normalises and rotates the queries. index_scores: the peer's keys are fp8. dense_fp8:
# the peer's rows are quantised beforehand; goals are 75 % of a read of the weights.
_OPS = """
append         | fused      | 1: 3 2 2.2, 64: 5 3 7.3, 1024: 20 12 46.9
compress_csa   | decode     | 1: 6 4.2 4.2, 64: 9 6.6 6.6, 256: - - 7.9
compress_csa   | prefill    | 8192: - - 30.0, 65536: 60% 80% 199.0
compress_index | decode     | 1: 3.5 3 3.6, 64: 4 3.5 4.1, 256: - - 5.5
compress_index | prefill    | 8192: - - 15.6, 65536: 60% 80%
compress_hca   | decode     | 64: 12 12 36.0
compress_hca   | prefill    | 8192: - - 95.0, 65536: 60% 80%
gather         | rows       | 262144: 75% 85%, 1048576: 85% 90%
kv_store       | bf16       | 65536: 80%
kv_store       | fp8        | 65536: 80% 90%
index_scores   | fp4-8k     | 64: 8 6 8.4
index_scores   | fp4-32k    | 1: 3.8 3 3.8
index_scores   | fp4-128k   | 1: 4.3 3.6 4.3, 64: 55 42 70.5
index_scores   | fp4-32k-prefill | 4096: 600 450 500
index_scores   | fp4-128k-prefill | 4096: 2400 1900 2250
index_scores   | fp8-8k     | 1: - - 3.3, 64: - - 8.4
index_scores   | fp8-32k    | 1: 4.2 3.5 3.8
index_scores   | fp8-128k   | 1: - - 4.3, 16: - - 22.0, 64: 74 68 70.5, 256: 275 255 262.9
index_scores   | fp8-1m     | 1: 13.5 11 13.0, 16: - - 135.2
top_k          | flash-8k   | 1: 4.5 3 3.09, 64: 4.5 3.5 3.52
top_k          | flash-32k  | 1: 6 4 4.46
top_k          | flash-128k | 1: 9.5 7 8.9, 16: - - 10.8, 64: 12.5 10 12.7, 256: 28 22 26.9
top_k          | flash-1m   | 1: 16 12 15.3, 16: 28 22 26.5
top_k          | pro-128k   | 64: - - 13.3
top_k          | pro-1m     | 1: - - 15.7
attend         | swa-flash  | 1: - - 11.5, 64: - - 14.0, 256: - - 29.4
attend         | hca-flash-1m | 1: - - 28.8, 16: - - 82.9, 64: - - 244.5
attend         | hca-pro-128k | 1: - - 14.6, 64: - - 53.2, 256: - - 200.5
attend         | hca-flash-128k | 1: 18 15.1 15.1, 16: - - 22.6, 64: 75 60.2 60.2, 256: 250 141.5 141.5
attend         | csa-pro    | 1: 20 14.7 14.7, 16: - - 28.0, 64: 100 53.3 53.3, 256: 380 201.0 201.0
attend         | csa-flash  | 1: 15 13.0 13.0, 16: 25 18.2 18.2, 64: 50 44.5 44.5, 128: 80 46.2 46.2, 256: 150 88.6 88.6
moe            | flash      | 1: 40 27 45.3, 16: 370 310 412, 64: 860 750 972, 256: 1250 980 1440, 1024: 1900 1400 2023
moe            | flash, half of the experts | 64: 542 473 613, 256: 670 525 772, 1024: 1499 1104 1596
route          | flash      | 64: 6.0
exchange       | sum_to_all, 16 KiB | 8: 5.0 3.9
exchange       | sum_to_all, 512 KiB | 2: 10.0 6.0
exchange       | all_gather, sum_to_owner, 512 KiB | 2: 10.0 6.0
dense_fp8      | 32768x1024 | 1: 14.0 10.0 14.0, 16: 14.7 10.0 14.7, 64: 15.1 10.0 15.1, 256: - - 22.7
dense_fp8      | 4096x8192  | 1: 18.6 10.0 18.6, 16: 15.5 10.0 15.5, 64: 15.5 10.0 15.5, 256: - - 22.3
dense_fp8      | 8192x4096/8 | 1: 14.2 10.0 14.2, 16: 13.6 10.0 13.6, 64: 13.7 10.0 13.7, 256: - - 18.1
dense_fp8      | 1536x4096  | 1: 10.0 - 10.0, 16: 8.8 - 8.8, 64: 8.6 - 8.6, 256: - - 9.7
"""


def _read(table: str) -> dict[tuple[str, str, int], Target]:
    """Reads a table of targets as `_OPS` is written: (op, shape, batch) -> target."""
    found = {}
    for line in table.strip().splitlines():
        op, shape, cells = (field.strip() for field in line.split(" | "))
        for cell in cells.split(", "):
            batch, _, given = cell.partition(": ")
            fields: dict[str, float] = {}
            for name, text in zip(("required", "goal", "peer"), given.split(), strict=False):
                if text.endswith("%"):
                    fields[f"{name}_of_copy"] = int(text[:-1]) / 100
                elif text != "-":
                    fields[name] = float(text) if "." in text else int(text)
            found[op, shape, int(batch)] = Target(**fields)
    return found


TARGETS = _read(_OPS)
# Of steps: (required, goal). Time over the floor, of (model, batch, context).
_STEPS = {
    ("flash", 64, 128 * 1024): (1.5, 1.3),
    ("flash", 1, 1 << 20): (1.6, 1.4),
    ("flash", 256, 8 * 1024): (1.6, 1.4),
}
# ms of a prefill step, of (model, batch, context, chunk).
_PREFILLS = {("flash", 1, 128 * 1024, 4096): (160, 125), ("flash", 1, 8 * 1024, 4096): (90, 75)}
# Time over the floor of whole layers, of (model, layers, batch).
_MODELS = {("flash", 12, batch): (1.7, 1.4) for batch in (1, 64, 256)}
# ms of a step of whole layers on several devices, of (model, layers, devices, batch, context).
_MESHES = {
    ("flash", 43, 2, 1, 8192): (7.0, 4.5),
    ("flash", 43, 2, 64, 128 * 1024): (32.0, 24.0),
    ("flash", 43, 2, 256, 8192): (42.0, 30.0),
    ("flash", 43, 4, 1, 8192): (3.6, 2.8),
    ("flash", 43, 4, 64, 128 * 1024): (13.0, 10.0),
    ("flash", 43, 8, 1, 8192): (3.0, 2.2),
    ("flash", 43, 8, 256, 8192): (11.0, 8.0),
    ("pro", 61, 8, 1, 8192): (7.5, 5.5),
}
# The same of steps with drafts, ms of a token that is emitted: by an MTP layer, and by DSpark of the number of drafts.
_DRAFTS = {("flash", 43, 2, 1, 8192): (4.2, 2.7)}
_DSPARK = {("flash", 43, 2, 1, 8192): {3: (2.6, None), 5: (2.6, 2.0)}}
# ms that drafting by DSpark adds to a step of so many layers on one device, of (model, layers, batch).
_DRAFTING = {("flash", 12, 1): (0.35, None)}


def verdict(us: float | None, required: float | None, goal: float | None) -> str | None:
    """ "goal", "required" or "missed"; None if there is no target or no time. If only a goal is set, it decides."""
    if us is None or (required is None and goal is None):
        return None
    if goal is not None and us <= goal:
        return "goal"
    return "required" if required is not None and us <= required else "missed"


def judged(row: Mapping[str, Any], copy: float | None = None) -> dict[str, Any]:
    """Returns a row of a record with what is required of it on an H200, and whether it is met, if anything is.

    Args:
        row: of the table "ops", "steps" or "models", as `dsv4-jax bench` writes it.
        copy: the copy ceiling of the same run, bytes per second; without it shares of a ceiling are not judged.
    """
    match row["table"]:
        case "ops":
            return _judged_op(row, copy)
        case "steps":
            shape = row["model"], row["batch"], row["context"]
            if row.get("chunk"):
                return _judged(row, _PREFILLS.get((*shape, row["chunk"])) if "over_floor" in row else None, "step_ms")
            return _judged(row, _STEPS.get(shape), "over_floor")
        case "models":
            place: Any = tuple(row.get(name) for name in ("model", "layers", "devices", "batch", "context"))
            if row.get("drafts") and row.get("draft_head") == "dspark":
                if row.get("devices", 1) == 1:
                    return _judged(row, _DRAFTING.get((row["model"], row["layers"], row["batch"])), "drafting_ms")
                return _judged(row, _DSPARK.get(place, {}).get(row["drafts"]), "token_ms")
            if row.get("drafts"):
                return _judged(row, _DRAFTS.get(place), "token_ms")
            if place in _MESHES:
                return _judged(row, _MESHES[place], "step_ms")
            alone = row.get("devices", 1) == 1
            limits = _MODELS.get((row["model"], row["layers"], row["batch"])) if alone else None
            return _judged(row, limits, "over_floor")
    return dict(row)


def _judged_op(row: Mapping[str, Any], copy: float | None) -> dict[str, Any]:
    target = TARGETS.get((row["op"], row["shape"], row["batch"]), Target())
    shares = {"required_of_copy": target.required_of_copy, "goal_of_copy": target.goal_of_copy}

    def us(name: str) -> float | None:
        share = shares[f"{name}_of_copy"]
        return 1e6 * row["bytes"] / (share * copy) if share and copy and row.get("bytes") else getattr(target, name)

    required, goal = us("required"), us("goal")
    time = row["kernel_us"] if row.get("kernel_us") is not None else row.get("us")
    found: dict[str, Any] = shares | {"required_us": required, "goal_us": goal, "peer_us": target.peer}
    found["verdict"] = verdict(time, required, goal)
    return dict(row) | {name: value for name, value in found.items() if value is not None}


def _judged(row: Mapping[str, Any], limits: tuple[float, float | None] | None, what: str) -> dict[str, Any]:
    """Judges one number of a row: a time in ms, or `over_floor`."""
    if limits is None or row.get(what) is None:
        return dict(row)
    required, goal = limits
    unit = "over_floor" if what == "over_floor" else "ms"
    found = {f"required_{unit}": required, f"goal_{unit}": goal}
    return dict(row) | found | {"verdict": verdict(row[what], required, goal)}


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
