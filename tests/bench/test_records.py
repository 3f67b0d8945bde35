"""Records of runs: every committed file has the one form, and the pages of results are what they give."""

from __future__ import annotations

import json
import pathlib
import shutil
import xml.etree.ElementTree

import pytest
from records import TABLES, check, load
from render import COLUMNS, Entry, latest, main, pages
from sections import SECTIONS
from tables import number, percent
from targets import elsewhere

from dsv4_jax.bench.records import Measurement, commit, dumps, new_record
from dsv4_jax.bench.shapes import OPS
from dsv4_jax.errors import OptionError

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
ROW = {"table": "ops", "op": "top_k", "shape": "flash-8k", "batch": 1, "implementation": "cuda", "timer": "graph"}


def record(*rows: dict, **changes) -> dict:
    made = new_record(rows, device="H", command="bench", software={}, ceilings={})
    return made | {"commit": "0123abc", "date": "2026-01-02"} | changes


def test_the_page_is_what_the_records_give(capsys):
    assert main([str(FOLDER), "--check"]) == 0, capsys.readouterr().err


def test_every_record_is_shown():
    shown = pages(FOLDER)["RESULTS.md"]
    assert [name for name in load(FOLDER / "records") if name not in shown] == []


def test_every_section_of_a_table_has_columns():
    assert {section.table for section in SECTIONS} - {None, "", "ops", "facts"} <= set(COLUMNS)


def test_every_op_and_table_has_its_place_on_the_page():
    assert {
        *OPS,
        "dense_bf16",
        "dense_e4m3",
        "dense_fp8",
        "exchange",
        "hyper_connection",
        "moe",
        "moe_e4m3",
        "queries",
        "route",
    } == {op for section in SECTIONS for op in section.ops}
    assert set(TABLES) == {section.table for section in SECTIONS if section.table} | {"ops", "facts"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema 2, expected 1"),
        ({"commit": None}, "the record says no commit"),
        ({"date": "22.11.2026"}, "date '22.11.2026' is not YYYY-MM-DD"),
        ({"quick": True}, "a quick run measures nothing"),
        ({"host": "x"}, "unknown field 'host'"),
        ({"rows": []}, "the record says no rows"),
        ({"rows": {}}, "not an object with rows"),
        ({"rows": [{"table": "tops"}]}, "row 0 names no table of ops, steps"),
        ({"rows": [ROW, ROW | {"must_us": 3}]}, "row 1 has an unknown field 'must_us'"),
        ({"rows": [ROW | {"kernel_us": "3"}]}, "row 0: kernel_us is '3', expected number"),
        ({"rows": [ROW | {"kernel_us": [1, 2, 3]}]}, "row 0: kernel_us is"),
        ({"rows": [ROW | {"batch": True}]}, "row 0: batch is True"),
    ],
)
def test_what_is_no_record_says_why(changes, message):
    with pytest.raises(OptionError, match=message):
        check(record(ROW) | changes)


def test_a_record_of_today_is_one_to_keep(monkeypatch):
    commit.cache_clear()
    monkeypatch.setenv("DSV4_COMMIT", "abcdef0")
    made = new_record([ROW], device="H", command="bench", software={"jax": "0"}, ceilings={"copy_gb_per_s": 1.5})
    commit.cache_clear()
    assert check(json.loads(json.dumps(made)))["commit"] == "abcdef0" and made["rows"] == [ROW]


def test_targets_and_peers_are_those_of_an_h200():
    judged = ROW | {"kernel_us": 2.0, "required_us": 4.5, "goal_us": 3.0, "peer_us": 3.1, "verdict": "goal"}
    share = judged | {"required_of_copy": 0.8}
    step = {"table": "steps", "required_ms": 90, "verdict": "missed"}
    fact = {"table": "facts", "verdict": "required"}

    def kept(device: str) -> list[dict]:
        return [elsewhere(row, device) for row in (judged, share, step, fact)]

    assert kept("2 x NVIDIA H200") == [judged, share, step, fact]
    none = dict.fromkeys(("required_us", "goal_us", "peer_us", "verdict"))
    left = [judged | none, share | {"peer_us": None}, step | {"required_ms": None, "verdict": None}, fact]
    assert kept("NVIDIA H100 80GB HBM3") == left


