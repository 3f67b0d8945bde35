"""Conversations with DeepSeek-V4: to token ids, and what the model answers back to messages. Imports no jax.

    chat = Chat.load(checkpoint)                        # or Chat(tokenizer, model="v4-0731")
    prompt = chat.prompt(messages, tools)               # its `ids`, and what its answer is read by
    parser = chat.parser(prompt)
    delta = parser.feed(ids)                            # reasoning, content, calls: what is new

DeepSeek's own package, deepseek-recipe, writes the prompts; grammars are llguidance's. Both are the extra `serve`.
"""

from .chat import Chat, encode
from .encoding import MODELS, ChatPrompt, model_of
from .grammar import Constraint, Grammars, constraint
from .parser import Call, CallPiece, Delta, Parser

__all__ = [
    "MODELS",
    "Call",
    "CallPiece",
    "Chat",
    "ChatPrompt",
    "Constraint",
    "Delta",
    "Grammars",
    "Parser",
    "constraint",
    "encode",
    "model_of",
]
