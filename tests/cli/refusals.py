"""What every refusal of the command line is: exit status 2, and one line on stderr."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsv4_jax.cli import main

__all__ = ["refused"]


def refused(capsys: pytest.CaptureFixture[str], argv: Sequence[object], *parts: str) -> None:
    """Asserts that a command is refused with a line that holds these parts, and says nothing on stdout."""
    try:
        status = main([str(word) for word in argv])
    except SystemExit as done:
        status = done.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("dsv4-jax") and all(part in err for part in parts), err
