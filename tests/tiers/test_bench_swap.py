"""The swap benchmark runs, says what it found, and would notice a wrong byte."""

from __future__ import annotations

import json
import pathlib

import bench_swap
import pytest
import records

from .. import native


@pytest.mark.slow
def test_quick_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    native.load_cpu()
    path = tmp_path / "swap.json"
    report = bench_swap.main(["--quick", "--model", "tiny", "--only", "ours,baselines", "--json", str(path)])
    made = json.loads(path.read_text())
    assert records.check(made | {"quick": False, "commit": "0123abc"})
    written = [(r["implementation"], r["direction"], r["blocks"], r["ids"]) for r in made["rows"]]
    assert written == [(r["name"], r["direction"], r["blocks"], r["ids"]) for r in report["rows"]]
    assert [p["bytes"] for p in report["predicted"]] == [n * report["record_bytes"] for n in (1, 8)]
    ours = [row for row in report["rows"] if row["name"] == "ours"]
    assert {(r["direction"], r["blocks"], r["ids"]) for r in ours} == {
        (way, n, kind) for way in ("out", "in") for n in (1, 8) for kind in ("scattered", "consecutive")
    }
    for row in ours:
        assert row["gb_per_s"] * row["seconds"] * 1e9 == pytest.approx(row["blocks"] * report["record_bytes"])
        assert row["ratio"] == pytest.approx(row["gb_per_s"] * 1e9 / report["ceiling_bytes_per_s"][row["direction"]])
    assert all(row["problem"] for row in report["rows"] if row["name"] != "ours")  # no GPU: said, not left out
    memory = report["memory"]
    assert memory["swap_in"]["alias_size_in_bytes"] == memory["expected"]["cache"]
    assert "predicted" in capsys.readouterr().out.splitlines()[1]


def test_wrong_bytes_are_noticed() -> None:
    bench = bench_swap.make("tiny", 8, 0.001)
    with pytest.raises(SystemExit, match="wrong bytes"):  # nothing was swapped out yet
        bench_swap.check(bench, bench_swap.SwapPlan(*bench.ids(2, "scattered")), "this")


@pytest.mark.parametrize("arguments", [["--sizes", "4096"], ["--only", "theirs"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_swap.main(arguments)
    assert "error" in capsys.readouterr().err
