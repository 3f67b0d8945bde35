"""Makes the pages of results from the records of runs (records.py). Imports no jax.

python benchmarks/render.py [DIR]            writes DIR/RESULTS.md, README.md and its picture from DIR/records
python benchmarks/render.py [DIR] --check    writes nothing, fails if README.md or the picture differs
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from overview import DEVICE, PICTURE, overview, picture
from records import TABLES, load
from sections import DETAIL, FIRST, HEAD, MEASURING, SECTIONS, Section
from tables import columns_of, number, percent, table_of
from targets import PEERS, elsewhere, judged

from dsv4_jax.bench.records import dumps
from dsv4_jax.errors import CacheError, OptionError
from dsv4_jax.output import open_output

__all__ = ["Entry", "latest", "main", "newest", "pages"]


class Entry(NamedTuple):
    """A row with the file and the record it is from."""

    row: dict[str, Any]
    file: str
    record: dict[str, Any]


TIMERS = {
    "graph": "CUDA graphs",
    "profiler": "Profiler",
    "chain": "One of a chain in an executable",
    "wall": "Wall time of calls from JAX, dispatch included",
}
OURS = ("cuda", "pallas", "triton", "xla")
ANYWHERE = ("simulate", "acceptance")  # tables of what no device changes
# Fields of rows that say what was required when they were measured.
TOLD = ("verdict", "peer_us", "required_us", "goal_us", "required_ms", "required_over_floor", "required_of_copy")
VERDICTS = {"goal": "goal met", "required": "met", "missed": "missed"}


def pages(folder: pathlib.Path) -> dict[str, str]:
    """Returns the text of each file that is made from `folder`/records: all results, the first page of them, its
    picture.

    Raises:
        OptionError: there are no records, or one is not valid.
    """
    entries = _entries(folder / "records")
    rows = [entry.row for entry in entries if entry.record["device"] == DEVICE or entry.row["table"] in ANYWHERE]
    try:
        first = overview(rows)
        detail = [DETAIL, *filter(None, (_section(section, entries) for section in SECTIONS))]
        return {
            "RESULTS.md": "\n".join([HEAD, first, *detail]),
            "README.md": FIRST + first + MEASURING,
            PICTURE: picture(rows),
        }
    except KeyError as error:
        raise OptionError(f"a record in {folder / 'records'} has a row without {error}") from error


def _entries(folder: pathlib.Path) -> list[Entry]:
    """Returns the rows of a folder that are shown, with what is required of them."""
    entries = latest(Entry(row, file, record) for file, record in load(folder).items() for row in record["rows"])
    return [entry._replace(row=_with_targets(*entry)) for entry in entries]


def _with_targets(row: dict[str, Any], file: str, record: dict[str, Any]) -> dict[str, Any]:
    """Judges a row of `dsv4-jax bench`, which knows of no targets; the scripts here judge what they measure."""
    told = any(row.get(name) is not None for name in TOLD)
    if told or not record["command"].startswith("dsv4-jax bench "):
        return row
    copy = (record.get("ceilings") or {}).get("copy_gb_per_s")
    return elsewhere(judged(row, copy and 1e9 * copy), record["device"])


def newest(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the records of a folder with the rows that the page shows alone. Raises `OptionError` as `pages`."""
    records = load(folder)
    entries = latest(Entry(row, file, one) for file, one in records.items() for row in one["rows"])
    subjects = {section.subject for section in SECTIONS}
    shown = {id(e.row) for e in entries if e.row["table"] != "facts" or e.row["subject"] in subjects}
    return {
        file: record | {"rows": [row for row in record["rows"] if id(row) in shown]} for file, record in records.items()
    }


def latest(entries: Iterable[Entry]) -> list[Entry]:
    """Keeps of entries with the same key and device the last, where the first stood; tuning and failures go."""
    found: dict[tuple, Entry] = {}
    for entry in entries:
        row = entry.row
        if not (row.get("tuning") or row.get("problem")):
            key = (row["table"], entry.record["device"], *(row.get(name) for name in TABLES[row["table"]].key.split()))
            found[key] = entry
    return list(found.values())


