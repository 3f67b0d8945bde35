"""The former place of `dsv4_jax.formats.weights`, for one release."""

from typing import Any

from .former_names import former_name

_FORMER = {name: f"dsv4_jax.formats.weights.{name}" for name in ("WEIGHT_FORMATS", "WeightFormat", "WeightPart")}

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
