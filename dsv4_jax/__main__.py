"""The command `dsv4-jax`, and `python -m dsv4_jax`."""

from __future__ import annotations

import os
from typing import NoReturn

__all__ = ["command"]


def command() -> NoReturn:
    """Runs `cli.entry`; an interrupt while that is imported is no traceback either."""
    try:
        from .cli import entry

        entry()
    except KeyboardInterrupt:
        os._exit(130)  # as there


if __name__ == "__main__":
    command()
