"""Asserts that a compiled step updates a donated pytree in place: aliased bytes, temporaries, HLO text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

_HLO = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "float32": "f32", "int32": "s32"}


def assert_in_place(step: Callable[..., Any], pool: Any, *rest: Any) -> Any:
    """Compiles `step` with its first argument donated, checks it, runs it and returns its result."""
    leaves = jax.tree.leaves(pool)
    total = sum(a.nbytes for a in leaves)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, *rest).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == total, "not every byte is updated in place"
    assert memory.temp_size_in_bytes < 0.02 * total, f"{memory.temp_size_in_bytes} temporary bytes of {total}"
    for leaf in leaves:
        shape = f"{_HLO[str(leaf.dtype)]}[{','.join(map(str, leaf.shape))}]"
        assert not re.findall(rf"= {re.escape(shape)}\S* copy(?:-start)?\(.*", text), f"{shape} is copied"
    out = compiled(pool, *rest)
    assert all(a.is_deleted() for a in leaves)
    return out
