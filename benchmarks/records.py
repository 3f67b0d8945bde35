"""Records of runs: what their rows may hold, and the ones that are kept in `records/`. Imports no jax.

A row names its table in `TABLES`, which says what it may hold; what a row leaves out is null. `dsv4_jax.bench.records`
writes records. Files of this form in `benchmarks/records/` are what `benchmarks/render.py` makes the pages of results
from.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from dsv4_jax.bench.records import SCHEMA, Measurement
from dsv4_jax.errors import OptionError
from dsv4_jax.untrusted import read_json

__all__ = ["TABLES", "Table", "check", "load"]

_MAX_BYTES = 1 << 26  # of a file
# "number": one, or [low, high] of several runs; "parts": numbers, or settings, by name.
Kind: TypeAlias = Literal["text", "number", "flag", "parts"]


@dataclasses.dataclass(frozen=True)
class Table:
    """Describes what rows of a table hold.

    Attributes:
        fields: name -> kind of value.
        key: names of the fields that identify a row: of two rows with the same key the later record's is shown.
    """

    fields: Mapping[str, Kind]
    key: str


def _fields(**kinds: str) -> dict[str, Kind]:
    """Returns kinds by name, of several names a kind: `text="what unit"`."""
    return {name: kind for kind, names in kinds.items() for name in names.split()}  # type: ignore[misc]


def _kind(annotation: str) -> Kind:
    base = annotation.removesuffix(" | None")
    kinds: dict[str, Kind] = {"str": "text", "bool": "flag", "int": "number", "float": "number"}
    return kinds.get(base, "parts")


TABLES: dict[str, Table] = {
    # Besides what `dsv4_jax.bench` measures: a setting tried beside the default (`tuning`: kept, not shown), targets
    # (times, or shares of the copy ceiling), the best other system's time, and whether rows keep their bits in other
    # batches. The timers here are "graph" (replays of a CUDA graph) and "chain" (what an executable takes more with one
    # more). A variant may also be "warm" (everything the kernel touches is in L2) or "8x4" (its tiles).
    "ops": Table(
        {f.name: _kind(str(f.type)) for f in dataclasses.fields(Measurement)}
        | _fields(
            text="verdict",
            number="required_us goal_us required_of_copy goal_of_copy peer_us",
            flag="tuning batch_invariant",
        ),
        "op shape batch implementation variant timer",
    ),
    # Whole decode steps, or of prefill with `chunk` tokens a request, as `step.measure_step` reports them; times are of
    # one step.
    "steps": Table(
        _fields(
            text="model implementation key_split verdict problem",
            number="layers batch context chunk loop compile_s cache_gb temp_mb command_buffers custom_calls step_ms "
            "dispatch_us first_dispatch_us floor_ms over_floor gb_per_s kernel_ms required_over_floor goal_over_floor "
            "tokens_per_s required_ms goal_ms",
            flag="cache_in_place",
            parts="floor_us kernels xla",
        ),
        "model batch context chunk loop implementation key_split",
    ),
    # Steps of whole layers with weights as released, of prefill with `chunk` tokens a request, as
    # `model.measure_model` reports them. `experts`: how many a layer reads, on average; `kinds`: layers of each kind of
    # attention; `layer_ms`: of the step, head and all. Of a step with drafts, which `draft_head` makes (None: an MTP
    # layer): `token_ms`: over the tokens that it is taken to give, `tokens_a_step`; `verify_ms`: of one that verifies
    # as many and drafts none; `drafting_ms`: what is left; `draft_experts`: how many a stage of DSpark reads.
    "models": Table(
        _fields(
            text="model implementation key_split exchange draft_head numerics verdict problem",
            number="layers batch context chunk devices tensor drafts loop compile_s weights_gb cache_gb temp_mb "
            "launches tokens_per_s experts token_ms exchange_ms required_ms goal_ms "
            "tokens_a_step verify_ms drafting_ms drafting_floor_ms draft_experts "
            "step_ms layer_ms dispatch_us first_dispatch_us floor_ms layer_floor_ms over_floor moved_gb gb_per_s "
            "kernel_ms required_over_floor goal_over_floor",
            flag="cache_in_place",
            parts="kinds floor_us kernels xla exchange_us",
        ),
        "model layers batch context chunk loop implementation key_split devices tensor drafts draft_head exchange "
        "numerics",
    ),
    # Prompts continued by `dsv4-jax generate`, as it reports them; `bench_step_ms`: the step as `models` times it.
    "generate": Table(
        _fields(
            text="model weights kv_format index_format sampling",
            number="layers devices tensor prompts decode_steps drafts max_batch chunk_tokens prompt_tokens new_tokens "
            "decoded decode_calls decode_rows cached_tokens cache_bytes load_s compile_s prefill_s decode_s "
            "prefill_tokens_per_s decode_tokens_per_s step_ms bench_step_ms pool_ranks host_memory preemptions",
            flag="prefix_caching",
            parts="host_us",
        ),
        "model layers devices tensor prompts prompt_tokens decode_steps drafts sampling",
    ),
    # `sample` by itself on the logits of a step, us by the rows' settings; and requests through an engine's thread.
    "sampling": Table(_fields(number="batch vocabulary", parts="us"), "batch vocabulary"),
    "engine": Table(_fields(text="model", number="layers prompts step_ms"), "model layers prompts"),
    # Streams through `dsv4-jax serve`, and through an engine alone, as clients see them.
    "serve": Table(
        _fields(
            text="model through",
            number="layers streams prompt_tokens new_tokens temperature tokens_per_s first_ms first_p99_ms between_ms "
            "between_p99_ms",
        ),
        "model layers streams prompt_tokens new_tokens temperature through",
    ),
    # A trained checkpoint on real text, as `quality.measure_quality` reports it: nats a token, shares of tokens and of
    # picked entries; `..._half` is half an interval of 95 %, `against` what KL, change and shares compare with.
    "quality": Table(
        _fields(
            text="weights numerics kv_format index_format key_split implementation against",
            number="tokens windows context requests chunk decoded loss loss_half loss_change loss_change_half kl "
            "kl_half same_token same_token_half same_entries same_entries_half decoded_loss decoded_loss_half "
            "decoded_kl decoded_kl_half seconds tokens_per_s",
        ),
        "weights numerics kv_format index_format key_split implementation context",
    ),
    # Drafts of its MTP layer (`head` None) or of DSpark's stages on the same text, as `acceptance.measure_acceptance`
    # reports them; `rule`: what keeps a draft (None: "coupled").
    "acceptance": Table(
        _fields(
            text="weights numerics kv_format index_format implementation head rule",
            number="temperature draft drafts accepted accepted_half accepted_after_others accepted_after_others_half "
            "tokens_a_step places windows context requests seconds",
        ),
        "weights numerics head rule temperature draft drafts kv_format index_format implementation context",
    ),
    # Blocks between the device and pinned host memory: times, and shares of the copy ceiling.
    "swap": Table(
        _fields(
            text="ids direction implementation problem",
            number="blocks us latency_us kernel_us gb_per_s of_copy kernel_of_copy required_of_copy",
        ),
        "blocks ids direction implementation",
    ),
    # The storage tier against the disk of the same round; shares: median, least and most of the rounds.
    "store": Table(
        _fields(
            text="what",
            number="load_from load_to write_gb_per_s read_gb_per_s write_share write_shares read_share read_shares",
        ),
        "what load_from",
    ),
    # Simulated traces: what a policy finds and moves.
    "simulate": Table(
        _fields(
            text="trace policy options",
            number="hit_rate host_hit_rate of_endless of_clairvoyant recomputed_tokens out_gib in_gib "
            "first_token_mean_s first_token_p99_s steps",
        ),
        "trace policy",
    ),
    # Single numbers, such as the manager's times.
    "facts": Table(
        _fields(text="subject what unit verdict", number="measured at_least at_most"),
        "subject what unit",
    ),
}
_TOP = _fields(text="commit date device command note", number="schema", flag="quick", parts="software ceilings")
_REQUIRED = ("schema", "commit", "date", "device", "command", "rows")


def load(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Reads the records of a folder, by file name, from the oldest to the newest (by date, then by name).

    Raises:
        OptionError: there is none, or a file does not hold a record that `check` accepts.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.name] = check(read_json(path, _MAX_BYTES))
        except (OptionError, ValueError) as error:
            raise OptionError(f"{path}: {error}") from None
    if not found:
        raise OptionError(f"there are no records in {folder}")
    return dict(sorted(found.items(), key=lambda item: (item[1]["date"], item[0].removesuffix(".json"))))


def check(record: Any) -> dict[str, Any]:
    """Returns the record if it is one to keep, else raises `OptionError`, which names the row and the field."""
    if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
        raise OptionError("not an object with rows")
    if record.get("schema") != SCHEMA:
        raise OptionError(f"schema {record.get('schema')!r}, expected {SCHEMA}")
    _check_values(record, {**_TOP, "rows": "list"}, "the record")
    for name in _REQUIRED:
        if not record.get(name):
            raise OptionError(f"the record says no {name}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"]):
        raise OptionError(f"date {record['date']!r} is not YYYY-MM-DD")
    if record.get("quick"):
        raise OptionError("a quick run measures nothing")
    for i, row in enumerate(record["rows"]):
        table = TABLES.get(str(row.get("table"))) if isinstance(row, dict) else None
        if table is None:
            raise OptionError(f"row {i} names no table of {', '.join(TABLES)}")
        _check_values(row, {**table.fields, "table": "text"}, f"row {i}")
    return record


def _check_values(values: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> None:
    for name, value in values.items():
        if name not in kinds:
            raise OptionError(f"{where} has an unknown field {name!r}")
        if value is not None and not _fits(value, kinds[name]):
            raise OptionError(f"{where}: {name} is {value!r}, expected {kinds[name]}")


def _fits(value: Any, kind: str) -> bool:
    if kind != "number":
        return isinstance(value, {"text": str, "flag": bool, "parts": dict, "list": list}[kind])
    if isinstance(value, list):
        return len(value) == 2 and all(_fits(x, kind) and not isinstance(x, list) for x in value)
    return isinstance(value, int | float) and not isinstance(value, bool)
