"""What `generate` prints while it samples: answers, up to where they end; and how fast it was."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..text import TextStream, Tokenizer
from .printing import Progress
from .prompts import Prompt
from .values import short

if TYPE_CHECKING:
    from ..engine import Output

__all__ = ["Answer", "AnswerPrinter", "Speed", "write_text"]

# Of a terminal, control characters would move the cursor and more; lines and tabs may stay.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Answer:
    """What is sampled for one prompt, as ids and, if the prompt is a text, as text.

    Attributes:
        tokens: the ids; with a stop string, those that spelt it are the last.
        text: what of it can be shown so far; None: the prompt was given as ids.
        logprobs, top: of the ids, if they were asked for.
        end: why nothing more is sampled: "stop" (a token or string), "length"; None while it goes on.
        first_token_s: seconds after the start when its first token was there.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer | None, stops: Iterable[str], limit: int):
        self.prompt, self.tokens = prompt, list[int]()
        self._limit = limit
        self._stream = TextStream(tokenizer, stops) if tokenizer is not None and prompt.text is not None else None
        self.text = "" if self._stream else None
        self.end: str | None = None
        self.logprobs: list[float] = []
        self.top: list[Any] = []
        self.first_token_s: float | None = None

    def take(self, output: Output) -> None:
        """Takes what an output says beside its tokens."""
        self.logprobs += output.logprobs
        self.top += [dict(zip(map(str, ids), values, strict=True)) for ids, values in output.top]

    def add(self, tokens: Sequence[int], ended: bool, seconds: float) -> str:
        """Takes newly sampled tokens and returns what they add to what is shown.

        Args:
            ended: nothing more is sampled for it.
            seconds: since the start.
        """
        if tokens and self.first_token_s is None:
            self.first_token_s = seconds
        shown = "".join(self._piece(token) for token in tokens if not self._stopped)
        if ended and self._stream:
            shown += self._stream.end()
        if ended or self._stopped:
            self.end = "stop" if self._stopped or len(self.tokens) < self._limit else "length"
        if self.text is not None:
            self.text += shown
        return shown

    @property
    def _stopped(self) -> bool:
        return self._stream is not None and self._stream.stopped

    def _piece(self, token: int) -> str:
        self.tokens.append(token)
        if self._stream:
            return self._stream.add(token)
        return f"{',' if self.tokens[1:] else ''}{token}"

    def __str__(self) -> str:
        """The answer as it is shown, whole."""
        return ",".join(map(str, self.tokens)) if self.text is None else self.text

    def as_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.logprobs:
            more["logprobs"] = self.logprobs[: len(self.tokens)]
        if self.top:
            more["top"] = self.top[: len(self.tokens)]
        return more | {
            "prompt": self.prompt.text,
            "prompt_tokens": len(self.prompt.tokens),
            "tokens": self.tokens,
            "text": self.text,
            "end": self.end,
            "first_token_s": self.first_token_s,
        }


class AnswerPrinter:
    """Shows answers on stdout: of one prompt as it comes, of several each when it is complete.

    Args:
        silent: show nothing: stdout is for JSON.
    """

    def __init__(self, answers: Sequence[Answer], progress: Progress, *, silent: bool):
        self._answers, self._progress, self._silent = answers, progress, silent
        self._line_open = False

    def show(self, index: int, piece: str) -> None:
        """Shows that answer `index` has grown by this piece, or is complete."""
        answer = self._answers[index]
        if self._silent:
            return
        if len(self._answers) == 1:
            self._progress.stop()
            write_text(piece + ("\n" if answer.end else ""))
            self._line_open = answer.end is None
        elif answer.end:
            self._whole(index, answer.end)

    def show_rest(self) -> None:
        """Shows what has not been shown yet of answers that will not be completed."""
        if self._silent:
            return
        if self._line_open:
            write_text("\n")
        for index, answer in enumerate(self._answers):
            if len(self._answers) > 1 and answer.end is None and answer.tokens:
                self._whole(index, "interrupted")

    def _whole(self, index: int, end: str) -> None:
        answer = self._answers[index]
        named = short(answer.prompt.text or ",".join(map(str, answer.prompt.tokens[:20])))
        with self._progress.paused():
            write_text(f"[{index + 1}] {named}: {len(answer.tokens)} tokens, {end}\n{answer}\n\n")


@dataclasses.dataclass
class Speed:
    """Times of the steps, from one call to the next: planning and printing are part of them.

    Attributes:
        prompt_tokens, prefill_s: fed by steps that computed prompts, and their seconds.
        new_tokens: sampled in all.
        decoded, decode_s, decode_calls: tokens of the calls that did nothing else, their seconds and number.
        decode_rows: requests of these calls, added up.
    """

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    new_tokens: int = 0
    decoded: int = 0
    decode_s: float = 0.0
    decode_calls: int = 0
    decode_rows: int = 0

    def __post_init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def note(self, fed: int, sampled: int, rows: int) -> float:
        """A call has ended that fed so many tokens of prompts, and sampled so many for so many requests.

        Returns the seconds since the start.
        """
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        self.new_tokens += sampled
        if fed:
            self.prompt_tokens, self.prefill_s = self.prompt_tokens + fed, self.prefill_s + seconds
        else:
            self.decoded, self.decode_s = self.decoded + sampled, self.decode_s + seconds
            self.decode_calls, self.decode_rows = self.decode_calls + 1, self.decode_rows + rows
        return self._last - self._start

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "prefill_tokens_per_s": _rate(self.prompt_tokens, self.prefill_s),
            "decode_tokens_per_s": _rate(self.decoded, self.decode_s),
        }

    def in_words(self, answers: Sequence[Answer], cached: int, drafted: bool) -> str:
        """Says how fast it was, in a line.

        Args:
            cached: tokens of prompts that were found in the cache.
            drafted: calls are steps that carried drafts.
        """
        firsts = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
        found = f" ({cached:,} more found in the cache)" if cached else ""
        rates = [_rate(self.prompt_tokens, self.prefill_s), _rate(self.decoded, self.decode_s)]
        said = [f"{rate:,.1f}/s" if rate else "" for rate in rates]
        parts = [f"{self.prompt_tokens:,} tokens of prompts{found} in {self.prefill_s:.3f} s ({said[0]})"]
        if self.decode_calls:
            each = f", {self.decoded / max(self.decode_rows, 1):.2f} of each step" if drafted else ""
            parts.append(f"{self.decoded:,} decoded in {self.decode_s:.3f} s ({said[1]}{each})")
        if firsts:
            several = f", the median of {len(firsts)}" if firsts[1:] else ""
            parts.append(f"first token after {statistics.median(firsts):.3f} s{several}")
        return "; ".join(parts)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def write_text(text: str) -> None:
    """Writes to stdout; characters that it has no bytes for as escapes."""
    if sys.stdout is None:  # it was closed
        return
    encoding = sys.stdout.encoding or "utf-8"
    shown = text.translate(_CONTROL) if sys.stdout.isatty() else text
    print(shown.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
