"""Every Python and console block of README and docs runs, and prints what the page says."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import pytest

from dsv4_jax.cli import _arguments

from .. import native
from .pages import DOCS, ROOT, blocks, check_output, commands, run_page

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WITH_CODE = [page for page in PAGES if {"python", "console"} & {block.language for block in blocks(page)}]
# What docs/simulate.md replays: three requests in Mooncake's form, the second goes on from the first.
TRACE = "".join(
    json.dumps(dict(timestamp=1000 * i, input_length=512 * len(ids), output_length=20, hash_ids=ids)) + "\n"
    for i, ids in enumerate(([1, 2], [1, 2, 3], [4]))
)
FEWER = {"mixes=20": "mixes=1"}  # as long as a test should take
# Why a block may stay unrun, and which commands that is for.
NOT_RUN = {
    "installs packages": r"(pip install|pip wheel|make (demo|test))\b",
    "compiles for minutes": r"(pip install|dsv4-jax build)\b",
    "needs a GPU": r"(python -m dsv4_jax|dsv4-jax) bench |python benchmarks/\w+\.py",
    "needs a disk": r"python benchmarks/\w+\.py",
    "needs a checkpoint": r"dsv4-jax (demo|generate|chat|logits|serve) --checkpoint|pip .*serve|open http:|curl ",
    "needs a server": r"(pip install aiperf|aiperf profile)\b",
    "tests/cli runs it": r"dsv4-jax demo$",
}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    native.load_cpu()
    (tmp_path / "conversation_trace.jsonl").write_text(TRACE)
    run_page(page, FEWER)


def test_what_is_not_run_is_understood(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DIR", "FILE", "tokens.npy"):
        (tmp_path / name).touch()
    for page in PAGES:
        for block in blocks(page):
            if not block.not_run:
                continue
            assert block.language == "console", f"{page}:{block.line}: only commands may stay unrun"
            for command, _ in commands(block):
                assert re.match(NOT_RUN[block.not_run], command), f"{page}: {command} can run"
                words = shlex.split(command, comments=True)
                if words[0] == "dsv4-jax":
                    _arguments(words[1:])


def test_what_is_compared(tmp_path: pathlib.Path) -> None:
    check_output("a  b\nc 1.5\n", "a b\nc ...\n", "here")
    with pytest.raises(AssertionError, match="the page says"):
        check_output("a\n", "b\n", "here")
    page = tmp_path / "page.md"
    page.write_text(
        '```python\nprint(1)\n```\n\n```text title="Output"\n1\n```\n\n<!-- not run: why -->\n```console\n$ x\n```\n'
    )
    code, console = blocks(page)
    assert (code.prints, code.line, console.not_run, commands(console)) == ("1\n", 2, "why", [("x", "")])
