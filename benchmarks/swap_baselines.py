"""The baselines of bench_swap.py: `swap_baselines.cu`, compiled on first use. Needs a GPU and nvcc."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import jax
import numpy as np

from dsv4_jax.record_format import Piece

__all__ = ["SCHEMES", "Baselines", "why_not"]

SCHEMES = {"memcpy per piece": 0, "launch per layer and leaf": 1}


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def why_not() -> str | None:
    """Says why they cannot run here, None if they can."""
    if (backend := jax.default_backend()) != "gpu":
        return f"the backend is {backend}"
    return None if nvcc() else "no nvcc"


class _Leaf(ctypes.Structure):
    """Mirrors `Leaf` of swap_baselines.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("device", "host")),
        *((name, ctypes.c_int64) for name in ("layers", "device_units", "host_units", "piece_bytes")),
    )


class Baselines:
    """Holds pinned host memory of the leaves' own shape, and the copies between it and the leaves.

    Args:
        folder: where the library is compiled to.
        leaves: device arrays, one per piece; they must outlive this object.
        host_units: of every leaf's host side.
    """

    def __init__(self, folder: pathlib.Path, leaves: tuple[jax.Array, ...], pieces: tuple[Piece, ...], host_units: int):
        library = folder / "libswap_baselines.so"
        major, minor = jax.devices()[0].compute_capability.split(".")
        source = pathlib.Path(__file__).with_suffix(".cu")
        flags = ["-std=c++17", "-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
        subprocess.run([str(nvcc()), *flags, "-o", str(library), str(source)], check=True)
        self._c = ctypes.CDLL(str(library))
        if (size := self._c.baseline_leaf_size()) != ctypes.sizeof(_Leaf):
            raise RuntimeError(f"a leaf has {ctypes.sizeof(_Leaf)} bytes here and {size} in {source.name}")
        self._held: list[int] = []
        self._leaves, self._hosts = (_Leaf * len(leaves))(), []
        for i, (leaf, piece) in enumerate(zip(leaves, pieces, strict=True)):
            units = leaf.nbytes // (piece.layers * piece.bytes)
            size = piece.layers * host_units * piece.bytes
            host = self._alloc(size)
            self._leaves[i] = _Leaf(leaf.unsafe_buffer_pointer(), host, piece.layers, units, host_units, piece.bytes)
            shape = (piece.layers, host_units, piece.bytes)
            self._hosts.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(host)).reshape(shape))

    def record(self, unit: int) -> bytes:
        """What the host side holds of a unit: its pieces one after the other, without a record's padding."""
        return b"".join(host[:, unit].tobytes() for host in self._hosts)

    def ceiling(self, direction: str, size: int, repeats: int = 8) -> float:
        """Returns the seconds of one contiguous copy of `size` bytes, pinned."""
        device = jax.block_until_ready(jax.numpy.zeros(size, jax.numpy.uint8))
        host = self._alloc(size)
        ms = ctypes.c_float()
        for n in (1, repeats):  # the first one warms up
            pointers = ctypes.c_void_p(device.unsafe_buffer_pointer()), ctypes.c_void_p(host)
            self._check(
                self._c.baseline_ceiling(*pointers, ctypes.c_size_t(size), direction == "out", n, ctypes.byref(ms))
            )
        return ms.value / 1e3

    def swap(
        self, scheme: str, direction: str, device_ids: np.ndarray, host_ids: np.ndarray, repeats: int = 5
    ) -> float:
        """Returns the seconds of one swap, enqueueing included."""
        ids = np.concatenate([device_ids, host_ids]).astype(np.int32)
        on_device = jax.block_until_ready(jax.device_put(ids))
        ms = ctypes.c_float()
        for n in (1, repeats):
            self._check(
                self._c.baseline_swap(
                    self._leaves,
                    len(self._leaves),
                    ids.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_void_p(on_device.unsafe_buffer_pointer()),
                    len(device_ids),
                    SCHEMES[scheme],
                    direction == "out",
                    n,
                    ctypes.byref(ms),
                )
            )
        return ms.value / 1e3

    def close(self) -> None:
        while self._held:
            self._check(self._c.baseline_free(ctypes.c_void_p(self._held.pop())))

    def _alloc(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self._check(self._c.baseline_alloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
        assert pointer.value is not None
        self._held.append(pointer.value)
        return pointer.value

    @staticmethod
    def _check(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")
