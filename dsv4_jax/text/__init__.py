"""Text to token ids and back: a checkpoint's tokenizer, and answers as they stream. Imports no jax.

What reads tokenizers is the extra `text` (tokenizers), loaded when it is needed. Conversations are `dsv4_jax.chat`.
"""

from .byte_tokenizer import BYTE_TOKENS, save_byte_tokenizer
from .streams import StopText, TextStream
from .tokenizer import Tokenizer, stop_tokens_of

__all__ = [
    "BYTE_TOKENS",
    "StopText",
    "TextStream",
    "Tokenizer",
    "save_byte_tokenizer",
    "stop_tokens_of",
]
