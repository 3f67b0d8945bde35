"""Row formats that only tests have: what a newcomer's format may look like to the rest of the package."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_jax.formats import INDEX_FORMATS, KV_FORMATS, Codes, FormatSpec, Part, Scales

__all__ = ["TOYS", "TWINS", "register"]


def _e5m2(dim: int, rope_dim: int) -> tuple[Part, ...]:
    """As "fp8" rows, but for the code: what compares anything else takes it for one of them."""
    nope = dim - rope_dim
    rope = (Part("rope", "uint16", rope_dim, Codes("bf16", rope_dim)),) if rope_dim else ()
    scale = Part("scale", "uint8", -(-nope // 64), Scales("ue8m0", 64, 1e-4))
    return Part("nope", "uint8", nope, Codes("e5m2", nope)), *rope, scale


def _words(dim: int, _: int) -> tuple[Part, ...]:
    """One part, of another carrier, of which nothing is said."""
    return (Part("words", "uint32", -(-dim // 2)),)


def _planes(dim: int, _: int) -> tuple[Part, ...]:
    """Five parts, as many as a layout has room for."""
    return *(Part(f"byte{i}", "uint8", dim) for i in range(4)), Part("tag", "uint16", 3)


TOYS = {
    "e5m2": FormatSpec(f"{__name__}.e5m2", _e5m2, needs_rotation=True),
    "words": FormatSpec(f"{__name__}.words", _words),
    "planes": FormatSpec(f"{__name__}.planes", _planes),
}


def _renamed(spec: FormatSpec) -> FormatSpec:
    """The same rows by another name, and their parts too."""

    def parts(dim: int, rope_dim: int) -> tuple[Part, ...]:
        return tuple(dataclasses.replace(p, name=f"x_{p.name}") for p in spec.parts(dim, rope_dim))

    return dataclasses.replace(spec, parts=parts)


# The formats that the package has, each as "<name>_twin".
TWINS = {
    "kv": {f"{name}_twin": _renamed(spec) for name, spec in KV_FORMATS.items()},
    "index": {f"{name}_twin": _renamed(spec) for name, spec in INDEX_FORMATS.items()},
}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enters toys and twins in both tables, for the duration of a test."""
    for table, twins in ((KV_FORMATS, TWINS["kv"]), (INDEX_FORMATS, TWINS["index"])):
        for name, spec in (TOYS | twins).items():
            monkeypatch.setitem(table, name, spec)
