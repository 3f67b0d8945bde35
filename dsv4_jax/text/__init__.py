"""Text to token ids and back: a checkpoint's tokenizer and chat template, and answers as they stream. Imports no jax.

What reads tokenizers and templates is the extra `text` (tokenizers, jinja2), loaded when it is needed.
"""

from .byte_tokenizer import BYTE_TOKENS, save_byte_tokenizer
from .chat_template import Message
from .streams import StopText, TextStream
from .tokenizer import Tokenizer, stop_tokens_of

__all__ = [
    "BYTE_TOKENS",
    "Message",
    "StopText",
    "TextStream",
    "Tokenizer",
    "save_byte_tokenizer",
    "stop_tokens_of",
]