def test_rows_of_the_command_are_judged_where_they_are_shown(tmp_path):
    """`dsv4-jax bench` knows of no targets: they are put to its rows, and to no others, and no file gets them."""
    row = ROW | {"timer": "profiler", "kernel_us": 3.25, "bytes": 10**6}
    (tmp_path / "records").mkdir()
    for command, judged in (("dsv4-jax bench top_k", True), ("python peer.py", False)):
        (tmp_path / "records" / "x.json").write_text(dumps(record(row, device="NVIDIA H200", command=command)))
        assert main([str(tmp_path)]) == 0
        assert ("| 4.5 / 3 | met |" in (tmp_path / "RESULTS.md").read_text()) is judged
        assert load(tmp_path / "records")["x.json"]["rows"] == [row]


def test_the_last_measurement_counts():
    def entry(us: float, file: str, **changes) -> Entry:
        return Entry(ROW | {"kernel_us": us} | changes, file, record(ROW))

    entries = [
        entry(3.0, "a"),
        entry(2.0, "a", batch=64),
        entry(2.5, "b"),
        entry(9.0, "b", tuning=True),
        entry(8.0, "b", problem="no GPU"),
        entry(7.0, "b", variant="warm"),
    ]
    assert [(e.row["kernel_us"], e.file) for e in latest(entries)] == [(2.5, "b"), (2.0, "a"), (7.0, "b")]


def test_a_new_record_changes_its_lines_alone(tmp_path, capsys):
    """A record dropped into the folder is enough; devices are not mixed."""
    shutil.copytree(FOLDER, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("*.py", "*.cu"))
    folder = tmp_path / "benchmarks"
    assert main([str(folder)]) == 0
    row = ROW | {"kernel_us": 2.125, "required_us": 4.5, "peer_us": 3.09, "verdict": "required"}
    new = record(date="2030-01-01", device="NVIDIA H200") | {"rows": [row]}
    (folder / "records" / "2030-01-01-x.json").write_text(json.dumps(new))
    before = (folder / "RESULTS.md").read_text().splitlines()
    assert main([str(folder)]) == 0
    after = (folder / "RESULTS.md").read_text().splitlines()
    assert [line for line in after if line not in before] == [
        "| flash-8k | 1 | 2.12 |  | 3.09 | 0.69 |  |  | 4.5 | met |",
        "* [2030-01-01-x.json](records/2030-01-01-x.json), commit 0123abc: `bench`",
    ]
    assert len(after) == len(before) + 1
    kept = {path.name: path.read_text() for path in (folder / "records").glob("*.json")}
    same = [
        file
        for file, one in load(folder / "records").items()
        for r in one["rows"]
        if ROW.items() <= r.items() and one["device"] == "NVIDIA H200" and r.get("variant") is None
    ]
    assert same == ["2030-01-01-x.json"], "the row before is history"
    assert all(text.count("\n") == len(json.loads(text)["rows"]) + 2 for text in kept.values()), "one row a line"
    (folder / "records" / "2030-01-01-x.json").write_text(json.dumps(new | {"device": "NVIDIA B200"}))
    assert "CUDA graphs, NVIDIA B200:" in pages(folder)["RESULTS.md"]


