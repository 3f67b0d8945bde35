"""Arrows point one way: what rooms and files may import of this package."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "dsv4_jax"
# A room may import itself and these. Files of the top level that everybody may import: errors, checks.
MAY_IMPORT = {
    "hf_config": {"untrusted"},
    "config": {"hf_config", "untrusted"},
    "schema": {"config"},
    "layout": {"config", "formats", "schema"},
    "plan": {"layout"},
    "capacity": {"layout"},
    "step": {"config", "formats", "layout", "ops", "plan", "schema"},
    "cache": {"layout", "ops", "plan", "serialization", "step"},
    "records": {"layout"},
    "eviction_queue": set(),
    "stores": {"libraries"},
    "tiers": {"cache", "ffi", "layout", "manager", "plan", "records", "stores"},
}
ANYWHERE = {"errors", "checks"}


def rooms_imported(path: pathlib.Path) -> set[str]:
    """The rooms, or files of the top level, that a file imports from."""
    found = set()
    place = path.relative_to(ROOT.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = place[: len(place) - node.level] if node.level else ()
            names = [".".join((*base, *(node.module or "").split("."))).strip(".")]
            if names == ["dsv4_jax"]:
                names = [f"dsv4_jax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("dsv4_jax.")}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_arrow_points_upwards(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]
    for path in files:
        assert rooms_imported(path) - {room} <= MAY_IMPORT[room] | ANYWHERE, path.relative_to(ROOT)
    imported = set().union(*map(rooms_imported, files))
    assert imported >= MAY_IMPORT[room], "the table allows what nobody imports"


def test_the_manager_knows_neither_stores_nor_tiers() -> None:
    files = sorted((ROOT / "manager").rglob("*.py"))
    assert len(files) > 20
    assert not {"stores", "tiers"} & set().union(*map(rooms_imported, files))
