"""The reference has every public name once, and the site has every page."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from types import ModuleType

import dsv4_jax
from dsv4_jax import formats, simulate

from .pages import DOCS, ROOT

REFERENCE = DOCS / "reference"
ROOMS = [dsv4_jax, formats, simulate]


def public(module: ModuleType) -> dict[str, object]:
    """Path -> object of a module's public names, those of its public modules too."""
    found: dict[str, object] = {}
    for name in module.__all__:
        value = getattr(module, name)
        found |= public(value) if inspect.ismodule(value) else {f"{module.__name__}.{name}": value}
    return found


def documented() -> list[str]:
    return [path for page in REFERENCE.glob("*.md") for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]


def resolved(path: str) -> object:
    module, _, name = path.rpartition(".")
    assert name in importlib.import_module(module).__all__, f"{path} is not public"
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_there() -> None:
    listed = documented()
    there = {id(resolved(path)) for path in listed}
    names: dict[str, object] = {path: value for room in ROOMS for path, value in public(room).items()}
    missing = [path for path, value in names.items() if id(value) not in there and not path.endswith("__version__")]
    assert not missing and len(names) > 150, missing
    # Once: two places would be two addresses of one name. (Values such as numbers may be one object by chance.)
    objects = [id(resolved(path)) for path in listed]
    twice = [path for path in listed if callable(resolved(path)) and objects.count(id(resolved(path))) > 1]
    assert not twice


def test_the_first_page_lists_what_the_package_has() -> None:
    rows = re.findall(r"^\| \[`dsv4\.(\w+)`\]\[(\S+)\] \| (.*) \|$", (REFERENCE / "index.md").read_text(), re.M)
    assert [name for name, _, _ in rows] == [
        name for name in dsv4_jax.__all__ if not inspect.ismodule(getattr(dsv4_jax, name)) and name != "__version__"
    ]
    for name, path, says in rows:
        value = getattr(dsv4_jax, name)
        first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".:")
        assert resolved(path) is value and says == first, (name, first)


def test_the_site_has_every_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/]+\.md)$", config, re.M))
    added = {
        "results.md",
        "contributing.md",
        "changes.md",
    }  # docs/hooks.py brings them
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | added
    hooks = (DOCS / "hooks.py").read_text()
    for name, source in re.findall(r'"([\w.]+)": "([\w./]+)"', hooks):
        assert name in added and (ROOT / source).is_file()


def test_what_builds_the_site_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints" / "docs.txt").read_text(), re.M)
    assert {re.split(r"[\[>=]", wanted)[0] for wanted in extras} <= set(pins)