def test_the_first_page_says_how_fast_models_run(tmp_path, capsys):
    """Steps of the whole model, of a few layers and of a chunk, and a kernel, as one reads them; then out of date."""
    (tmp_path / "records").mkdir()
    sizes = dict(model="flash", layers=43, batch=64, context=131072, devices=2, tensor=1, exchange="cuda")
    model = {"table": "models"} | sizes | {"step_ms": 20.0, "floor_ms": 16.0, "over_floor": 1.25}
    few = model | {"layers": 12, "devices": 1, "batch": 1, "context": 8192, "step_ms": 1.5, "layer_ms": 0.125}
    chunk = few | {"table": "steps", "chunk": 4096, "step_ms": 100.0}
    slow, drafts = (
        model | {"step_ms": 22.0, "exchange": "xla"},
        model | {"drafts": 1, "step_ms": 24.0, "token_ms": 16.0},
    )
    spark = model | {"drafts": 5, "draft_head": "dspark", "step_ms": 32.0, "token_ms": 8.0}
    kernel = ROW | {"op": "attend", "shape": "csa-flash", "batch": 64, "kernel_us": 22.0, "peer_us": 44.0}
    chunk = {name: chunk[name] for name in (*TABLES["steps"].fields, "table") if name in chunk}
    made = record(device="NVIDIA H200") | {"rows": [model, slow, drafts, spark, few, chunk, kernel]}
    (tmp_path / "records" / "x.json").write_text(json.dumps(made))
    assert main([str(tmp_path)]) == 0 and main([str(tmp_path), "--check"]) == 0
    page, picture = (tmp_path / "README.md").read_text(), (tmp_path / "whole_models.svg").read_text()
    assert "| V4-Flash | 2 (experts split) | 64 | 128 Ki | 20.00 | 3,200 | 1.25x |" in page
    assert "| V4-Flash | 2 (experts split) | 64, 1 draft (1) | 128 Ki | 24.00 | 4,000 | 1.25x |" in page
    assert "| V4-Flash | 2 (experts split) | 64, 5 drafts by DSpark (1) | 128 Ki | 32.00 | 8,000 | 1.25x |" in page
    assert "(2)" not in page and "3.74 with five" in " ".join(page.split())
    assert "| V4-Flash | 12 of 43 | 1 | 8 Ki | 1.50 | 0.12 | 1.25x |" in page and "22.00" not in page
    assert "| V4-Flash, attention of all layers | 4,096 | 8 Ki | 100.0 | 40,960 |" in page
    assert "| attention of a CSA layer | 64 | 22.0 | 44.0 | FlashMLA | 0.50 |" in page
    shown = xml.etree.ElementTree.fromstring(picture)
    words = [text.text for text in shown.iter("{http://www.w3.org/2000/svg}text")]
    assert {"20.00 ms, 3,200 tokens/s", "100 ms, 40,960 tokens/s", "0.50 of FlashMLA's time"} <= set(words)
    assert (tmp_path / "RESULTS.md").read_text().count("3,200") == 1
    (tmp_path / "README.md").write_text(page.replace("3,200", "6,400"))
    capsys.readouterr()
    assert main([str(tmp_path), "--check"]) == 1
    assert "README.md is not what" in capsys.readouterr().err


def test_render_refuses(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2 and "there are no records in" in capsys.readouterr().err
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "x.json").write_text("{")
    assert main([str(tmp_path)]) == 2 and "x.json" in capsys.readouterr().err
    (tmp_path / "records" / "x.json").write_text(json.dumps(record({"table": "swap"})))
    assert main([str(tmp_path)]) == 2 and "has a row without" in capsys.readouterr().err


def test_numbers():
    numbers = [3, 3.0, 0.456, 18.512345, 130.94, 1316.6, 2247, [1, 2.5]]
    assert " | ".join(map(number, numbers)) == "3 | 3.0 | 0.46 | 18.51 | 130.9 | 1,317 | 2,247 | 1 to 2.5"
    assert [percent(x) for x in (0.938, 0.5, 1.01, [0.88, 0.94])] == ["93.8 %", "50 %", "101 %", "88 to 94 %"]


def test_the_time_that_counts_is_the_kernels():
    made = Measurement("gather", "rows", 1, "cuda", us=3.0)
    assert made.best_us == 3.0 and Measurement("gather", "rows", 1, "cuda", us=3.0, kernel_us=2.0).best_us == 2.0
