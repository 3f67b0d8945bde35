"""What the pages import is public where they import it from, and every module's `__all__` is whole."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re

import pytest

import dsv4_jax.cuda.exchange
import dsv4_jax.integrations
import dsv4_jax.weights
from dsv4_jax import errors, manager, model, ops, pools, records, simulate, stores, testing, tiers
from dsv4_jax.manager.prefix.eviction_policies import LRU

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MADE = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MODULES = sorted((ROOT / "dsv4_jax").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: pathlib.Path) -> list[str]:
    """The Python of a page: blocks marked python, and those marked text that are Python all the same."""
    if page.suffix == ".py":
        return [page.read_text()]
    found = []
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M):
        try:
            ast.parse(text)
        except SyntaxError:
            assert language != "python", text
            continue
        if language in ("python", "text"):
            found.append(text)
    return found


def is_public(module: str, name: str) -> bool:
    return name in importlib.import_module(module).__all__


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: page.name)
def test_what_a_page_imports_is_public(page: pathlib.Path) -> None:
    modules: dict[str, str] = {"dsv4": "dsv4_jax"}
    for text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "dsv4_jax":
                        importlib.import_module(alias.name)
                        modules[alias.asname or alias.name] = alias.name
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsv4_jax":
                for alias in node.names:
                    assert is_public(node.module, alias.name), f"from {node.module} import {alias.name}"
                    inner = f"{node.module}.{alias.name}"
                    if inspect.ismodule(getattr(importlib.import_module(node.module), alias.name)):
                        modules[alias.asname or alias.name] = inner
        for node in ast.walk(ast.parse(text)):
            names = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
            if len(names) > 1 and names[0] in modules and all(map(str.isidentifier, names)):
                assert_public(modules[names[0]], names[1:])


def assert_public(module: str, names: list[str]) -> None:
    """`module.name`, and where that is a module the next name too."""
    assert is_public(module, names[0]), f"{module}.{names[0]}"
    value = getattr(importlib.import_module(module), names[0])
    if inspect.ismodule(value) and len(names) > 1:
        assert_public(value.__name__, names[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_in_its_text_exists(page: pathlib.Path) -> None:
    """`dsv4.name`, `dsv4_jax.module.name`, `stores.name` and `tiers.module.name`, wherever they stand in backquotes."""
    rooms = {"dsv4": dsv4_jax, "dsv4_jax": dsv4_jax, "stores": stores, "tiers": tiers}
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        for room, path in re.findall(r"(?<![\w./-])(dsv4_jax|dsv4|stores|tiers)((?:\.\w+)+)", quoted):
            value: object = rooms[room]
            for name in path.split(".")[1:]:
                if inspect.ismodule(value) and not hasattr(value, name):
                    importlib.import_module(f"{value.__name__}.{name}")
                value = getattr(value, name)  # or the page is wrong


def declared(tree: ast.Module) -> list[str] | None:
    """The literal `__all__` of a module; None without one, or one that is put together."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None


def test_every_public_class_and_function_is_declared() -> None:
    missing, checked = [], 0
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if (names := declared(tree)) is None:
            continue
        checked += 1
        made = [node.name for node in tree.body if isinstance(node, MADE)]
        missing += [f"{path.relative_to(ROOT)}: {x}" for x in made if not x.startswith("_") and x not in names]
        assert len(set(names)) == len(names), path
    assert not missing and checked > 100, missing


def test_every_declared_name_is_there() -> None:
    """Read, not imported: some modules need a GPU's libraries."""
    for path in MODULES:
        tree = ast.parse(path.read_text())
        bound = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            for alias in getattr(node, "names", [])
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        bound |= {node.name for node in tree.body if isinstance(node, MADE)}
        if path.name == "__init__.py":
            bound |= {other.stem for other in path.parent.iterdir()}
        assert set(declared(tree) or ()) <= bound, path


