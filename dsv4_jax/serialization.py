"""Steps as `jax.export` writes them: how caches, plans and steps name what of them is static.

    exported = jax.export.export(jax.jit(step, donate_argnums=1))(params, cache, plan.pack(), tokens)
    data = exported.serialize()                       # bytes, for another process
    step = jax.export.deserialize(data).call          # import dsv4_jax there first; donate again: jax.jit(step, ...)

Importing `dsv4_jax.cache` registers everything. A layout is written as the arguments it was made with, and is refused
where it would be another one: cached bytes of one version of this package are those of another exactly if their
layouts' fingerprints agree.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jax import export

from .config import AttentionType, DSparkHead, DSV4Config, YarnScaling
from .errors import LayoutError
from .layout import CacheLayout
from .ops.columns import Columns, Product
from .ops.epilogue import Epilogue
from .plan import CacheFacts, PackedPlan, StateSwapPlan, StepPlan, SwapPlan
from .step import CacheStep, LayerWrites

__all__ = ["layout_from_json", "layout_to_json", "serialized_as"]


def layout_to_json(layout: CacheLayout) -> str:
    """Returns a layout as text, for `layout_from_json`."""
    cfg = dataclasses.asdict(layout.cfg) | {"layer_types": [kind.value for kind in layout.cfg.layer_types]}
    options = {
        "kv_format": layout.kv_row.name,
        "index_format": layout.index_row.name,
        "block_tokens": layout.block_tokens,
        "draft_tokens": layout.draft_tokens,
        "hca_state": layout.hca_state,
        "include_drafts": layout.include_drafts,
        "key_split": layout.key_split,
        "numerics": layout.numerics,
    }
    return json.dumps({"cfg": cfg, "options": options, "fingerprint": layout.fingerprint})


def layout_from_json(text: str) -> CacheLayout:
    """Returns the layout that `layout_to_json` wrote.

    Raises:
        LayoutError: here it would store other bytes, or the text is none of a layout.
    """
    try:
        facts = json.loads(text)
        cfg = facts["cfg"]
        cfg["layer_types"] = tuple(map(AttentionType, cfg["layer_types"]))
        cfg["yarn"] = None if cfg["yarn"] is None else YarnScaling(**cfg["yarn"])
        if (dspark := cfg.get("dspark")) is not None:
            cfg["dspark"] = DSparkHead(**dspark | {"target_layer_ids": tuple(dspark["target_layer_ids"])})
        options = facts["options"]
        if "include_mtp" in options:  # as versions before drafts had one word wrote it
            options["include_drafts"] = options.pop("include_mtp")
        layout = CacheLayout(DSV4Config(**cfg), **options)
        fingerprint = facts["fingerprint"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LayoutError(f"this is no layout that was written here: {error}") from error
    if layout.fingerprint != fingerprint:
        written = str(fingerprint)[:12]
        raise LayoutError(f"a layout {written} was written, which is {layout.fingerprint[:12]} here: {layout}")
    return layout


def serialized_as(kind: type, write: Callable[[Any], str], read: Callable[[str], Any]) -> None:
    """Lets `jax.export` write a pytree: `write` makes text of what of it is static, `read` undoes it."""
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"dsv4_jax.{kind.__name__}",
        serialize_auxdata=lambda static: write(static).encode(),
        deserialize_auxdata=lambda data: read(bytes(data).decode()),
    )


def _fields(*fields: tuple[str, Callable[[Any], Any]]) -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    """How static fields are written, and read by their names."""

    def write(static: Any) -> str:
        values = {name: value for (name, _), value in zip(fields, static, strict=True)}
        return json.dumps(values, default=dataclasses.asdict)

    def read(text: str) -> Any:
        values = json.loads(text)
        return tuple(of(values[name]) for name, of in fields)

    return write, read


def _same(value: Any) -> Any:
    return value


def _tuples(value: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, value))


def _facts(value: dict[str, Any] | None) -> CacheFacts | None:
    return None if value is None else CacheFacts(**value)


def _step_to_json(static: Any) -> str:
    implementation, written = static
    return json.dumps([implementation, [writes.value for writes in written]])


def _step_from_json(text: str) -> Any:
    implementation, written = json.loads(text)
    return implementation, tuple(map(LayerWrites, written))


serialized_as(PackedPlan, *_fields(("shapes", _tuples), ("facts", _facts)))
serialized_as(CacheFacts, *_fields(*((field.name, _same) for field in dataclasses.fields(CacheFacts))))
serialized_as(CacheStep, _step_to_json, _step_from_json)
serialized_as(Epilogue, *_fields(("eps", _same), ("hadamard", _same)))
serialized_as(Columns, *_fields(("start", _same), ("tail", tuple)))
serialized_as(Product, *_fields(("tail", tuple)))
for _plan in (StepPlan, SwapPlan, StateSwapPlan):
    export.register_namedtuple_serialization(_plan, serialized_name=f"dsv4_jax.{_plan.__name__}")