def _section(section: Section, entries: list[Entry]) -> str:
    """Writes a section: title, text, a table for each device and timer, and the records; "" if there are none."""
    parts = [f"## {section.title}\n\n{textwrap.fill(section.about, 120, break_on_hyphens=False)}\n"]
    used = []
    for timer, title in TIMERS.items():
        picked = [e for e in entries if e.row.get("op") in section.ops and e.row["timer"] == timer]
        for device, mine in _by_device(picked).items():
            parts.append(f"{title}, {device}:\n\n{_ops(mine, several=len(section.ops) > 1)}")
            used += mine
    for device, mine in _by_device([e for e in entries if e.row["table"] == section.table]).items():
        shown = _beside(mine) if section.table == "swap" else mine
        parts.append(f"{device}:\n\n{columns_of((e.row for e in shown), COLUMNS[section.table], MADE)}")
        used += mine
    facts = [e for e in entries if e.row["table"] == "facts" and e.row["subject"] == section.subject]
    for device, mine in _by_device(facts).items():
        text = _sentence(mine) if section.inline else columns_of((e.row for e in mine), COLUMNS["facts"], MADE)
        parts.append(f"{device}:\n\n{text}")
        used += mine
    if not used:
        return ""
    parts += [f"{section.picture}\n"] if section.picture else []
    sources = {e.file: e.record for e in used}
    lines = [
        f"* [{file}](records/{file}), commit {record['commit']}: `{record['command']}`{_ceilings(record)}"
        for file, record in sorted(sources.items())
    ]
    return "\n".join([*parts, "\n".join(lines) + "\n"])


def _by_device(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.record["device"], []).append(entry)
    return found


def _ceilings(record: dict[str, Any]) -> str:
    found = [f"{_ceiling_name(name)} {number(value)}" for name, value in (record.get("ceilings") or {}).items()]
    return f" ({'; '.join(found)})" if found else ""


def _ceiling_name(name: str) -> str:
    return name.replace("_gb_per_s", ", GB/s:").replace("_tflop_per_s", ", TFLOP/s:").replace("_", " ")


# Ops: a line for each shape and batch, a column for each implementation, the peer beside them


def _ops(entries: list[Entry], *, several: bool) -> str:
    shapes = list(dict.fromkeys((e.row["op"], e.row["shape"]) for e in entries))
    lines: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for entry in sorted(entries, key=lambda e: (shapes.index((e.row["op"], e.row["shape"])), e.row["batch"])):
        row = entry.row
        lines.setdefault((row["op"], row["shape"], row["batch"]), []).append(row)
    ways = {(e.row["implementation"], e.row.get("variant") or "") for e in entries}
    order = sorted(ways, key=lambda way: (way[0] not in OURS, OURS.index(way[0]) if way[0] in OURS else 0, way))
    peer = PEERS.get(entries[0].row["op"], "peer")
    table = [
        [
            "shape",
            "batch",
            *(", ".join(filter(None, way)) for way in order),
            peer,
            "ratio",
            "MB",
            "of copy",
            "required / goal",
            "verdict",
        ]
    ]
    for (op, shape, batch), rows in lines.items():
        cells = {(row["implementation"], row.get("variant") or ""): row for row in rows}
        # What is compared: the fastest kind of implementation, as it runs by default and where it has a target.
        first = next(way[0] for way in order if way in cells)
        judged = [
            cells[way] for way in order if way in cells and way[0] == first and (not way[1] or _judged(cells[way]))
        ]
        peers = [row["peer_us"] for row in rows if row.get("peer_us")]
        table.append(
            [
                f"{op} {shape}" if several else shape,
                number(batch),
                *(number(_us(cells[way])) if way in cells else "" for way in order),
                number(peers[-1]) if peers else "",
                _each(judged, lambda row: f"{_middle(_us(row)) / peers[-1]:.2f}") if peers else "",  # noqa: B023
                _each(judged, lambda row: number(round(row["bytes"] / 1e6)) if row.get("bytes") else ""),
                _each(judged, lambda row: percent(row["of_copy"]) if row.get("of_copy") else ""),
                _target(judged),
                _each(judged, lambda row: VERDICTS.get(row.get("verdict") or "", "")),
            ]
        )
    return table_of(table)


def _judged(row: dict[str, Any]) -> bool:
    return row.get("verdict") is not None


def _us(row: dict[str, Any]) -> Any:
    return row["kernel_us"] if row.get("kernel_us") is not None else row["us"]


