"""Masks of what a request asks for, from plain data: no end too soon; a grammar."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..checks import check_integer, shown
from ..errors import RequestError

__all__ = ["Masks", "grammars_of"]

Fill = Callable[[Sequence[int], np.ndarray], object]


class Masks:
    """Makes masks for an engine (`Prompt.mask`).

    Args:
        vocab_size: ids are below.
        grammar: makes a mask of a grammar's plain data; None: none can be asked for.
    """

    def __init__(self, vocab_size: int, grammar: Callable[[Any], Fill] | None = None):
        self.vocab_size, self._grammar = vocab_size, grammar

    def of(self, asked: Mapping[str, Any]) -> Fill:
        """A mask.

        Args:
            asked: all of them optional: `min_tokens`, before which none of `stops` comes; `grammar`, plain data.

        Raises:
            RequestError: an id is none, or the grammar is none.
        """
        least = check_integer("min_tokens", asked.get("min_tokens", 0), error=RequestError)
        allowed = np.ones(-(-self.vocab_size // 32) * 32, bool)
        allowed[self._ids(asked.get("stops", ()))] = False
        early = np.packbits(allowed, bitorder="little").view(np.uint32)
        grammar = asked.get("grammar")
        fill = None
        if grammar is not None:
            if self._grammar is None:
                raise RequestError("this engine knows no grammar of its tokens")
            fill = self._grammar(grammar)

        def mask(out: Sequence[int], row: np.ndarray) -> None:
            if fill is None:
                row[:] = 0xFFFFFFFF
            else:
                fill(out, row)
            # A grammar may be at its end, or want nothing else.
            if len(out) < least and (fill is None or (row & early).any()):
                row &= early

        return mask

    def _ids(self, ids: Any) -> list[int]:
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.vocab_size]
        if wrong:
            raise RequestError(f"token {shown(wrong[0])} is outside the vocabulary 0..{self.vocab_size - 1}")
        return list(ids)


def grammars_of(checkpoint: str | pathlib.Path, vocab_size: int) -> Callable[[Any], Fill]:
    """Makes masks of `dsv4_jax.chat.Constraint`s, as lists. The checkpoint's tokenizer is read for the first."""
    lock, made = threading.Lock(), list[Any]()

    def grammar(asked: Any) -> Fill:
        from ..chat import Constraint, Grammars
        from ..text import Tokenizer

        with lock:
            if not made:
                made.append(Grammars(Tokenizer(checkpoint), vocab_size))
        return made[0].mask(Constraint(*asked))

    return grammar