def test_what_docstrings_cite_exists() -> None:
    """A page of this repository and a heading of it; no page that is elsewhere."""
    cited = 0
    for path in [*MODULES, *EXAMPLES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "csrc").rglob("*")]:
        if path.suffix not in (".py", ".h", ".cc", ".cu", ".cuh"):
            continue
        text = re.sub(r"\n[\s#/*]*", " ", path.read_text())
        assert not re.search(r"\bspec [0-9]", text), f"{path} cites a page that is not here"
        for page, sections in re.findall(r"\((docs/\w+\.md)((?:, [A-Z][\w-]+|(?: and [A-Z][\w-]+))*)", text):
            headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
            for section in re.findall(r"[A-Z][\w-]+", sections):
                assert section in headings, f"{path} cites {page}, {section}"
                cited += 1
    assert cited > 10


def test_what_a_model_of_ones_own_needs() -> None:
    names = {"AttentionType", "CacheLayout", "Columns", "Epilogue", "KVCache", "init_cache", "rope_frequencies"}
    assert names <= set(dsv4_jax.__all__)
    assert {"hadamard", "rms_norm", "rope", "rope_frequencies"} <= set(ops.__all__)


def test_every_error_is_public() -> None:
    made = [x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, errors.CacheError | UserWarning)]
    assert sorted(x.__name__ for x in made) == sorted(errors.__all__)
    assert all(issubclass(x, errors.CacheError) != x.__name__.endswith("Warning") and x.__doc__ for x in made)


def test_what_routers_and_stores_need() -> None:
    names = {"BlockEvent", "BlockHasher", "EventBatch", "HashSpec", "Tier", "coalesce"}
    assert names <= set(manager.__all__)
    assert all(getattr(manager, name) is not None for name in manager.__all__)
    assert all(inspect.isclass(getattr(stores, name)) for name in stores.__all__)
    assert all(inspect.ismodule(getattr(tiers, name)) for name in tiers.__all__)


FORMER_ROOMS = (
    *(dsv4_jax, errors, manager, model, ops, pools, records, simulate, testing, tiers.remote),
    *(dsv4_jax.cuda.exchange, dsv4_jax.weights),
)


def test_former_names_answer_for_one_release() -> None:
    taken = [(room, old, path.rpartition(".")[2]) for room in FORMER_ROOMS for old, path in room._FORMER.items()]
    for room, old, new in taken:
        assert old not in room.__all__
        with pytest.warns(DeprecationWarning, match=rf"{old} is \S*{new} now"):
            assert getattr(getattr(room, old), "__name__", new) == new  # a table has no name
    assert len(taken) >= 80
    with pytest.warns(DeprecationWarning, match="eviction"):
        policy = manager.CachePolicy(order=LRU)
    with pytest.warns(DeprecationWarning, match="eviction"):
        assert policy.order is policy.eviction is LRU


def test_former_keywords_answer_for_one_release() -> None:
    cfg = dsv4_jax.DSV4Config.tiny(num_mtp_layers=1)
    calls = {
        ("include_mtp", "include_drafts"): lambda **how: dsv4_jax.CacheLayout(cfg, **how).include_drafts,
        ("mtp", "drafts"): lambda **how: "mtp" in dsv4_jax.model.param_specs(cfg, **how),
    }
    for (former, now), call in calls.items():
        with pytest.warns(DeprecationWarning, match=f"{former}=.* is {now}= now"):
            assert call(**{former: True}) == call(**{now: True}) != call()


def test_nothing_here_uses_a_former_name() -> None:
    """Read, not run: they warn, and what warns may lie on a path that no test goes."""
    former = {room.__name__: set(room._FORMER) for room in FORMER_ROOMS}
    folders, every = ("dsv4_jax", "tests", "benchmarks", "examples"), set().union(*former.values())
    used, seen = [], 0
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        package = path.relative_to(ROOT).with_suffix("").parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else ()
                room = ".".join((*above, *filter(None, [node.module])))
                seen += room in former
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr in every:
                room, names = ast.unparse(node.value).replace("dsv4.", "dsv4_jax."), [node.attr]
            else:
                continue
            used += [f"{path.relative_to(ROOT)}:{node.lineno}: {room}.{n}" for n in names if n in former.get(room, ())]
    assert not used and seen > 200, used
