"""Imports point down, and what begins with an underscore stays in its module. Read, not imported."""

from __future__ import annotations

import ast
import graphlib
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "dsv4_jax"
# Rooms from the ground up: a module imports from its own line and from lines above it. A room is a file or a folder.
LAYERS = (
    ("errors", "checks", "former_names", "version"),
    ("untrusted", "output", "libraries", "native_build", "events", "eviction_queue", "inbox"),
    ("plotting",),
    ("hf_config", "text"),
    ("chat",),
    ("config",),
    ("formats", "schema"),
    ("layout",),
    ("capacity", "plan", "record_format", "records"),
    ("manager",),
    # Of the engine, what decides, and what it says to whatever runs steps: without jax.
    tuple(f"engine.{name}" for name in ("prompt", "job", "executor", "handoffs", "core", "coarse", "shadow", "loop")),
    ("simulate", "stores"),
    ("ffi",),
    ("ops",),
    ("pallas", "cuda", "triton", "pools"),
    ("step", "serialization"),
    ("cache",),
    ("tiers", "sharding"),
    ("transports",),
    ("model.weights",),
    ("model",),
    ("engine",),
    ("serve",),
    ("testing", "bench", "weights"),
    ("cli", "integrations", "__init__", "__main__"),
)
# Rooms that use less than what is below them; beside these only errors and checks.
NARROW = {
    "hf_config": {"untrusted"},
    "text": {"output", "untrusted"},
    "chat": {"text", "untrusted"},
    "config": {"hf_config", "untrusted"},
    "schema": {"config"},
    "layout": {"config", "formats", "schema"},
    "plan": {"layout"},
    "capacity": {"layout", "records"},
    "step": {"config", "formats", "layout", "ops", "plan", "schema"},
    "cache": {"layout", "ops", "plan", "serialization", "step"},
    "record_format": {"layout"},
    "records": {"layout", "record_format", "schema"},
    "eviction_queue": set(),
    "inbox": set(),
    "plotting": {"output"},
    "native_build": {"libraries"},
    "stores": {"libraries"},
    "tiers": {
        *(
            "cache",
            "ffi",
            "inbox",
            "layout",
            "manager",
            "ops",
            "plan",
            "record_format",
            "records",
            "stores",
            "untrusted",
        )
    },
    "transports": {"inbox", "untrusted"},
    "formats": set(),
    "model.weights": {"config", "formats", "hf_config", "ops", "output", "untrusted"},
}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> dict[str, ast.Module]:
    """name below dsv4_jax ("manager.prefix.node"; a package by its folder) -> its syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def room(module: str) -> str | None:
    """The longest name in LAYERS that the module is or is in."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVEL), None)


def imports(module: str, tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of what is imported from within dsv4_jax; type checking alone does not count."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    above = module.split(".") if is_package else module.split(".")[:-1]
    if module in ("__init__", "__main__"):
        above = []
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*above[: len(above) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield (inner, "", node.lineno) if inner in MODULES else (".".join(base), alias.name, node.lineno)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsv4_jax":
            for alias in node.names:
                yield node.module.partition(".")[2], alias.name, node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("dsv4_jax."):
                    yield alias.name.partition(".")[2], "", node.lineno


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_module_has_a_room() -> None:
    assert len(MODULES) > 100
    assert [module for module in MODULES if room(module) is None] == []


def test_no_import_points_up() -> None:
    upward = {}  # in order, each once
    for module, tree in MODULES.items():
        for imported, _, line in imports(module, tree):
            here, there = room(module), room(imported or "__init__")
            if here and there and LEVEL[there] > LEVEL[here]:
                upward[f"{module}:{line} imports {imported or 'dsv4_jax'}"] = None
    assert not upward, "\n".join(upward)


def test_no_circles() -> None:
    """Of files, whatever time they import at; a package's own names lead from its `__init__` down."""
    packages = {module for module in MODULES if (ROOT / module.replace(".", "/")).is_dir()} | {"__init__"}
    graph = {
        module: {imported for imported, *_ in imports(module, tree)} - packages - {module, ""}
        for module, tree in MODULES.items()
        if module not in packages
    }
    assert sum(map(len, graph.values())) > 1000
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("name", NARROW)
def test_narrow_rooms_import_no_more_than_they_say(name: str) -> None:
    used = {
        str(room(imported))
        for module, tree in MODULES.items()
        if room(module) == name
        for imported, *_ in imports(module, tree)
    }
    assert used - {name, *LAYERS[0]} == NARROW[name]


@pytest.mark.parametrize("name", ["ops", "step", "model", "cli"])
def test_kernels_are_reached_by_the_registry(name: str) -> None:
    kernels = {"cuda", "pallas", "triton"}
    found = {
        f"{module}:{line} imports {imported}"
        for module, tree in MODULES.items()
        if module.split(".")[0] == name
        for imported, _, line in imports(module, tree)
        if imported.split(".")[0] in kernels
    }
    assert not found


def test_private_names_stay_in_their_module() -> None:
    """`from x import _name`, and `x._name` of an imported module x."""
    found = []
    for module, tree in MODULES.items():
        names = set()
        for imported, name, line in imports(module, tree):
            last = name or imported.split(".")[-1]
            if is_private(last):
                found.append(f"{module}:{line} imports {imported}.{name}")
            if not name:
                names.add(last)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=owner), attr=attr) if owner in names and is_private(attr):
                    found.append(f"{module}:{node.lineno} uses {owner}.{attr}")
    assert not found, "\n".join(found)
