"""What routes answer with, and how a route works something out beside its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

__all__ = ["as_json", "aside"]


def as_json(value: Any, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def aside(call: Callable[..., Any], *arguments: Any) -> Any:
    """What this returns, worked out beside the loop: other streams go on meanwhile."""
    return await asyncio.to_thread(call, *arguments)
