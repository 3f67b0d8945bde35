"""The parts of the manager: none knows one above it, and none reaches into another's private names."""

from __future__ import annotations

import ast
import pathlib
import re

import dsv4_jax.manager

ROOT = pathlib.Path(dsv4_jax.manager.__file__).parent
FILES = {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf8")) for path in sorted(ROOT.rglob("*.py"))}
PYTHONS = {"_replace", "_asdict", "_fields", "_make", "_value_", "_getframe", "_current_frames"}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-z]\w*", name, re.I) is not None and name not in PYTHONS


def imports_of(file: str) -> set[str]:
    """The files of the manager that one imports, for the type checker alone included."""
    found = set()
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = pathlib.PurePosixPath(file).parent
            for _ in range(node.level - 1):
                folder = folder.parent if folder.name else pathlib.PurePosixPath("outside")
            found.add(str(folder.joinpath(*(node.module or "").split("."))) + ".py")
    return found & set(FILES)


def test_files_import_only_files_below_them() -> None:
    above: dict[str, int] = {}

    def floor(file: str, path: tuple[str, ...] = ()) -> int:
        assert file not in path, f"a circle: {path}"
        if file not in above:
            above[file] = max((floor(other, (*path, file)) + 1 for other in imports_of(file)), default=0)
        return above[file]

    for file in FILES:
        floor(file)
    assert [file for file in FILES if "manager.py" in imports_of(file)] == ["__init__.py"]
    assert above["manager.py"] > above["lifecycle.py"] > above["steps.py"] > above["publishing.py"]
    assert above["publishing.py"] > above["tiered_cache.py"] > above["prefix/prefix_tree.py"] > above["prefix/nodes.py"]


def test_no_file_uses_private_names_of_another() -> None:
    for file, tree in FILES.items():
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_set(node)}
        own |= {name for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _slots(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not [alias.name for alias in node.names if is_private(alias.name)], file
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                assert node.attr in own, f"{file}:{node.lineno} uses {node.attr}"


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id in ("self", "twin")


def _slots(node: ast.Assign) -> list[str]:
    named = isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__slots__"
    return list(ast.literal_eval(node.value)) if named else []
