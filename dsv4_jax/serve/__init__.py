"""`dsv4-jax serve`: an engine behind HTTP, as OpenAI's and Anthropic's clients speak it. The extra `serve`.

The engine's process has a `Bridge`, which talks to frontends over a Unix socket (`wire`); each frontend is a process of
its own (`frontend`) with the routes (`app`). `Server` starts frontends and keeps them running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .server import Server

__all__ = ["Config", "Server"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from .config import Config

        return Config
    if name == "Server":
        from .server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
