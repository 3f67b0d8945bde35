"""Random parameters: from NumPy for plain matrices, made on the device for those in released formats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ...checks import check_integer
from ...config import DSV4Config, Numerics
from ...errors import ConfigError
from ...formats.weights import WeightFormat
from ...former_names import former_keywords
from .deferred import Deferred, Progress, make
from .names import MTP
from .packing import pack_layers
from .params import RELEASED, Params, Weights, is_leaf, param_specs
from .placement import shard_params
from .quantised import Quantised
from .stacking import stack_projections

__all__ = ["init_params"]

_FEW = 2**18  # elements, made on the host


@former_keywords(mtp="drafts")
def init_params(
    cfg: DSV4Config,
    seed: int = 0,
    weights: Weights = jnp.float32,
    *,
    packed: bool = False,
    drafts: bool = False,
    numerics: Numerics = "plain",
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Params:
    """Random parameters in which nothing is neutral: norms, sinks, biases and mixing weights differ too.

    Matrices are normal with variance 1 / fan-in; hash layers send every token to distinct experts.

    Args:
        seed: 0 to 2^64 - 1.
        weights: as in `param_specs`. "released": what the formats' codecs `draw`, of unit gain too; drawn where they
            stay, one matrix at a time.
        packed: in the form to decode with, what `pack_layers(stack_projections(params))` makes of them.
        drafts: with the layers that draft; the other parameters are what they are without.
        numerics: as in `param_specs`; the weights have the same values.
        mesh: over its devices as by `shard_params`, and packed; released weights are the same on any mesh.
        progress: called with the bytes made and the bytes in all, after every piece.

    Raises:
        ShapeError, ConfigError: as `param_specs`; or the seed is none.
        LayoutError: as `shard_params`.
    """
    specs = param_specs(cfg, weights, drafts=drafts, numerics=numerics)
    number = check_integer("seed", seed, 0, 2**64 - 1, error=functools.partial(ConfigError, None))
    last = {MTP: specs.pop(MTP)} if drafts else {}
    draw = _on_device(cfg, number) if isinstance(weights, str) and weights == RELEASED else _on_host(cfg, number)
    params = {}
    for part in (specs, last):
        params |= jax.tree_util.tree_map_with_path(draw, part, is_leaf=is_leaf)
    if mesh is not None:
        return shard_params(cfg, params, mesh, progress=progress)
    return make(pack_layers(stack_projections(params)) if packed else params, progress)


def _on_host(cfg: DSV4Config, seed: int) -> Callable[[tuple[Any, ...], jax.ShapeDtypeStruct], jax.Array]:
    rng = np.random.default_rng(seed)

    def leaf(path: tuple[Any, ...], spec: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "tid2eid":
            order = rng.random((cfg.vocab_size, cfg.n_routed_experts)).argsort(1)
            return jnp.asarray(order[:, : cfg.num_experts_per_tok], jnp.int32)
        return jax.device_put(_values(rng, path[-1].key, spec.shape).astype(spec.dtype))

    return leaf


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name or name == "scale":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return rng.normal(0, _width(name, shape), shape).astype(np.float32)


def _width(name: str, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation that a parameter is given."""
    return {"attn_sink": 1.0, "ape": 1.0, "base": 1.0, "gate_bias": 0.1}.get(name, shape[-1] ** -0.5)


def _on_device(cfg: DSV4Config, seed: int) -> Callable[[tuple[Any, ...], Any], Any]:
    """Returns what makes a leaf on its device; small ones come from the host, so that nothing is compiled for them."""
    key, count = _seed_key(seed), iter(range(2**31))

    def leaf(path: tuple[Any, ...], spec: Any) -> Any:
        number, name = next(count), path[-1].key
        own = functools.partial(jax.random.fold_in, key, number)
        if not isinstance(spec, Quantised):
            dtype = np.dtype(spec.dtype)
            if name == "tid2eid":
                draw = functools.partial(_table, own(), spec.shape, cfg.n_routed_experts)
            elif spec.size <= _FEW:
                draw = functools.partial(_small, (seed, number), name, spec.shape, dtype)
            else:
                draw = functools.partial(_normal, own(), np.float32(_width(name, spec.shape)), spec.shape, dtype)
            return Deferred(spec.shape, spec.dtype, ((spec.size, draw),))
        *lead, rows, columns = spec.shape
        matrices, of_all = int(np.prod(lead)), own()

        def part(i: int, of: jax.ShapeDtypeStruct) -> Deferred:
            def draw(number: int) -> jax.Array:
                return _matrix(jax.random.fold_in(of_all, number), spec.format, rows, columns)[i]

            draws = (functools.partial(draw, number) for number in range(matrices))
            return Deferred(of.shape, of.dtype, tuple((of.size // matrices, draw) for draw in draws))

        return Quantised(tuple(part(i, of) for i, of in enumerate(spec.parts)), spec.format)

    return leaf


def _small(seed: tuple[int, int], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _values(np.random.default_rng(seed), name, shape).astype(dtype)


# Compiled for each shape, not for each name.


@functools.partial(jax.jit, static_argnums=(1, 2))
def _table(key: jax.Array, shape: tuple[int, ...], experts: int) -> jax.Array:
    return jax.lax.top_k(jax.random.uniform(key, (shape[0], experts)), shape[1])[1].astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, wide: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape) * wide).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _matrix(key: jax.Array, fmt: WeightFormat, rows: int, columns: int) -> tuple[jax.Array, ...]:
    """Returns the parts of one random matrix."""
    return fmt.codec.draw(key, rows, columns)


def _seed_key(seed: int) -> jax.Array:
    """The random key of a seed of 64 bits: jax takes 32 of them, or all with `jax_enable_x64`."""
    low, high = (np.uint32(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
