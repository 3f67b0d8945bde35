"""kill -9 in the middle of writes: nothing committed is lost, nothing torn is served."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from ..clock import PATIENCE

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("max_records", [16, 256], ids=["small", "roomy"])
@pytest.mark.parametrize(("mode", "rounds"), [("call", 50), ("time", 20)])
@pytest.mark.slow
def test_a_killed_writer_loses_nothing_committed_and_serves_nothing_torn(tmp_path, mode, rounds, max_records):
    command = [
        sys.executable,
        "-m",
        "tests.stores.crash_rounds",
        tmp_path / "slab",
        mode,
        str(rounds),
        str(max_records),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(reports) == rounds
    for report in reports:
        assert report["killed"], report
        assert (report["lost"], report["unexpected"], report["wrong"]) == ([], [], 0), report
    # The kills did meet writes: some rounds got far, and some batches died half done.
    assert sum(report["acknowledged"] > 0 for report in reports) > rounds // 2
    if mode == "call":
        # Of a batch its records' headers go last, in few calls: it is mostly there or not; a cut header is refused.
        assert any(report["corrupted"] for report in reports) and not all(report["corrupted"] for report in reports)
    if max_records == 16:
        assert all(report["records"] <= 16 for report in reports)
