"""What `generate` and `chat` print while they sample: answers, up to where they end; and how fast it was."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..chat import Delta, Parser
from ..text import TextStream
from .printing import Progress
from .prompts import Prompt
from .values import short

if TYPE_CHECKING:
    from ..engine import Output

__all__ = ["DIM", "PLAIN", "Answer", "AnswerPrinter", "Shown", "Speed", "write_text"]

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

# Of a terminal, control characters would move the cursor and more; lines and tabs may stay.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Answer:
    """What is sampled for one prompt, as ids and, if the prompt is a text, as text.

    Attributes:
        tokens: the ids; with a stop string, those that spelt it are the last.
        reasoning: of a conversation, what comes before the text.
        text: what of it can be shown so far; None: the prompt was given as ids.
        logprobs, top: of the ids, if they were asked for.
        end: why nothing more is sampled: "stop" (a token or string), "length"; None while it goes on.
        first_token_s: seconds after the start when its first token was there.

    Args:
        reader: makes text of its ids; None: there is none to make.
        limit: of its tokens.
    """

    def __init__(self, prompt: Prompt, reader: TextStream | Parser | None, limit: int):
        self.prompt, self.tokens = prompt, list[int]()
        self._limit, self._reader = limit, reader
        self.reasoning = ""
        self.text = None if reader is None else ""
        self.end: str | None = None
        self.logprobs: list[float] = []
        self.top: list[Any] = []
        self.first_token_s: float | None = None

    def take(self, output: Output) -> None:
        """Takes what an output says beside its tokens."""
        self.logprobs += output.logprobs
        self.top += [dict(zip(map(str, ids), values, strict=True)) for ids, values in output.top]

    def add(self, tokens: Sequence[int], ended: bool, seconds: float) -> Delta:
        """Takes newly sampled tokens and returns what they add to what is shown.

        Args:
            ended: nothing more is sampled for it.
            seconds: since the start.
        """
        if tokens and self.first_token_s is None:
            self.first_token_s = seconds
        pieces = [self._piece(token) for token in tokens if not self._stopped]
        if ended or self._stopped:
            pieces.append(self._rest())
            self.end = "stop" if self._stopped or len(self.tokens) < self._limit else "length"
        shown = Delta("".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces))
        self.reasoning += shown.reasoning
        if self.text is not None:
            self.text += shown.content
        return shown

    @property
    def _stopped(self) -> bool:
        return self._reader is not None and self._reader.stopped

    def _piece(self, token: int) -> Delta:
        self.tokens.append(token)
        if isinstance(self._reader, Parser):
            return self._reader.feed((token,))
        if self._reader is None:
            return Delta(content=f"{',' if self.tokens[1:] else ''}{token}")
        return Delta(content=self._reader.add(token))

    def _rest(self) -> Delta:
        """What is left to be shown once nothing follows."""
        if isinstance(self._reader, Parser):
            return self._reader.end()
        return Delta() if self._reader is None else Delta(content=self._reader.end())

    @property
    def whole(self) -> Delta:
        """All that is shown of it so far."""
        return Delta(self.reasoning, ",".join(map(str, self.tokens)) if self.text is None else self.text)

    def as_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.logprobs:
            more["logprobs"] = self.logprobs[: len(self.tokens)]
        if self.top:
            more["top"] = self.top[: len(self.tokens)]
        if self.prompt.chat is not None:
            more["reasoning"] = self.reasoning
        return more | {
            "prompt": self.prompt.text,
            "prompt_tokens": len(self.prompt.tokens),
            "tokens": self.tokens,
            "text": self.text,
            "end": self.end,
            "first_token_s": self.first_token_s,
        }


class Shown:
    """An answer on stdout while it comes: its reasoning, dimmed on a terminal, an empty line, then itself."""

    def __init__(self) -> None:
        self._dimmed = self._reasons = False
        self.last = ""  # that was written

    def add(self, delta: Delta) -> None:
        """Writes what is new of it."""
        if delta.reasoning:
            self._dim(True)
            self._reasons = True
            self._write(delta.reasoning)
        if delta.content:
            self._dim(False)
            self._write("\n\n" * self._reasons + delta.content)
            self._reasons = False

    def end(self) -> None:
        """Nothing follows: what others write is not dimmed."""
        self._dim(False)

    def _dim(self, on: bool) -> None:
        if on != self._dimmed and sys.stdout is not None and sys.stdout.isatty():
            self._dimmed = on
            print(DIM if on else PLAIN, end="", flush=True)

    def _write(self, text: str) -> None:
        self.last = text
        write_text(text)


class AnswerPrinter:
    """Shows answers on stdout: of one prompt as it comes, of several each when it is complete.

    Args:
        silent: show nothing: stdout is for JSON.
    """

    def __init__(self, answers: Sequence[Answer], progress: Progress, *, silent: bool):
        self._answers, self._progress, self._silent = answers, progress, silent
        self._shown = Shown()  # of the only one

    def show(self, index: int, piece: Delta) -> None:
        """Shows that answer `index` has grown by this piece, or is complete."""
        answer = self._answers[index]
        if self._silent:
            return
        if len(self._answers) == 1:
            self._progress.stop()
            self._shown.add(piece)
            if answer.end:
                self._shown.end()
                write_text("\n")
        elif answer.end:
            self._whole(index, answer.end)

    def show_rest(self) -> None:
        """Shows what has not been shown yet of answers that will not be completed."""
        if self._silent:
            return
        if self._shown.last and self._answers[0].end is None:
            self._shown.end()
            write_text("\n")
        for index, answer in enumerate(self._answers):
            if len(self._answers) > 1 and answer.end is None and answer.tokens:
                self._whole(index, "interrupted")

    def _whole(self, index: int, end: str) -> None:
        answer, shown = self._answers[index], Shown()
        named = short(answer.prompt.text or ",".join(map(str, answer.prompt.tokens[:20])))
        with self._progress.paused():
            write_text(f"[{index + 1}] {named}: {len(answer.tokens)} tokens, {end}\n")
            shown.add(answer.whole)
            shown.end()
            write_text("\n\n")


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
