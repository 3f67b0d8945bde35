"""The fenced blocks of a page, run in their order as a reader would: one namespace, one folder."""

from __future__ import annotations

import contextlib
import doctest
import io
import pathlib
import re
import runpy
import shlex
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

from dsv4_jax import cli

__all__ = ["DOCS", "ROOT", "Block", "blocks", "check_output", "commands", "run_page"]

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```", re.S | re.M)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """Attributes:
    language: "python", "console" or another.
    not_run: the reason of `<!-- not run: ... -->` above it, "" without one.
    prints: of Python, the block titled "Output" behind it.
    """

    language: str
    text: str
    line: int
    not_run: str = ""
    prints: str | None = None


def blocks(page: pathlib.Path) -> list[Block]:
    text, found = page.read_text(), list[Block]()
    for match in _BLOCK.finditer(text):
        if 'title="Output"' in match["info"]:
            assert found[-1].language == "python" and found[-1].prints is None, f"{page}: output of nothing"
            found[-1] = found[-1]._replace(prints=match["text"])
        else:
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Block(match["info"].split(" ")[0], match["text"], line, match["why"] or ""))
    return found


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block; "" for what the page does not show."""
    joined = block.text.replace("\\\n", " ")
    parts = re.split(r"^\$ (.*)\n", joined, flags=re.M)
    assert not parts[0], f"line {block.line}: a console block begins with a command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def check_output(got: str, said: str, where: str) -> None:
    """`...` in what a page says stands for anything; runs of white space are one."""
    strip = lambda text: "\n".join(line.rstrip() for line in text.strip().splitlines())  # noqa: E731
    checker = doctest.OutputChecker()
    if not checker.check_output(strip(said) + "\n", strip(got) + "\n", _FLAGS):
        raise AssertionError(f"{where} prints\n{got}\nbut the page says\n{said}")


def run_page(page: pathlib.Path, replaced: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Runs every block of a page that is not marked "not run", in the current folder, and compares what it prints.

    Args:
        replaced: what stands for what in its Python.

    Returns:
        The names that its Python made.
    """
    scope: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.not_run:
            continue
        if block.language == "python":
            out, code = io.StringIO(), block.text
            for old, new in replaced.items():
                code = code.replace(old, new)
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (block.line - 1) + code, str(page), "exec"), scope)
            if block.prints is not None or out.getvalue():
                check_output(out.getvalue(), block.prints or "", where)
        if block.language == "console":
            for command, prints in commands(block):
                got = _run_command(command, where)
                if prints:
                    check_output(got, prints, f"{where}: {command}")
    return scope


def _run_command(command: str, where: str) -> str:
    words, out = shlex.split(command, comments=True), io.StringIO()
    with contextlib.redirect_stdout(out):
        if words[0] == "dsv4-jax":
            status = cli.main(words[1:])
        elif words[:3] == ["python", "-m", "dsv4_jax"]:
            status = cli.main(words[3:])
        elif words[0] == "python":
            status = 0
            with mock.patch.object(sys, "argv", words[1:]), contextlib.suppress(SystemExit):
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        else:
            raise AssertionError(f"{where}: {words[0]} is not run here: say why above the block (not run: ...)")
    assert status == 0, f"{where}: {command} ended with {status}"
    return out.getvalue()
