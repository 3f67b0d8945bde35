"""Tests of dsv4_jax.pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dsv4_jax.testing import assert_no_copies


def assert_in_place(step: Callable[..., Any], pool: Any, *rest: Any) -> Any:
    """Checks a step that updates its first argument, runs it and returns its result."""
    leaves = jax.tree.leaves(pool)
    out = assert_no_copies(step, pool, *rest)(pool, *rest)
    assert all(a.is_deleted() for a in leaves)
    return out
