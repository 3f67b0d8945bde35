"""`/v1/responses` and Anthropic's `/v1/messages`."""
from typing import Any


async def responses(front: Any, request: Any) -> Any:
    raise NotImplementedError


async def messages(front: Any, request: Any) -> Any:
    raise NotImplementedError


async def count_tokens(front: Any, request: Any) -> Any:
    raise NotImplementedError
