"""`/v1/chat/completions`."""
from typing import Any


class Chats:
    def __init__(self, config: Any):
        self.config = config


async def chat_completions(front: Any, request: Any) -> Any:
    raise NotImplementedError