def _each(rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """Joins the cells of the judged rows; one alone where all are the same."""
    cells = [text for row in rows if (text := cell(row))]
    return " / ".join(cells if len(set(cells)) > 1 else cells[:1])


def _target(judged: Sequence[dict[str, Any]]) -> str:
    for row in judged:
        shares = [row.get("required_of_copy"), row.get("goal_of_copy")]
        if any(shares):
            return " / ".join(percent(x) for x in shares if x) + " of copy"
        times = [row.get("required_us"), row.get("goal_us")]
        if any(times):
            return " / ".join(number(x) if x else "-" for x in times).removesuffix(" / -")
    return ""


# Other tables: a line for each row


def _floor(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {number(us / 1e3)}" for name, us in (row.get("floor_us") or {}).items())
    return (number(row["floor_ms"]) if row.get("floor_ms") else "") + (f" ({parts})" if parts else "")


def _kinds(row: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in (row.get("kinds") or {}).items())
    return number(row["layers"]) + (f" ({kinds})" if kinds else "")


def _devices(row: dict[str, Any]) -> str:
    devices, tensor = row.get("devices") or 1, row.get("tensor") or 1
    carried = ", XLA's collectives" if row.get("exchange") == "xla" else ""
    return f"{devices // tensor} x {tensor}{carried}" if devices > 1 else ""


def _bounds(row: dict[str, Any]) -> str:
    signs = {"at_least": ">=", "at_most": "<="}
    return ", ".join(f"{sign} {number(row[name])}" for name, sign in signs.items() if row.get(name) is not None)


def _share(row: dict[str, Any], name: str) -> str:
    spread = row.get(f"{name}s")
    return percent(row[name]) + (f" ({percent(spread)})" if spread else "") if row.get(name) is not None else ""


def _joined(row: dict[str, Any], between: str, *names: str) -> str:
    return between.join(number(row[name]) for name in names if row.get(name) is not None)


def _interval(form: str, name: str) -> Callable[[dict[str, Any]], str]:
    def made(row: dict[str, Any]) -> str:
        mean, half = row.get(name), row.get(f"{name}_half")
        return "" if mean is None else f"{mean:{form}}" + ("" if half is None else f" ± {half:{form.lstrip('+')}}")

    return made


# Columns that are made of several fields.
MADE: dict[str, Callable[[dict[str, Any]], str]] = {
    "accepted": _interval(".1%", "accepted"),
    "after": _interval(".1%", "accepted_after_others"),
    "bounds": _bounds,
    "change": _interval("+.5f", "loss_change"),
    "devices": _devices,
    "drafts": lambda row: (
        f"{row['drafts']}{' by DSpark' * (row.get('draft_head') == 'dspark')}" if row.get("drafts") else ""
    ),
    "floor": _floor,
    "kinds": _kinds,
    "kl": _interval(".2e", "kl"),
    "loss": _interval(".4f", "loss"),
    "head": lambda row: "DSpark" if row.get("head") == "dspark" else "MTP",
    "host": lambda row: ", ".join(f"{name} {number(us)}" for name, us in (row.get("host_us") or {}).items()),
    "limits": lambda row: _joined(row, " / ", "required_over_floor", "goal_over_floor", "required_ms", "goal_ms"),
    "load": lambda row: _joined(row, " to ", "load_from", "load_to"),
    "read": lambda row: _share(row, "read_share"),
    "same entries": _interval(".2%", "same_entries"),
    "same token": _interval(".2%", "same_token"),
    "verdict": lambda row: VERDICTS.get(row.get("verdict") or "", ""),
    "settings": lambda row: ", ".join(f"{name} {number(us)}" for name, us in row["us"].items()),
    "write": lambda row: _share(row, "write_share"),
}
# Table -> its columns: see `tables.columns_of`.
COLUMNS: dict[str, str] = {
    "steps": "model = model | requests = batch | context = context:tokens | chunk = chunk | steps a call = loop | "
    "key split = key_split | ms = step_ms | floor, ms = @floor | over the floor = over_floor:times | "
    "tokens/s = tokens_per_s | sum of kernels, ms = kernel_ms | temporaries, MB = temp_mb | host, us = dispatch_us | "
    "required / goal = @limits | verdict = @verdict",
    "models": "model = model | numerics = numerics | devices = @devices | layers = @kinds | requests = batch | "
    "context = context:tokens | chunk = chunk | steps a call = loop | drafts = @drafts | ms = step_ms | "
    "a token, ms = token_ms | verifying alone, ms = verify_ms | drafting, ms = drafting_ms | "
    "its floor, ms = drafting_floor_ms | exchanges alone, ms = exchange_ms | a layer = layer_ms | "
    "floor, ms = @floor | over the floor = over_floor:times | GB = moved_gb | GB/s = gb_per_s | experts = experts | "
    "of a stage = draft_experts | sum of kernels, ms = kernel_ms | launches = launches | "
    "tokens/s = tokens_per_s | host, us = dispatch_us | required / goal = @limits | verdict = @verdict",
    "generate": "model = model | layers = layers | prompts = prompts | tokens of prompts = prompt_tokens | "
    "steps a call = decode_steps | prefill, tokens/s = prefill_tokens_per_s | decode, tokens/s = decode_tokens_per_s | "
    "ms a step = step_ms | the step alone, ms = bench_step_ms | host, us = @host",
    "sampling": "rows = batch | vocabulary = vocabulary | us by settings = @settings",
    "engine": "model = model | layers = layers | prompts = prompts | ms a step = step_ms",
    "serve": "model = model | layers = layers | streams = streams | tokens of prompts = prompt_tokens | "
    "of answers = new_tokens | temperature = temperature | through = through | tokens/s = tokens_per_s | "
    "first token, ms = first_ms | p99 = first_p99_ms | between tokens, ms = between_ms | p99 = between_p99_ms",
    "quality": "weights = weights | numerics = numerics | rows = kv_format | index keys = index_format | "
    "key split = key_split | kernels = implementation | tokens = tokens | context = context:tokens | "
    "loss = @loss | change = @change | KL = @kl | same token = @same token | same entries = @same entries",
    "acceptance": "weights = weights | numerics = numerics | by = @head | temperature = temperature | "
    "kept by the rule = rule | draft = draft | places = places | "
    "accepted = @accepted | after others = @after | tokens a step = tokens_a_step",
    "swap": "blocks = blocks | ids = ids | direction = direction | kernel, us = kernel_us | "
    "kernel = kernel_of_copy:percent | a call, us = us | calls in a row = of_copy:percent | "
    "required = required_of_copy:percent | plain XLA = xla:percent | "
    "launch per layer and leaf = launch per layer and leaf:percent | memcpy per piece = memcpy per piece:percent",
    "store": "= what | load = @load | write, GB/s = write_gb_per_s | write, share = @write | "
    "read, GB/s = read_gb_per_s | read, share = @read",
    "simulate": "trace = trace | policy = policy | hits = hit_rate:percent | "
    "of an endless cache's = of_endless:percent | of a clairvoyant one's = of_clairvoyant:percent | "
    "hits on the host = host_hit_rate:percent | recomputed tokens, M = recomputed_tokens:millions | "
    "to the host, GiB = out_gib | back, GiB = in_gib | first token, mean, s = first_token_mean_s | "
    "p99, s = first_token_p99_s | steps = steps",
    "facts": "= what | measured = measured | unit = unit | required = @bounds | verdict = verdict",
}


def _beside(entries: Sequence[Entry]) -> list[Entry]:
    """Puts the shares of other schemes of a swap into the line of ours."""
    lines: dict[tuple, Entry] = {}
    for row, file, record in entries:
        key = row["blocks"], row["ids"], row["direction"]
        line = lines.setdefault(key, Entry({}, file, record))
        line.row.update(row if row["implementation"] == "ours" else {row["implementation"]: row.get("of_copy")})
    return list(lines.values())


def _sentence(facts: Sequence[Entry]) -> str:
    shown = (f"{e.row['what']}: {number(e.row['measured'])} {e.row.get('unit') or ''}".strip() for e in facts)
    return textwrap.fill("; ".join(shown) + ".", 120) + "\n"


def _middle(value: Any) -> float:
    return sum(value) / 2 if isinstance(value, list) else value


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 1 if a page is not up to date, 2 if there is nothing to make it from."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("folder", nargs="?", type=pathlib.Path, metavar="DIR", default=pathlib.Path(__file__).parent)
    command.add_argument("--check", action="store_true", help="write nothing, fail if what is kept differs")
    args = command.parse_args(argv)
    try:
        return _check(args.folder) if args.check else _write(args.folder)
    except (CacheError, OSError) as error:
        print(f"render.py: error: {error}", file=sys.stderr)
        return 2


def _check(folder: pathlib.Path) -> int:
    """Compares what the repository keeps of the pages; RESULTS.md is made where it is read."""
    kept = {folder / name: text for name, text in pages(folder).items() if name != "RESULTS.md"}
    stale = [path for path, text in kept.items() if not path.is_file() or path.read_bytes() != text.encode()]
    for path in stale:
        print(f"{path} is not what {folder / 'records'} gives: run python benchmarks/render.py", file=sys.stderr)
    return int(bool(stale))


def _write(folder: pathlib.Path) -> int:
    """Writes the pages, and of the records what the pages show."""
    made = pages(folder)
    for name, record in newest(folder / "records").items():
        if record["rows"]:
            made[f"records/{name}"] = dumps(record)
        else:
            (folder / "records" / name).unlink()
    for name, text in made.items():
        with open_output(folder / name, encoding="utf-8") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
