"""A tokenizer of a token a byte, as tests of texts need it."""

from __future__ import annotations

from dsv4_jax.text import BYTE_TOKENS

BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"


def ids_of(text: str) -> list[int]:
    """A token a byte, whatever the bytes spell."""
    return [BYTE_TOKENS - 256 + byte for byte in text.encode()]
