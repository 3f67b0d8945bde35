"""exchange against NumPy, on a mesh. Subclass `ExchangeTest` with another `implementation` to test a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsv4_jax.errors import ImplementationError, ShapeError
from dsv4_jax.ops import all_gather, all_to_all, registry, sum_to_all, sum_to_owner
from dsv4_jax.ops.exchange import ONE_SHOT_BYTES, Peers, sum_in_pairs, using

from .op_test import OpTest

DTYPES = ("bfloat16", "float32", "int32", "uint8")


def on_mesh(mesh: Mesh, call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`call` on each device; arrays have a leading axis of devices, in the order of the mesh."""
    spec = P(mesh.axis_names)

    def local(*arrays: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], call(*(x[0] for x in arrays)))

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), **options)
    return lambda *arrays: mapped(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays))


def values(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Any bytes for integers, any numbers for others."""
    if np.dtype(dtype).kind in "iu":
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


class ExchangeTest(OpTest):
    op = "exchange"
    mesh: Mesh
    axes: tuple[str, ...] = ("devices",)
    peers: Peers | None = None

    def call(self, op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        chosen = dict(peers=self.peers, implementation=self.implementation) | options
        return on_mesh(self.mesh, functools.partial(op, axes=self.axes, **chosen))

    @pytest.mark.parametrize("rows", [1, 7, 64, 20_001])
    def test_gathers_arrays_of_all_types_at_once(self, rows: int) -> None:
        n, rng = self.mesh.size, np.random.default_rng(rows)
        shapes = {"bfloat16": (rows, 24), "float32": (rows, 3), "int32": (rows, 6), "uint8": (2 * rows, 5, 1)}
        given = [values(rng, (n, *shapes[dtype]), dtype) for dtype in DTYPES]
        found = self.call(lambda *arrays, **rest: all_gather(arrays, **rest))(*given)
        for x, got in zip(given, found, strict=True):
            assert got.dtype == x.dtype
            for device in range(n):
                np.testing.assert_array_equal(np.asarray(got)[device], x.reshape(-1, *x.shape[2:]))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_gathers_along_another_dimension(self, dtype: str) -> None:
        n, rng = self.mesh.size, np.random.default_rng(0)
        x = values(rng, (n, 5, 3, 16), dtype)
        (got,) = self.call(lambda x, **rest: all_gather((x,), dimension=1, **rest))(x)
        for device in range(n):
            np.testing.assert_array_equal(np.asarray(got)[device], np.concatenate(list(x), 1))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("shape", [(1, 16), (5, 16), (300, 2048)])
    def test_own_rows_with_the_columns_of_all(self, shape: tuple[int, int], dtype: str) -> None:
        n, rng = self.mesh.size, np.random.default_rng(shape[0])
        x = values(rng, (n, n * shape[0], shape[1]), dtype)
        got = np.asarray(self.call(all_to_all)(x))
        np.testing.assert_array_equal(got.reshape(-1, got.shape[-1]), np.concatenate(list(x), 1))

    # The last ones are more than a slot holds where there are slots, as those above are.
    @pytest.mark.parametrize("shape", [(1, 4), (3, 5), (64, 513), (150, 2049)])
    def test_sums_have_the_bits_of_sums_in_pairs(self, shape: tuple[int, int]) -> None:
        n, rng = self.mesh.size, np.random.default_rng(shape[1])
        x = values(rng, (n, n * shape[0], shape[1])) * 10.0 ** rng.integers(-3, 3, (n, 1, 1))
        x = x.astype(np.float32)
        whole = np.asarray(sum_in_pairs(list(x)))
        assert n < 3 or (whole != functools.reduce(np.add, x)).any()
        own = self.call(sum_to_owner)(x)
        np.testing.assert_array_equal(np.asarray(own).reshape(whole.shape), whole)
        for device in np.asarray(self.call(sum_to_all)(x)):
            np.testing.assert_array_equal(device, whole)

    @pytest.mark.parametrize("columns", [1024, 1023])
    def test_a_large_sum_has_the_bits_of_a_small_one(self, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        """Of which each device sums a share; shares need not be whole rows."""
        n, rng = self.mesh.size, np.random.default_rng(columns)
        x = (values(rng, (n, 131, columns)) * 10.0 ** rng.integers(-3, 3, (n, 1, 1))).astype(np.float32)
        assert x[0].nbytes > ONE_SHOT_BYTES
        kinds = self.noted(monkeypatch)
        two = np.asarray(self.call(sum_to_all)(x))
        assert kinds == (["sum_to_owner", "gather"] if n > 2 else ["sum_to_all"])
        monkeypatch.setattr("dsv4_jax.ops.exchange.ONE_SHOT_BYTES", x.nbytes)
        one = np.asarray(self.call(sum_to_all)(x))
        assert kinds[-1] == "sum_to_all"
        for device in range(n):
            np.testing.assert_array_equal(two[device], one[device])
            np.testing.assert_array_equal(two[device], sum_in_pairs(list(x)))

    def noted(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Returns a list that the kinds of exchanges come into, as they are traced."""
        kinds: list[str] = []

        def run(op: str, arguments: Any, choice: Any) -> Any:
            kinds.append(arguments.kind)
            return registry.run(op, arguments, choice)

        monkeypatch.setattr("dsv4_jax.ops.exchange.run", run)
        return kinds


class TestExchange(ExchangeTest):
    implementation = "xla"

    @pytest.fixture(autouse=True, params=[2, 4, 8])
    def with_mesh(self, request: pytest.FixtureRequest) -> None:
        self.mesh = jax.make_mesh((request.param,), self.axes, devices=jax.devices()[: request.param])

    @pytest.mark.parametrize("axes", [("b",), ("a",), ("b", "a")])
    def test_devices_along_some_axes_in_their_order(self, axes: tuple[str, ...]) -> None:
        mesh = jax.make_mesh((2, 2), ("a", "b"))
        ids = np.arange(4, dtype=np.int32).reshape(4, 1)
        (got,) = on_mesh(mesh, lambda x: all_gather((x,), axes))(ids)
        by_place = np.asarray(got).reshape(2, 2, -1)
        want = {("b",): [[0, 1], [2, 3]], ("a",): [[0, 2], [1, 3]], ("b", "a"): [[0, 2, 1, 3]]}[axes]
        for a in range(2):
            for b in range(2):
                group = want[a] if axes == ("b",) else want[b] if axes == ("a",) else want[0]
                assert by_place[a, b].tolist() == group


def test_pairs_then_pairs_of_pairs() -> None:
    """What makes the sum of eight that of four whose operands were summed two by two."""
    x = values(np.random.default_rng(0), (8, 100))
    pairs = [x[i] + x[i + 1] for i in range(0, 8, 2)]
    np.testing.assert_array_equal(sum_in_pairs(list(x)), sum_in_pairs(pairs))
    np.testing.assert_array_equal(sum_in_pairs(list(x[:3])), (x[0] + x[1]) + x[2])
    np.testing.assert_array_equal(sum_in_pairs(list(x[:5])), ((x[0] + x[1]) + (x[2] + x[3])) + x[4])


def test_what_xla_cannot_take_for_bytes_is_gathered_too() -> None:
    mesh = jax.make_mesh((2,), ("devices",), devices=jax.devices()[:2])
    given = [np.array([[True], [False]]), np.array([[1j], [2]], np.complex64)]
    for x, got in zip(given, on_mesh(mesh, lambda *arrays: all_gather(arrays, "devices"))(*given), strict=True):
        np.testing.assert_array_equal(np.asarray(got)[1], x.reshape(-1))


def test_a_device_alone_has_its_own() -> None:
    x = jnp.ones((2, 3))
    assert all_gather((x,), ())[0].shape == sum_to_owner(x, ()).shape == sum_to_all(x, ()).shape == (2, 3)
    assert all_to_all(x, ()).shape == (2, 3)


def test_arguments_are_named() -> None:
    x, peers = jnp.ones((3, 4)), Peers(0, ("a",), 2, 1024, 2)
    for call, message in (
        (lambda: all_gather((), "a"), "all_gather: expected a sequence of arrays, at least one"),
        (lambda: all_gather((x,), "a", dimension=2), "dimension is 2, array 0 has 2 dimensions"),
        (lambda: all_gather((x,), "b", peers=peers), r"all_gather: peers are of axes \('a',\), expected \('b',\)"),
        (
            lambda: sum_to_all(x, "a", peers=peers, channel=2),
            "sum_to_all: channel must be an integer from 0 to 1, got 2",
        ),
        (lambda: sum_to_all(x.astype(jnp.bfloat16), "a"), r"x is bfloat16 \[3, 4\], expected float32"),
        (lambda: sum_to_all(x, ("a", "a")), r"axes are \('a', 'a'\), expected different names"),
        (lambda: sum_to_owner(x, "a", peers=peers), "sum_to_owner: 3 rows do not divide by 2 devices"),
        (lambda: all_to_all(x, "a", peers=peers), "all_to_all: 3 rows do not divide by 2 devices"),
        (lambda: all_to_all(x[0], "a", peers=peers), "all_to_all: x has 1 dimensions, expected rows and columns"),
        (lambda: all_to_all(None, "a", peers=peers), "all_to_all: x has 0 dimensions, expected rows and columns"),
        (lambda: all_gather((x,), "a", peers=5), "all_gather: peers is 5, expected Peers"),
        (lambda: all_to_all(x, "a", peers=5), "all_to_all: peers is 5, expected Peers"),
        (lambda: sum_to_owner(x, "a", peers=5), "sum_to_owner: peers is 5, expected Peers"),
        (lambda: sum_to_all(jnp.ones((1, 1 << 18)), "a", peers=5), "sum_to_all: peers is 5, expected Peers"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


def test_no_rows() -> None:
    assert all_gather((jnp.zeros((0, 3)),), ())[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ([(4, 4)], {"peers": None}, "it needs peers, the mapped buffers of an ops.Exchange"),
        ([(4, 4)] * 5, {}, "it takes up to 4 arrays, not 5"),
        ([(4, 3)], {"dimension": 1}, "it joins runs of a multiple of 16 bytes along .*, not of 12"),
    ],
)
def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch, arrays, options, message: str) -> None:
    monkeypatch.setattr("dsv4_jax.ffi.cuda_problem", lambda op=None: None)
    given = dict(peers=Peers(0, (), 2, 1024, 1)) | options
    with pytest.raises(ImplementationError, match=f"exchange: implementation 'cuda' cannot run: {message}"):
        all_gather([jnp.zeros(shape) for shape in arrays], (), implementation="cuda", **given)


def test_peers_in_use_are_those_of_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that name none themselves, and only within."""
    seen: list[Peers | None] = []
    monkeypatch.setattr("dsv4_jax.ops.exchange.run", lambda op, arguments, choice: seen.append(arguments.peers) or [0])
    known, other = (Peers(i, (axis,), 2, 1024, 1) for i, axis in enumerate(("data", "tensor")))
    x = jnp.zeros((2, 3))
    with using(known, other):
        for axis in ("tensor", "data", "else"):
            sum_to_all(x, axis)
        sum_to_all(x, "data", peers=Peers(7, ("data",), 2, 64, 1))
    sum_to_all(x, "data")
    assert [peers and peers.number for peers in seen] == [1, 0, None, 7, None]
