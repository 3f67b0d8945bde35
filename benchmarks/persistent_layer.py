"""How fast the attention half of a Flash HCA layer could be as one persistent launch: persistent_layer.cu.

    python benchmarks/persistent_layer.py [--library FILE] [--layers 8] [--only check,time,marks] [--json FILE]

One token behind 8,191 others: 128 keys of the window and 64 entries, of which it makes the last of each. Weights as
released (e4m3 with a ue8m0 scale per 128 x 128; the compressor's bf16), packed for the launch. Simplified against the
model: the kernel takes this one shape; one softmax over all keys instead of merged runs; hyper-connections in float32
products, and from one attention half to the next layer's, no experts between; all 192 keys are visible.
Checked: two layers against NumPy, float64 sums with the same roundings; the bits of several
launches against those of one, and of repeated runs. Timed in CUDA graphs, each layer with weights of its own: many
layers a launch, one a launch, and both without waits, attend or weights. Needs torch, nvcc (or --library) and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from dsv4_jax.weights import dense_fp8

HIDDEN, LATENT, DIM, ROPE, HEADS, OUT_LATENT, GROUPS = 4096, 1024, 512, 64, 64, 8192, 8
BLOCKS, STAGES, KEYS, ROWS, CHANNELS = 128, 28, 192, 512, 32
NOPE = DIM - ROPE
INPUT_BLOCKS, STAGE_CODES, STAGE = 96, 32768, 32768 + 128
EPS = 1e-6
VECTORS = {"norm_x": HIDDEN, "norm_q": LATENT, "norm_kv": DIM, "norm_entry": DIM, "bias": DIM, "sink": HEADS,
           "base": 24, "scale": 8}  # fmt: skip
COUNTERS, GRID, MARKS = 14, 132, 16
WITHOUT = {"attend": 2, "waits": 1, "weights": 4, "weights or attend": 6, "weights or waits": 5}
UNDER_WAY = 1  # stages of weights that a block waits for at a time
# Of the fp8 matrices: rows and columns.
MATRICES = {"of_input": (1536, 4096), "wq_b": (32768, 1024), "wo_a": (8192, 4096), "wo_b": (4096, 8192)}
BYTES = (INPUT_BLOCKS * 2 + BLOCKS * 26) * STAGE + BLOCKS * 24 * 4 * CHANNELS * 4  # read for a layer
PROJECTOR_MARKS = ("start", "x there", "of_input", "latent there", "latent ready", "wq_b", "attended", "wo_a",
                   "all wo_a", "wo_b", "mixing sums", "all sums", "x")  # fmt: skip
ATTENDER_MARKS = (
    "start",
    "keys",
    "of_x there",
    "pooled there",
    "entry",
    "q there",
    "q ready",
    "scores",
    "weights",
    "values",
    "stored",
    "out",
)

Bf16 = ml_dtypes.bfloat16
E4m3 = ml_dtypes.float8_e4m3fn


class Args(ctypes.Structure):
    """`Args` of persistent_layer.cu."""

    POINTERS = ("weights", "fn", "vectors", "nope", "rope", "scale", "state", "ids", "angles", "streams", "mixed",
                "squares", "mixing", "of_x", "pooled", "q", "out", "latent", "sums", "counters", "marks")  # fmt: skip
    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in ("first", "layers", "rows", "window", "without")),
    )


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(Bf16).astype(np.float64)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


class Layer:
    """Random weights and cache of a layer, as released and as the kernel takes them."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.codes, self.scales = {}, {}
        for name, (rows, columns) in MATRICES.items():
            codes = rng.integers(0, 256, (rows, columns), np.uint8)
            codes[codes & dense_fp8.NAN == dense_fp8.NAN] = 0
            self.codes[name] = codes
            self.scales[name] = rng.integers(111, 115, (rows // 128, columns // 128), np.uint8)
        self.pooling = (rng.standard_normal((2 * DIM, HIDDEN)) / 64).astype(Bf16)
        self.fn = (rng.standard_normal((24, 4, HIDDEN)) / 128).astype(np.float32)
        self.vectors = {name: rng.uniform(0.5, 1.5, size).astype(np.float32) for name, size in VECTORS.items()}
        self.vectors["base"] -= 1
        # Rows of the cache.
        self.nope = rng.standard_normal((ROWS, NOPE)).astype(np.float32).astype(E4m3)
        self.rope = rng.standard_normal((ROWS, ROPE)).astype(np.float32).astype(Bf16)
        self.scale = np.zeros((ROWS, 8), np.uint8)
        self.scale[:, :7] = rng.integers(126, 129, (ROWS, 7))
        most, total = rng.standard_normal(DIM), rng.uniform(60, 100, DIM)
        self.state = np.stack([most, total, total * rng.standard_normal(DIM)]).astype(np.float32)

    def packed(self, name: str) -> np.ndarray:
        """[rows / 16, columns / 128, 2048]: what a warp multiplies at once."""
        codes, scales = self.codes[name], self.scales[name]
        with ThreadPoolExecutor(16) as pool:
            parts = range(0, len(codes), 512)
            tiles = np.concatenate(
                list(pool.map(lambda i: dense_fp8.pack(codes[i : i + 512], scales[i // 128 : i // 128 + 4]), parts))
            )
        t, c, _ = tiles.shape
        tiles = tiles.reshape(t, c, 4, 4, 512).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(tiles).reshape(4 * t, c, 2048)

    def stream(self) -> np.ndarray:
        """[128, 28, STAGE]: every block's weights in the order in which it reads them."""
        out = np.zeros((BLOCKS, STAGES, STAGE), np.uint8)
        # Axes of row groups and columns of 128 -> block, stage, warp's piece.
        x = self.packed("of_input").reshape(INPUT_BLOCKS, 8, 2, 2, 2048).transpose(0, 2, 1, 3, 4)
        out[:INPUT_BLOCKS, :2, :STAGE_CODES] = x.reshape(INPUT_BLOCKS, 2, -1)
        s = self.scales["of_input"].repeat(8, 0).reshape(INPUT_BLOCKS, 8, 2, 2).transpose(0, 2, 1, 3)
        out[:INPUT_BLOCKS, :2, STAGE_CODES : STAGE_CODES + 16] = s.reshape(INPUT_BLOCKS, 2, 16)
        # Row and column: [group of rows, upper or lower, row], [half, warp, stage, 32, product, 8, pair, which].
        w = self.pooling.view(np.uint16).reshape(64, 2, 8, 2, 8, 2, 4, 2, 2, 4, 2)
        w = np.ascontiguousarray(w.transpose(0, 3, 5, 4, 6, 7, 2, 9, 8, 1, 10))
        out[:, 2:4, :STAGE_CODES] = w.view(np.uint8).reshape(BLOCKS, 2, STAGE_CODES)
        for first, name, groups, parts in ((4, "wq_b", 16, 1), (12, "wo_a", 4, 4), (20, "wo_b", 2, 8)):
            x = self.packed(name).reshape(BLOCKS, groups, parts, 8, 2048).transpose(0, 3, 2, 1, 4)
            out[:, first : first + 8, :STAGE_CODES] = x.reshape(BLOCKS, 8, -1)
            s = self.scales[name].repeat(8, 0).reshape(BLOCKS, groups, parts, 8).transpose(0, 3, 2, 1)
            out[:, first : first + 8, STAGE_CODES : STAGE_CODES + 16] = s.reshape(BLOCKS, 8, 16)
        return out

    def packed_fn(self) -> np.ndarray:
        return np.ascontiguousarray(self.fn.reshape(24, 4, BLOCKS, CHANNELS).transpose(2, 0, 1, 3))

    def packed_vectors(self) -> np.ndarray:
        return np.concatenate([self.vectors[name] for name in VECTORS])

    def product(self, name: str, x: np.ndarray) -> np.ndarray:
        """Of x [groups, columns], float64 (weights in float32: they are bf16 numbers)."""
        groups, out = x.shape[0], []
        codes, scales = self.codes[name].view(E4m3), np.ldexp(1.0, self.scales[name].astype(int) - 127)

        def rows(i: int) -> np.ndarray:
            w = codes[i : i + 128].astype(np.float64).reshape(128, -1, 128) * scales[i // 128][:, None]
            return w.reshape(128, -1) @ x[i * groups // len(codes)]

        with ThreadPoolExecutor(16) as pool:
            out = list(pool.map(rows, range(0, len(codes), 128)))
        return np.concatenate(out)

    def row(self, x: np.ndarray, norm: str, angle: np.ndarray) -> np.ndarray:
        """What is read of a row that was stored, [512]."""
        x = unit(x) * self.vectors[norm]
        x[NOPE:] = turned(x[NOPE:], angle)
        groups = x[:NOPE].reshape(7, 64)
        k = np.ceil(np.log2(np.maximum(np.abs(groups).max(1, keepdims=True), 1e-4) / 448))
        groups[:] = (groups / 2.0**k).astype(np.float32).astype(E4m3).astype(np.float64) * 2.0**k
        return bf16(x)

    def reference(self, given: dict[str, np.ndarray], ids: np.ndarray, angles: np.ndarray) -> dict[str, np.ndarray]:
        """What the layer makes of streams, mixed, post and comb; float64 sums, the kernel's roundings."""
        v = {name: x.astype(np.float64) for name, x in self.vectors.items()}
        x = bf16(unit(given["mixed"]) * v["norm_x"])
        of_x = self.product("of_input", x[None])
        pooled = self.pooling.astype(np.float64) @ x
        latent = bf16(unit(of_x[:LATENT]) * v["norm_q"])
        raw = self.product("wq_b", latent[None])
        scales = np.ldexp(1.0, self.scale[:, :7].astype(int).repeat(64, 1) - 127)
        keys = np.concatenate([self.nope.astype(np.float64) * scales, self.rope], 1)[ids]
        keys[127] = self.row(of_x[LATENT:], "norm_kv", angles[0])
        most, total, summed = self.state.astype(np.float64)
        score = pooled[DIM:] + v["bias"]
        top = np.maximum(most, score)
        keep, weight = np.exp(most - top), np.exp(score - top)
        keys[191] = self.row((summed * keep + weight * pooled[:DIM]) / (total * keep + weight), "norm_entry", angles[1])
        q = unit(raw.reshape(HEADS, DIM))
        q[:, NOPE:] = turned(q[:, NOPE:], angles[0])
        z = bf16(q) @ keys.T * DIM**-0.5
        top = z.max(1, keepdims=True)
        p = np.exp(z - top)
        out = bf16(p) @ keys / (p.sum(1, keepdims=True) + np.exp(v["sink"][:, None] - top))
        out[:, NOPE:] = turned(out[:, NOPE:], angles[0] * [[1], [-1]])
        latent = bf16(self.product("wo_a", bf16(out).reshape(GROUPS, -1)))
        y = self.product("wo_b", latent[None])
        streams = given["post"][:, None] * y + given["comb"].T @ given["streams"]
        gates = np.einsum("rkc,kc->r", self.fn.astype(np.float64), streams)
        gates = gates / np.sqrt(np.mean(streams**2) + EPS) * v["scale"][[0] * 4 + [1] * 4 + [2] * 16] + v["base"]
        mixed = (sigmoid(gates[:4]) + EPS) @ streams
        m = gates[8:].reshape(4, 4)
        m = np.exp(m - m.max(1, keepdims=True))
        m = m / m.sum(1, keepdims=True) + EPS
        m = m / (m.sum(0) + EPS)
        for _ in range(19):
            m = m / (m.sum(1, keepdims=True) + EPS)
            m = m / (m.sum(0) + EPS)
        return {"of_x": of_x, "q": raw, "out": out, "latent": latent, "streams": streams, "mixed": mixed,
                "post": 2 * sigmoid(gates[4:8]), "comb": m}  # fmt: skip


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """The last axis as adjacent pairs, by [cosine, sine]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * angle[0] - odd * angle[1], even * angle[1] + odd * angle[0]], -1).reshape(x.shape)


class Spike:
    """The kernel and its arrays: `layers` of two kinds in turn, each with memory of its own."""

    def __init__(self, library: str, layers: int):
        import torch

        self.torch, self.layers = torch, layers
        self.library = ctypes.CDLL(library)
        sizes = (ctypes.c_int * 5)()
        self.library.persistent_sizes(sizes)
        if list(sizes)[:4] != [ctypes.sizeof(Args), STAGE, sum(VECTORS.values()), COUNTERS]:
            raise RuntimeError(f"persistent_layer.cu has other sizes than these: {list(sizes)}")
        self.ring = sizes[4]
        self.kinds = [Layer(1), Layer(2)]
        rng = np.random.default_rng(0)
        self.ids = rng.permutation(ROWS)[:KEYS].astype(np.int32)
        angle = rng.uniform(0, 6.28, (2, ROPE // 2))
        self.angles = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
        streams = rng.standard_normal((4, HIDDEN)).astype(np.float32)
        comb = rng.uniform(0, 0.5, (4, 4)).astype(np.float32)
        self.start = {"streams": streams, "mixed": streams.mean(0), "post": rng.uniform(0.5, 1.5, 4).astype(np.float32),
                      "comb": comb}  # fmt: skip
        each = [
            {"weights": k.stream(), "fn": k.packed_fn(), "vectors": k.packed_vectors(), "nope": k.nope.view(np.uint8),
             "rope": k.rope.view(np.int16), "scale": k.scale, "state": k.state}
            for k in self.kinds
        ]  # fmt: skip
        self.arrays: dict[str, Any] = {}
        for name in each[0]:
            two = [torch.from_numpy(np.ascontiguousarray(e[name])).cuda() for e in each]
            self.arrays[name] = torch.stack([two[i % 2] for i in range(layers)])
        mixed = self.start["mixed"]
        squares = (mixed.reshape(BLOCKS, CHANNELS) ** 2).sum(1)
        small = {"ids": self.ids, "angles": self.angles, "streams": streams, "mixed": mixed, "squares": squares,
                 "mixing": np.concatenate([self.start["post"], comb.ravel()])}  # fmt: skip
        self.arrays |= {name: torch.from_numpy(x.copy()).cuda() for name, x in small.items()}
        for name, size in {"of_x": 1536, "pooled": 2048, "q": 32768, "sums": 25 * 128}.items():
            self.arrays[name] = torch.zeros(size, device="cuda")
        for name, size in {"out": 32768, "latent": 8192}.items():
            self.arrays[name] = torch.zeros(size, device="cuda", dtype=torch.bfloat16)
        self.arrays["counters"] = torch.zeros((COUNTERS, 32), device="cuda", dtype=torch.int32)
        self.arrays["marks"] = torch.zeros((layers, GRID, MARKS), device="cuda", dtype=torch.int64)
        changing = ("nope", "rope", "scale", "state", "streams", "mixed", "squares", "mixing")
        self.fresh = {name: self.arrays[name].clone() for name in changing}

    def reset(self) -> None:
        for name, x in self.fresh.items():
            self.arrays[name].copy_(x)

    def run(self, launches: int, layers: int, *, window: int = 0, without: int = 0, marks: bool = False) -> None:
        """`launches` of so many layers each, enqueued on the current stream."""
        pointers = {name: self.arrays[name].data_ptr() for name in Args.POINTERS}
        pointers["marks"] = pointers["marks"] if marks else 0
        args = Args(**pointers, first=0, layers=layers, rows=ROWS, window=window or UNDER_WAY, without=without)
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        if error := self.library.persistent_run(ctypes.byref(args), launches, stream):
            raise RuntimeError(f"CUDA error {error}")

    def results(self) -> dict[str, np.ndarray]:
        self.torch.cuda.synchronize()
        names = ("of_x", "q", "out", "latent", "streams", "mixed", "mixing")
        return {name: self.arrays[name].float().cpu().numpy().copy() for name in names}

    def check(self) -> int:
        """The number of wrong results."""
        wrong = 0
        for count, launches in ((1, 1), (2, 1), (2, 2)):
            self.reset()
            self.run(launches, count // launches)
            found, want = self.results(), self.start
            for kind in self.kinds[:count]:
                want = kind.reference(want, self.ids, self.angles)
            want = want | {"mixing": np.concatenate([want["post"], want["comb"].ravel()])}
            errors = {name: float(np.linalg.norm(x.ravel() - want[name].ravel()) / np.linalg.norm(want[name]))
                      for name, x in found.items()}  # fmt: skip
            wrong += sum(not error < (1e-2 if count == 2 else 5e-3) for error in errors.values())
            print(f"{count} layers in {launches} launches, relative L2:", {k: f"{x:.1e}" for k, x in errors.items()})
        first = {}
        for i in range(40):
            count = min(8, self.layers)
            launches = 1 if i % 2 == 0 else count
            self.reset()
            self.run(launches, count // launches)
            got = self.results()
            first = first or got
            different = {name: float(np.linalg.norm(x - first[name]) / np.linalg.norm(x))
                         for name, x in got.items() if not np.array_equal(x, first[name])}  # fmt: skip
            if different:
                wrong += 1
                print(f"run {i}, {launches} launches: other bits, relative L2 {different}", flush=True)
        print(f"WRONG ({wrong})" if wrong else "40 runs of one and of many launches: equal bits", flush=True)
        return wrong

    def time(self, launches: int, layers: int, window: int = 0, without: int = 0) -> float:
        """us a layer: the median of graphs of four rounds."""
        torch, rounds = self.torch, 4
        self.run(launches, layers, window=window, without=without)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                self.run(launches, layers, window=window, without=without)
        times = []
        for _ in range(16):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * launches * layers))
        self.reset()
        return sorted(times[1:])[7]

    def meeting(self, mode: int, rounds: int = 200) -> float:
        """us of a barrier of all blocks; mode 1: behind 128 bytes of each, then read."""
        torch = self.torch
        counters = torch.zeros((4, 32), device="cuda", dtype=torch.int32)
        data = torch.zeros(2 * GRID * 32, device="cuda")
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for n in (rounds, 2 * rounds):
                begin.record()
                self.library.persistent_meet(
                    ctypes.c_void_p(counters.data_ptr()), ctypes.c_void_p(data.data_ptr()), n, mode,
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                )  # fmt: skip
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
        once, twice = times[2::2], times[3::2]
        return (min(twice) - min(once)) / rounds

    def show_marks(self, launches: int, layers: int) -> dict[str, Any]:
        """us since the layer's first mark, of the fourth layer: the least and the greatest over blocks."""
        for _ in range(3):
            self.run(launches, layers, marks=True)
        self.torch.cuda.synchronize()
        all_marks = self.arrays["marks"].cpu().numpy().astype(np.float64) / 1e3
        layer = min(3, self.layers - 1)
        zero = all_marks[layer, :BLOCKS, 0].min()
        found = {}
        for who, names, blocks in (("projectors", PROJECTOR_MARKS, slice(0, BLOCKS)),
                                   ("attenders", ATTENDER_MARKS, slice(BLOCKS, GRID))):  # fmt: skip
            at = all_marks[layer, blocks, : len(names)] - zero
            found[who] = {
                name: [float(f(at[:, i])) for f in (np.min, np.median, np.max)] for i, name in enumerate(names)
            }
            for name, (low, middle, high) in found[who].items():
                print(f"  {who:10} {name:14} {low:7.2f} {middle:7.2f} {high:7.2f}", flush=True)
        self.reset()
        return found


def build(folder: str) -> str:
    source = pathlib.Path(__file__).with_suffix(".cu")
    library = f"{folder}/libpersistent_layer.so"
    flags = ["-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
    subprocess.run(["nvcc", *flags, "-o", library, str(source)], check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="built before; else it is built with nvcc")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", default="check,time,marks")
    parser.add_argument("--json", type=pathlib.Path, help="write all times and marks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spike = Spike(options.library or build(folder), options.layers)
    wrong, found = 0, {}
    if "time" in options.only:
        from graph_timing import copy_ceiling, read_ceiling

        ceilings = found["ceilings"] = {"read": read_ceiling(), "copy": copy_ceiling()}
        print(f"{BYTES / 1e6:.1f} MB a layer; ceilings, GB/s: {ceilings}; floors, us: "
              f"{ {name: BYTES / 1e3 / x for name, x in ceilings.items()} }", flush=True)  # fmt: skip
        found["meeting"] = {mode: spike.meeting(mode) for mode in (0, 1)}
        print(f"a barrier of all blocks: {found['meeting'][0]:.2f} us, with data {found['meeting'][1]:.2f}", flush=True)
    if "check" in options.only:
        wrong = spike.check()
    if "time" in options.only:
        n, times = options.layers, found.setdefault("us a layer", {})
        for window in (1, 2, 3, spike.ring):
            times[f"one launch, {window} stages under way"] = spike.time(1, n, window=window)
            times[f"a launch a layer, {window} stages under way"] = spike.time(n, 1, window=window)
        for name, bits in WITHOUT.items():
            times[f"one launch, without {name}"] = spike.time(1, n, without=bits)
            times[f"a launch a layer, without {name}"] = spike.time(n, 1, without=bits)
        for name, us in times.items():
            print(f"{us:7.2f} us a layer: {name}", flush=True)
    if "marks" in options.only:
        for name, how in (("one launch", (1, options.layers)), ("a launch a layer", (options.layers, 1))):
            print(f"{name}:")
            found[f"marks, {name}"] = spike.show_marks(*how)
    if options.json:
        options.json.write_text(json.dumps(found))
    if wrong:
        raise SystemExit(f"{wrong} wrong results")


if __name__ == "__main__":
    main()
