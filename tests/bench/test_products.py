"""benchmarks/products.py without its library: a stand-in that simulates the unit passes, a wrong one does not."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import products
import pytest

from dsv4_jax.formats.activations import quantise_rows
from dsv4_jax.formats.weights.fp8_e4m3 import unpack

from ..oracle import matrix_unit


class Library:
    """One problem at a time, in NumPy; shape 3 takes no matrix, shape 2 adds parts that others do not have."""

    def __init__(self) -> None:
        for name in ("open", "error", "time", "differences"):
            setattr(self, f"products_{name}", getattr(self, f"{name}_of"))

    def open_of(self, *sizes: int) -> int:
        self.rows, self.columns, self.groups = sizes[:3]
        self.arrays: dict[int, np.ndarray] = {}
        return 1

    # Plain functions take attributes, such as restype; methods do not.
    def __getattribute__(self, name: str):
        found = object.__getattribute__(self, name)
        if name.startswith("products_") and callable(found):
            return type("Function", (), {"__call__": staticmethod(found)})()
        return found

    def error_of(self, error: int) -> bytes:
        return b"stand-in"

    def time_of(self, problem, rows: int, parts: int, shape: int, *how: int) -> float:
        return -1.0 if shape == 3 else 10.0 + shape

    def differences_of(self, *which: int) -> int:
        return 0

    def products_shapes(self, few: int) -> int:
        return 2 if few else 4

    def products_parts(self, rows: int, columns: int) -> int:
        return matrix_unit.parts_of(rows, columns)

    def products_chosen(self, *sizes: int) -> int:
        return 1

    def products_close(self, problem) -> None: ...

    def products_early(self, early: int) -> None: ...

    def products_now_open(self, size) -> int:
        return 1

    def products_now_time(self, *args) -> float:
        return 20.0

    def products_move(self, problem, which: int, host, size: ctypes.c_size_t, to_device: int) -> int:
        whole = np.ctypeslib.as_array(ctypes.cast(host, ctypes.POINTER(ctypes.c_uint8)), (size.value,))
        if to_device:
            self.arrays[which] = whole.copy()
        else:
            whole[:] = self.arrays[which].view(np.uint8).ravel()[: size.value]
        return 0

    def products_round(self, problem, first: int, rows: int) -> int:
        width = self.groups * self.columns
        if products.X not in self.arrays:
            rng = np.random.default_rng(0)
            sizes = np.exp2(rng.integers(-6, 6, (256, width // 128))).repeat(128, 1)
            self.arrays[products.X] = (rng.standard_normal((256, width)) * sizes).astype(jnp.bfloat16).view(np.uint8)
        x = self.arrays[products.X].view(jnp.bfloat16).reshape(-1, width)[first : first + rows]
        codes, scales = (np.asarray(y) for y in quantise_rows(jnp.asarray(x)))
        padded = np.zeros((width // 128, -(-rows // 4) * 4), np.float32)
        padded[:, :rows] = np.exp2(scales.astype(np.float32) - 127).T
        self.arrays[products.CODES], self.arrays[products.ROW_SCALES] = codes, padded
        return 0

    def products_multiply(self, problem, first: int, rows: int, parts: int, shape: int, *how: int) -> int:
        if shape == 3:
            return 1
        self.products_round(problem, first, rows)
        scales = np.exp2(self.arrays[products.SCALES].astype(np.float32) - 127).reshape(-1, self.columns // 128)
        tiles = self.arrays[products.WEIGHTS].reshape(self.rows // 64, -1, 8192)
        some = np.unique(np.array(products.LOOKED_AT) % rows)
        out = np.zeros((rows, self.rows), np.float32)
        out[some] = matrix_unit.dense(
            self.arrays[products.CODES][some],
            self.arrays[products.ROW_SCALES].T[some],
            np.asarray(unpack(jnp.asarray(tiles), jnp.asarray(scales))[0]),
            scales.repeat(128, 0)[: self.rows],
            parts=parts if shape == 1 else 2 * parts,
            groups=self.groups,
        )
        self.arrays[products.OUT] = out
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "load", lambda name: Library())
    monkeypatch.setattr(products, "SHAPES", [1, 2, 3])


def said(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("library")
def test_every_number_is_rounded_as_by_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    products.check_rounding()
    (row,) = said(capsys)
    assert (row["wrong"], row["wrong_scales"], row["padding"]) == (0, 0, 0) and row["blocks"] > 1000


@pytest.mark.usefixtures("library")
def test_a_shape_with_other_sums_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    products.simulated((64, 512, 1, 2))
    rows = [row for row in said(capsys) if not row.get("begin")]
    wrong = {shape: [row["wrong"] for row in rows if row["shape"] == shape] for shape in (1, 2, 3)}
    assert wrong[1] == [0, 0] and max(wrong[2]) > 0 and wrong[3] == []
    assert all(row["of"] > 30 and row["unwritten"] == 0 for row in rows)


@pytest.mark.usefixtures("library")
def test_the_fastest_shape_is_timed_again(capsys: pytest.CaptureFixture[str]) -> None:
    products.measure((128, 512, 1), [16])
    row = said(capsys)[-1]
    assert (row["best"], row["us"], row["now"], row["chosen_us"]) == ("1", 11.0, 20.0, 11.0)
    assert {"1", "2", "1/2", "2/6"} <= set(row["all"]) and "3" not in row["all"]


def test_a_worker_that_fails_or_hangs_names_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = 'import sys, time; print(\'{"shape": 7, "begin": true}\', flush=True); '
    popen = subprocess.Popen
    for code, stalled, message in (("sys.exit('worse')", 60, "worse"), ("time.sleep(600)", 0.5, "ended with -9")):
        monkeypatch.setattr(products, "STALLED", stalled)
        monkeypatch.setattr(
            products.subprocess, "Popen", lambda c, code=code, **how: popen([sys.executable, "-c", begin + code], **how)
        )
        rows = list(products.follow([]))
        assert rows[0]["shape"] == 7 and rows[-1] == {"failed": message, "shape": 7}
