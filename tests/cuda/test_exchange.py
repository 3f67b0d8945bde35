"""The exchange: its lowering and refusals on the CPU; between GPUs what the reference is held to, and failures."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dsv4_jax.errors import ExchangeError
from dsv4_jax.ops import Exchange, all_gather, sum_to_all, sum_to_owner
from dsv4_jax.ops.exchange import Peers

from ..native import run_sanitized
from ..ops.test_exchange import ExchangeTest, on_mesh, values

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call() -> None:
    mesh = jax.make_mesh((4,), ("devices",))
    peers = Peers(3, ("devices",), 4, 1024, 2)

    def local(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        return all_gather((x, ids), "devices", peers=peers, channel=1, implementation="cuda")

    spec = jax.P("devices")
    call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    placed = jax.NamedSharding(mesh, spec)
    given = [jax.ShapeDtypeStruct(s, t, sharding=placed) for s, t in (((8, 8), jnp.bfloat16), ((8, 6), jnp.int32))]
    text = call.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_exchange") == 1
    for attribute in ("exchange = 3", "channel = 1", "kind = 0", "runs = dense<[32, 48]>"):
        assert attribute in text


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("z", "the mesh has no axis 'z', it has 'a', 'b'"),
        ("b", r"1 devices along \('b',\), expected 2 to 8"),
        (("a", "b"), "is no GPU"),
    ],
)
def test_devices_that_cannot_are_refused(axes, message: str) -> None:
    mesh = jax.make_mesh((4, 1), ("a", "b"), devices=jax.devices("cpu")[:4])
    with pytest.raises(ExchangeError, match=message):
        Exchange(mesh, axes)


def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_jax.ops.exchange_buffers._groups", lambda mesh, axes: None)
    for limit in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ExchangeError, match=f"limit_s is {limit}, expected more than 0 and up to 3600"):
            Exchange(jax.make_mesh((1,), ("a",)), "a", limit_s=limit)


def gpus() -> jax.sharding.Mesh:
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return jax.make_mesh((min(jax.device_count(), 8),), ("devices",))


@pytest.mark.gpu
class TestExchangeBetweenGpus(ExchangeTest):
    implementation = "cuda"

    @pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["flags", "packets"])
    def with_mesh(self, request: pytest.FixtureRequest):
        self.mesh = gpus()
        with Exchange(
            self.mesh, self.axes, slot_bytes=1 << 20, channels=2, packet_bytes=request.param, limit_s=5
        ) as exchange:
            self.peers = exchange.peers
            yield
            exchange.check()

    @pytest.mark.parametrize("graph", [1, 1 << 20], ids=["captured", "launched"])
    def test_ten_thousand_in_a_row(self, graph: int) -> None:
        """Two sizes on one channel, in a loop, data that changes: all of it as with XLA's collectives."""

        def steps(x: jax.Array, ids: jax.Array, **rest) -> tuple[jax.Array, jax.Array]:
            rank = lax.axis_index(self.axes)

            def step(i, carry):
                x, ids = carry
                (mine,) = all_gather((x,), self.axes, **rest)
                mine = mine[::-1] * jnp.exp2(-(rank + 1).astype(jnp.float32))
                x = sum_to_owner(mine, self.axes, **rest) + (i % 13).astype(jnp.float32)
                (other,) = all_gather((ids,), self.axes, **rest)
                return x, ids * 31 + i + other.sum(0, keepdims=True)

            return lax.fori_loop(0, 10_000 // 3, step, (x, ids))

        n, rng = self.mesh.size, np.random.default_rng(0)
        x, ids = values(rng, (n, 8, 1000)), values(rng, (n, 1, 7), "int32")
        options = dict(donate_argnums=(0, 1), compiler_options={"xla_gpu_graph_min_graph_size": graph})
        found = on_mesh(
            self.mesh, functools.partial(steps, peers=self.peers, implementation=self.implementation), **options
        )(x, ids)
        want = on_mesh(self.mesh, functools.partial(steps, implementation="xla"))(x, ids)
        assert np.isfinite(np.asarray(want[0])).all()
        for got, right in zip(found, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(right))

    def test_side_by_side(self) -> None:
        """Calls that do not need one another, on channels of their own."""
        n, rng = self.mesh.size, np.random.default_rng(0)
        x = values(rng, (n, 16, 100))

        def both(x: jax.Array, **rest) -> tuple[jax.Array, jax.Array]:
            first, second = x, x
            for _ in range(8):
                first = sum_to_all(first, channel=0, **rest) / 4
                second = sum_to_all(second[::-1], channel=1, **rest) / 4
            return first, second

        options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT", "xla_gpu_graph_min_graph_size": 1}
        rest = dict(axes=self.axes, peers=self.peers, implementation=self.implementation)
        found = on_mesh(self.mesh, functools.partial(both, **rest), compiler_options=options)(x)
        want = on_mesh(self.mesh, functools.partial(both, axes=self.axes, implementation="xla"))(x)
        for got, right in zip(found, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(right))


@pytest.mark.gpu
@pytest.mark.parametrize("packet_bytes", [0, 1024], ids=["flags", "packets"])
def test_a_device_that_does_not_come(packet_bytes: int) -> None:
    mesh = gpus()
    with Exchange(mesh, "devices", slot_bytes=1024, packet_bytes=packet_bytes, limit_s=0.2) as exchange:

        def call(x: jax.Array, stops: jax.Array) -> jax.Array:
            summed = functools.partial(sum_to_all, axes="devices", peers=exchange.peers, implementation="cuda")
            return lax.cond(stops[0] == 1, lambda x: -x, summed, x)

        run, n = on_mesh(mesh, call), mesh.size
        x, none, one = np.ones((n, 2, 100), np.float32), np.zeros((n, 1), np.int32), np.eye(n, 1, -1, dtype=np.int32)
        np.testing.assert_array_equal(np.asarray(run(x, none)), n)
        exchange.check()
        found = np.asarray(run(x, one))
        assert np.isnan(found[0]).all() and (found[1] == -1).all()
        with pytest.raises(ExchangeError, match=r"did not come to call 2 on channel 0 of .* within 0\.2 s; .* gave up"):
            exchange.check()
        with pytest.raises(jax.errors.JaxRuntimeError, match="rank 1 did not come to an earlier call on channel 0"):
            jax.block_until_ready(run(x, none))
        exchange.reset()
        exchange.check()
        np.testing.assert_array_equal(np.asarray(run(x, none)), n)
        exchange.check()
    with pytest.raises(ExchangeError, match="closed"):
        exchange.check()
    with pytest.raises(jax.errors.JaxRuntimeError, match="its buffers are closed"):
        jax.block_until_ready(run(x, none))


@pytest.mark.gpu
@pytest.mark.slow
def test_sanitizer_finds_nothing() -> None:
    """Small odd shapes of every kind under memcheck, in a process of their own.

    Not what CUDA's calls answer: to enable the access to a peer that jax has enabled is an error, and expected.
    """
    gpus()
    tests = "TestExchangeBetweenGpus and (test_gathers or test_sums)"
    run_sanitized(__file__, "-k", tests, options=("--report-api-errors", "no"))
