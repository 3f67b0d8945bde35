"""Products of e4m3 rows and weights: every compiled shape checked bit for bit and timed, in one call on the device.

    python benchmarks/products.py [--build-only] [--json FILE] [--matrices TEXT] [--rows N,...]

Needs nvcc, a Hopper GPU, NumPy, and jax for the CPU (only for packing weights); XLA has no part in the times. Compiles
`products.cu` (all shapes) and `products_now.cu` (the kernels that serve today) into build/products/, where they are
kept while no source is newer. Then three stages; a shape that fails or hangs in one is left out of the next:

1. check: rounding equals `formats.activations` for every bfloat16; each shape equals `tests/oracle/matrix_unit.py` on
   small matrices with all numbers of parts and groups; and on large ones every shape has the same bits for 1 to 4,096
   rows, float32 and bf16, results poisoned before.
2. time: each shape on each matrix and number of rows, in CUDA graphs over copies of all operands; of the best ones
   other windows and bands, then with rounding; beside the kernels of today and NVIDIA's times of DeepGEMM.
3. the best again for longer, in turns with today's: the clock falls under load.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
BUILT = ROOT / "build" / "products"
ROWS = (1, 16, 64, 256, 1024, 4096)
COUNTS = ((0, 1), (5, 2), (9, 7), (64, 8), (100, 16), (31, 64), (7, 100), (300, 256), (1000, 1024), (0, 4096))
STALLED = 60  # seconds without a line
# Rows and columns of the weights, and groups: of Flash, then of Pro.
MATRICES = (
    (32768, 1024, 1), (8192, 1024, 1), (1536, 4096, 1), (8192, 4096, 8), (4096, 8192, 1), (4096, 4096, 1),
    (4096, 2048, 1), (65536, 1536, 1), (7168, 16384, 1), (16384, 4096, 16), (2048, 7168, 1), (8192, 1536, 1),
    (6144, 7168, 1), (7168, 3072, 1),
)  # fmt: skip
# us of DeepGEMM on one H200 at ROWS, rounding not included: NVIDIA's tables (aiconfigurator-core 0.12.0), the better of
# two engines' where one was disturbed. 0: not there.
PEER = {
    (32768, 1024): (14.1, 14.9, 15.6, 23.1, 0, 280),
    (8192, 1024): (7.5, 6.9, 7.0, 9.3, 21.8, 71),
    (1536, 4096): (9.1, 8.2, 8.7, 10.3, 22.9, 53),
    (8192, 4096): (14.9, 15.9, 13.6, 18.3, 56.5, 209),
    (4096, 8192): (19.4, 16.4, 17.6, 25.1, 70.8, 216),
    (4096, 4096): (14.2, 10.1, 11.2, 13.8, 39.4, 113),
    (4096, 2048): (9.3, 10.4, 8.6, 10.7, 23.7, 62),
    (65536, 1536): (30.9, 32.2, 32.2, 58.2, 165.5, 659),
    (7168, 16384): (40.0, 36.9, 35.9, 64.8, 209.5, 902),
    (16384, 4096): (21.0, 21.9, 22.1, 37.5, 126, 409),
    (6144, 7168): (20.1, 17.7, 17.0, 22.8, 72, 275),
    (7168, 3072): (13.1, 11.1, 10.9, 19.5, 46, 141),
}
# Small matrices whose sums are simulated: with the number of parts that they are cut into.
SIMULATED = (
    (256, 512, 1, 1),
    (256, 1024, 1, 2),
    (256, 2048, 1, 4),
    (512, 512, 2, 1),
    (256, 384, 1, 1),
    (256, 512, 1, 4),
)
LOOKED_AT = (0, 1, 4, 63, 64, 100, 127, 128, 199)  # of 200 rows
WEIGHTS, SCALES, X, CODES, ROW_SCALES, OUT = range(6)


def build() -> None:
    """Compiles both libraries where a source is newer than one of them, side by side."""
    BUILT.mkdir(parents=True, exist_ok=True)
    sources = [
        *(ROOT / "csrc").rglob("*.cu*"),
        *(ROOT / "csrc").rglob("*.h"),
        *(ROOT / "benchmarks").glob("products*.cu*"),
    ]
    newest = max(path.stat().st_mtime for path in sources)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    jaxlib = next(pathlib.Path(p) / "jaxlib/include" for p in sys.path if (pathlib.Path(p) / "jaxlib/include").is_dir())
    flags = [
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DDSV4_E4M3_EVERY_SHAPE",
        f"-I{ROOT / 'csrc'}",
        "-isystem",
        str(jaxlib),
    ]
    running = []
    for name in ("products", "products_now"):
        library = BUILT / f"lib{name}.so"
        if library.is_file() and (library.stat().st_mtime > newest or "DSV4_PRODUCTS_BUILT" in os.environ):
            continue
        command = [nvcc, *flags, "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "-Xptxas", "-v"]
        log = (BUILT / f"{name}.log").open("w")
        source = str(ROOT / "benchmarks" / f"{name}.cu")
        running.append((name, subprocess.Popen([*command, "-o", str(library), source], stdout=log, stderr=log)))
    for name, process in running:
        if process.wait():
            sys.exit(f"{name}.cu does not compile: {BUILT / name}.log")


def load(name: str) -> Any:
    """Opens a library that `build` made."""
    return ctypes.CDLL(str(BUILT / f"lib{name}.so"))


class Products:
    """The library, and a problem that is open."""

    def __init__(self, matrix: Sequence[int], copies: int, max_rows: int):
        c = self.c = load("products")
        c.products_open.restype = ctypes.c_void_p
        c.products_error.restype = ctypes.c_char_p
        c.products_time.restype = ctypes.c_float
        c.products_differences.restype = ctypes.c_int64
        self.rows, self.columns, self.groups = matrix[:3]
        self.copies, self.max_rows = copies, max_rows
        self.few, self.count = c.products_shapes(1), c.products_shapes(0)
        self.parts = c.products_parts(self.rows, self.columns)
        self.problem = ctypes.c_void_p(c.products_open(self.rows, self.columns, self.groups, copies, max_rows))
        if not self.problem:
            raise MemoryError(f"no room for {matrix}")

    def close(self) -> None:
        self.c.products_close(self.problem)

    def move(self, which: int, array: np.ndarray, to_device: bool) -> np.ndarray:
        array = np.ascontiguousarray(array)
        self.good(
            self.c.products_move(
                self.problem,
                which,
                array.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(array.nbytes),
                int(to_device),
            )
        )
        return array

    def good(self, error: int) -> None:
        if error:
            raise RuntimeError(self.c.products_error(error).decode())

    def takes(self, error: int) -> bool:
        """Whether a shape takes the matrix (1: cudaErrorInvalidValue, before anything is launched)."""
        if error == 1:
            return False
        self.good(error)
        return True

    def multiply(self, first: int, rows: int, shape: int, parts: int, float_out: int) -> bool:
        return self.takes(self.c.products_multiply(self.problem, first, rows, parts, shape, 0, 0, float_out))

    def time(
        self, rows: int, shape: int, window: int = 0, band: int = 0, rounding: int = 0, replays: int = 5
    ) -> float | None:
        calls = max(8, self.copies)
        us = self.c.products_time(self.problem, rows, self.parts, shape, window, band, rounding, calls, replays)
        if us < 0 and not self.takes(round(-us)):
            return None
        return us

    def pitch(self, rows: int) -> int:
        return -(-rows // 4) * 4


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def check_rounding() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax.numpy as jnp

    from dsv4_jax.formats.activations import quantise_rows

    bits = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    finite = np.sort(bits[(bits & 0x7F80) != 0x7F80])
    near = finite.reshape(-1, 128).astype(np.uint16)  # blocks of one size
    near = rng.permuted(near, axis=1)[: 8 * (len(near) // 8)].reshape(-1, 1024)
    x = np.concatenate([bits.reshape(-1, 1024), near, rng.integers(0, 1 << 16, (25, 1024), np.uint16)])
    rows = len(x)
    products = Products((64, 1024, 1), 2, 256)
    products.move(X, x, True)
    products.good(products.c.products_round(products.problem, 0, rows))
    codes = products.move(CODES, np.empty((rows, 1024), np.uint8), False)
    scales = products.move(ROW_SCALES, np.empty((8, products.pitch(rows)), np.float32), False)
    want, want_scales = (np.asarray(y) for y in quantise_rows(jnp.asarray(x.view(jnp.bfloat16))))
    signless = (want & 0x7F) == 0
    wrong = int(((codes != want) & ~(signless & ((codes & 0x7F) == 0))).sum())
    made = scales[:, :rows].T
    wrong_scales = int((made != np.exp2(want_scales.astype(np.float32) - 127)).sum())
    say(
        stage="rounding",
        blocks=int(want_scales.size),
        wrong=wrong,
        wrong_scales=wrong_scales,
        padding=float(np.abs(scales[:, rows:]).max(initial=0)),
    )
    products.close()


def simulated(matrix: Sequence[int]) -> None:
    """Each shape's differences from the simulated unit on a small matrix, for 200 rows and for 5."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax.numpy as jnp

    from dsv4_jax.formats.weights.fp8_e4m3 import pack
    from tests.oracle import matrix_unit

    n, k, groups, parts = matrix
    rng = np.random.default_rng(n + k)
    codes = rng.integers(0, 256, (n, k), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    # Of very different sizes: a block's sum has 14 bits, so that totals of like ones are exact in any order.
    scales = rng.integers(90, 116, (-(-n // 128), k // 128), np.uint8)
    products = Products(matrix, 2, 256)
    products.move(WEIGHTS, np.asarray(pack(jnp.asarray(codes), jnp.asarray(scales))[0]), True)
    products.move(SCALES, scales, True)
    few = np.concatenate([np.arange(g * n // groups, (g + 1) * n // groups, 9)[:24] for g in range(groups)])
    of_rows = np.exp2(scales.astype(np.float32) - 127).repeat(128, 0)[:n]
    wanted = {}
    for first, rows in ((0, 200), (3, 5)):
        products.good(products.c.products_round(products.problem, first, rows))
        x = products.move(CODES, np.empty((rows, groups * k), np.uint8), False)
        row_scales = products.move(ROW_SCALES, np.empty((groups * k // 128, products.pitch(rows)), np.float32), False)
        some = np.unique(np.array(LOOKED_AT) % rows)
        wanted[first, rows] = (
            some,
            matrix_unit.dense(x[some], row_scales.T[some], codes[few], of_rows[few], parts=parts, groups=groups),
        )
    for shape in SHAPES:
        say(stage="simulated", shape=shape, matrix=matrix, begin=True)
        for (first, rows), (some, want) in wanted.items():
            if products.multiply(first, rows, shape, parts, 1):
                out = products.move(OUT, np.empty((rows, n), np.float32), False)
                wrong = int((out[np.ix_(some, few)].view(np.uint32) != (want + 0.0).view(np.uint32)).sum())
                unwritten = int(np.isnan(out).sum())
                say(
                    stage="simulated",
                    shape=shape,
                    matrix=matrix,
                    rows=rows,
                    of=int(want.size),
                    wrong=wrong,
                    unwritten=unwritten,
                )
    products.close()


def equal(matrix: Sequence[int]) -> None:
    """Every shape against the first, which takes eight rows at a time, for every number of rows."""
    products = Products(matrix, 2, 4096)
    for float_out in (0, 1):
        assert products.multiply(0, 4096, 1, products.parts, float_out)
        products.good(products.c.products_keep(products.problem, 4096, float_out))
        for shape in SHAPES:
            say(stage="equal", shape=shape, matrix=matrix, begin=True)
            for first, rows in COUNTS if float_out == 0 else ((7, 100), (300, 1500)):
                first = min(first, 4096 - rows)
                if products.multiply(first, rows, shape, products.parts, float_out):
                    wrong = products.c.products_differences(products.problem, first, rows, float_out)
                    say(stage="equal", shape=shape, matrix=matrix, rows=rows, float_out=float_out, wrong=wrong)
    products.close()


def measure(matrix: Sequence[int], numbers: Sequence[int]) -> None:
    """All shapes of a matrix at these numbers of rows, then what varies of the best. Cut into as many parts of K as it
    is, and into fewer: which cut is the one for good is decided by these times.
    """
    n, k, groups = matrix
    now = load("products_now")
    now.products_now_open.restype, now.products_now_time.restype = ctypes.c_void_p, ctypes.c_float
    size = 4 << 30
    pool = ctypes.c_void_p(now.products_now_open(ctypes.c_size_t(size)))
    for rows in numbers:
        each = n * k + rows * groups * k * 3 + rows * n * 4
        copies = max(2, min(64, int(220e6 / (n * k + rows * groups * k + 2 * rows * n)) + 1, int(30e9 / each)))
        products = Products(matrix, copies, max(rows, 4))
        sizes = ctypes.c_size_t(size), n, k, groups, rows, max(8, copies)
        time_now, cut = functools.partial(now.products_now_time, pool, *sizes), products.parts
        for parts in (1, 2, 4):
            if parts <= cut:
                products.parts = parts
                best_of(products, rows, time_now)
        products.close()


def best_of(products: Products, rows: int, time_now: Callable[[int], float]) -> None:
    """Says which shape is the fastest, and how fast. `time_now`: replays -> us of the kernels of today."""
    found: dict[str, float] = {}
    matrix = products.rows, products.columns, products.groups
    shapes = [s for s in SHAPES if s > products.few or rows <= 512]  # few rows at a time are read again and again
    for shape in shapes:
        say(stage="time", shape=shape, matrix=matrix, rows=rows, begin=True)
        if (us := products.time(rows, shape)) is not None:
            found[f"{shape}"] = us
    for name in sorted(found, key=found.__getitem__)[:2]:
        shape = int(name)
        for value in (2, 3, 4, 6) if shape <= products.few else (4, 8, 32):
            how = {"window": value} if shape <= products.few else {"band": value}
            if (us := products.time(rows, shape, **how)) is not None:
                found[f"{shape}/{value}"] = us
    if not found:
        return
    best = min(found, key=found.__getitem__)
    name, _, value = best.partition("/")
    how = {} if not value else {"window" if int(name) <= products.few else "band": int(value)}
    chosen = products.c.products_chosen(*matrix, rows, products.parts)
    long = max(5, min(200, int(0.12e6 / (max(8, products.copies) * found[best]))))  # about 0.12 s
    both, early, product, before = [], [], [], []
    for _ in range(3):
        product.append(products.time(rows, int(name), replays=long, **how))
        both.append(products.time(rows, int(name), rounding=1, replays=long, **how))
        products.c.products_early(1)
        early.append(products.time(rows, int(name), rounding=1, replays=long, **how))
        products.c.products_early(0)
        before.append(time_now(long))
    say(
        stage="time",
        matrix=matrix,
        rows=rows,
        parts=products.parts,
        best=best,
        us=min(product),
        with_rounding=min(both),
        with_rounding_early=min(early),
        rounding=products.time(rows, 1, rounding=2),
        now=min(before),
        chosen=chosen,
        chosen_us=found.get(str(chosen)),
        all={name: round(us, 2) for name, us in found.items()},
    )


def follow(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines of a worker; the last says how it ended, and with which shape in hand, if that was not well."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, errors = process.stdout, process.stderr
        assert out and errors

        def read() -> None:
            for line in out:
                lines.put(line)
            lines.put("")

        reader, in_hand = threading.Thread(target=read), None
        reader.start()
        try:
            while line := lines.get(timeout=STALLED):
                row = json.loads(line)
                in_hand = row.get("shape", in_hand)
                yield row
        except queue.Empty:
            process.kill()
        said = errors.read().strip().splitlines()
        reader.join()
        if process.wait():
            yield {"failed": said[-1] if said else f"ended with {process.returncode}", "shape": in_hand}


def check_all(shapes: list[int], log: list[dict[str, Any]]) -> list[int]:
    """Runs the checks, again without a shape that ended one; returns the shapes that passed all."""
    wrong: dict[int, str] = {}
    ran: dict[int, int] = {}
    for stage in [
        "rounding",
        *(f"simulated {i}" for i in range(len(SIMULATED))),
        *(f"equal {i}" for i in (0, 2, 3, 4, 10)),
    ]:
        while True:
            left = [s for s in shapes if s not in wrong]
            again = False
            for row in follow(["--work", stage, "--shapes", ",".join(map(str, left))]):
                log.append(row)
                if "failed" in row:
                    again = row["shape"] in left
                    wrong[row["shape"] or 0] = f"{stage}: {row['failed']}"
                    print(f"{stage}: shape {row['shape']}: {row['failed']}", flush=True)
                elif row["stage"] == "rounding":
                    print(
                        f"rounding: {row['blocks']} blocks; {row['wrong']} codes, {row['wrong_scales']} scales differ"
                    )
                elif row.get("wrong") or row.get("unwritten"):
                    wrong.setdefault(
                        row["shape"], f"{row['stage']} {row['matrix']}, {row['rows']} rows: {row['wrong']} differ"
                    )
                elif "wrong" in row:
                    ran[row["shape"]] = ran.get(row["shape"], 0) + 1
            if not again:
                break
    passed = [s for s in shapes if s not in wrong and ran.get(s)]
    print(f"checked: {len(passed)} of {len(shapes)} shapes passed {sum(ran.values())} comparisons")
    for shape, why in sorted(wrong.items()):
        print(f"  shape {shape}: {why}")
    if idle := [s for s in shapes if s not in wrong and not ran.get(s)]:
        print(f"  took no matrix: shapes {', '.join(map(str, idle))}")
    return passed


def main() -> int:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--build-only", action="store_true")
    command.add_argument("--json", type=pathlib.Path)
    command.add_argument("--matrices", default="", help="only those whose ROWSxCOLUMNS holds this")
    command.add_argument("--rows", default=",".join(map(str, ROWS)))
    command.add_argument("--seconds", type=float, default=400, help="no matrix is begun after so many")
    command.add_argument("--work", help=argparse.SUPPRESS)
    command.add_argument("--shapes", default="", help=argparse.SUPPRESS)
    args = command.parse_args()
    numbers = [int(x) for x in args.rows.split(",")]
    if args.work:
        SHAPES.extend(int(x) for x in args.shapes.split(",") if x)
        stage, _, which = args.work.partition(" ")
        if stage == "rounding":
            check_rounding()
        elif stage == "simulated":
            simulated(SIMULATED[int(which)])
        elif stage == "equal":
            equal(MATRICES[int(which)])
        else:
            measure(MATRICES[int(which)], numbers)
        return 0
    begun, log = time.monotonic(), []
    build()
    print(f"built: {time.monotonic() - begun:.0f} s", flush=True)
    if args.build_only:
        return 0
    library = load("products")
    few = library.products_shapes(1)
    shapes = list(range(1, library.products_shapes(0) + 1))
    passed = check_all(shapes, log)
    print(f"checked: {time.monotonic() - begun:.0f} s; shapes 1 to {few} are for few rows\n", flush=True)
    print(
        "matrix            rows parts |   best  shape | rounded  early    now  x now | DeepGEMM     x |  TF/s | chosen"
    )
    for i, (n, k, groups) in enumerate(MATRICES):
        if args.matrices not in f"{n}x{k}" or time.monotonic() - begun > args.seconds:
            continue
        for row in follow(["--work", f"time {i}", "--shapes", ",".join(map(str, passed)), "--rows", args.rows]):
            if not row.get("begin"):
                log.append(row)
            if "failed" in row:
                print(f"{n}x{k}: shape {row['shape']}: {row['failed']}")
            elif "best" in row:
                peer = dict(zip(ROWS, PEER.get((n, k), ()), strict=False)).get(row["rows"]) or float("nan")
                us, both, early, now = (row[x] for x in ("us", "with_rounding", "with_rounding_early", "now"))
                chosen = row["chosen_us"] or float("nan")
                print(
                    f"{f'{n}x{k}/{groups}':17} {row['rows']:4} {row['parts']:5} | {us:6.1f} {row['best']:>6} "
                    f"| {both:7.1f} {early:6.1f} {now:6.1f} {both / now:6.2f} | {peer:8.1f} {us / peer:5.2f} "
                    f"| {2e-6 * n * k * row['rows'] / us:5.0f} | {row['chosen']} {chosen:.1f}",
                    flush=True,
                )
        if args.json:
            args.json.write_text(json.dumps(log))
    print(f"all: {time.monotonic() - begun:.0f} s")
    return int(len(passed) < len(shapes))


SHAPES: list[int] = []  # of a worker

if __name__ == "__main__":
    sys.exit(main())
