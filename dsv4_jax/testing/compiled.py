"""What a compiled step must not do: copy a pool, or compile again."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["assert_no_copies", "assert_one_trace", "pool_copies"]

# Dtypes of pools as HLO texts write them.
_HLO = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "float32": "f32", "bfloat16": "bf16", "int32": "s32"}


def assert_no_copies(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = 0,
    only: Callable[[str], bool] | None = None,
    temporaries: float = 0.02,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles a step with a cache donated and checks that it is updated in place.

    Every donated byte must be aliased with an output, no array of a donated leaf's shape may be copied, and
    temporaries must be small beside the cache. Give it a cache that is large against the step's activations, as it
    is in use: a few thousand blocks of a small model.

    Args:
        step: any traceable function, jitted or not, that returns the updated cache among its results.
        args: of the step; arrays, or `jax.ShapeDtypeStruct`s.
        donate_argnums: which of them are updated in place.
        only: of which leaves, by their path (`".arrays['csa.nope']"` in a `KVCache`), copies count; default: all
            Temporaries are not looked at then: on a CPU, XLA copies leaves of a request's state in chunks that
            overrun the window, and in steps of one token; never the pools of entries.
        temporaries: most bytes of temporaries, as a share of the donated ones.
        compiler_options: as for `jax.jit`.

    Returns:
        The compiled step, to be called with `args`.

    Raises:
        AssertionError: says what is copied, or how much is not aliased.
    """
    argnums = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    donated = [leaf for i in argnums for leaf in jax.tree.leaves_with_path(args[i])]
    total = sum(_bytes(leaf) for _, leaf in donated)
    lowered = jax.jit(step, donate_argnums=argnums).lower(*args)
    compiled = lowered.compile(compiler_options)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "this backend does not tell what it compiled"
    if memory.alias_size_in_bytes != total:
        raise AssertionError(
            f"{memory.alias_size_in_bytes} of {total} donated bytes are updated in place: does the step return the "
            "whole cache, every leaf of its shape and dtype?"
        )
    for path, leaf in donated:
        name = jax.tree_util.keystr(path)
        if (only is None or only(name)) and (copies := pool_copies(text, leaf)):
            raise AssertionError(f"{name} is copied {len(copies)} times: {copies[0].strip()[:300]}")
    if only is None and memory.temp_size_in_bytes > temporaries * total:
        raise AssertionError(
            f"{memory.temp_size_in_bytes} bytes of temporaries for {total} donated bytes, more than {temporaries:.0%}: "
            "a pool is copied under another shape, or the cache is too small to tell"
        )
    return compiled


def pool_copies(text: str, leaf: Any) -> list[str]:
    """Returns lines of an HLO text that copy an array of this leaf's shape and dtype."""
    shape = f"{_HLO[str(np.dtype(leaf.dtype))]}[{','.join(map(str, leaf.shape))}]"
    return re.findall(rf"= {re.escape(shape)}\S* copy(?:-start)?\(.*", text)


def assert_one_trace(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which raises when it is traced a second time: `jax.jit(assert_one_trace(step), ...)`.

    Calls with concrete arrays, outside any transformation, are not counted.

    Raises:
        AssertionError: says which argument has another shape, dtype or static part than in the first trace.
    """
    first: list[dict[str, str]] = []

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves_with_path((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for _, leaf in leaves):
            seen = {jax.tree_util.keystr(path): _described(leaf) for path, leaf in leaves}
            seen["static parts"] = str(jax.tree.structure((args, kwargs)))
            if first:
                changed = [
                    f"{name}: {first[0].get(name, 'nothing')[:200]} -> {seen.get(name, 'nothing')[:200]}"
                    for name in {**first[0], **seen}
                    if first[0].get(name) != seen.get(name)
                ]
                raise AssertionError(f"traced again: {'; '.join(changed[:8]) or 'with equal arguments'}")
            first.append(seen)
        return step(*args, **kwargs)

    return traced


def _bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def _described(leaf: Any) -> str:
    return str(leaf.aval) if isinstance(leaf, jax.core.Tracer) else repr(leaf)
