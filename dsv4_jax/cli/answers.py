"""What `generate` prints while it samples: the text of tokens, up to where it ends; and how fast it was."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..text.tokenizer import Tokenizer
from .printing import Progress
from .prompts import Prompt
from .values import short

__all__ = ["Answer", "AnswerPrinter", "Speed", "StopText", "TextStream"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Of a terminal, control characters would move the cursor and more; lines and tabs may stay.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class TextStream:
    """The text of ids that come one by one: the pieces add up to the text of all of them.

    A character may be spread over several ids: nothing is said of it before its last. Some decoders drop a space where
    a text begins, so ids are decoded behind those before them.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from the piece before on
        self._said = 0  # characters of their text
        self._before = 0  # ids of the piece before

    def add(self, token: int) -> str:
        """Returns what can be said once this id is there."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(_INCOMPLETE)
        piece = whole[self._said :]
        self._said = max(self._said, len(whole))
        if piece and whole == text:
            self._ids = self._ids[self._before :]
            self._before = len(self._ids)
            self._said = len(self._tokenizer.decode(self._ids))
        return piece

    def end(self) -> str:
        """Returns the text that is left, once no id follows."""
        return self._tokenizer.decode(self._ids)[self._said :]


class StopText:
    """Lets text through up to the first of some strings. What may be the beginning of one is held back.

    The first is the one that ends first, and of several that end at the same place the longest: that is decided as soon
    as its last character is there, so it does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Returns what of the text so far can be shown now. Nothing more is asked once `found`."""
        text = self._held + text
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        shown = min(places)[1] if places else len(text) - self._begun(text)
        self._held = "" if places else text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Returns what was held back, once no text follows."""
        return self._held

    def _begun(self, text: str) -> int:
        """How many characters at the end of `text` are the most that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        tails = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stops)), 0)


class Answer:
    """What is sampled for one prompt, as ids and, if the prompt is a text, as text.

    Attributes:
        tokens: the ids; with a stop string, those that spelt it are the last.
        text: what of it can be shown so far; None: the prompt was given as ids.
        end: why nothing more is sampled: "stop" (a token or string), "length"; None while it goes on.
        first_token_s: seconds after the start when its first token was there.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer | None, stops: Iterable[str], limit: int):
        self.prompt, self.tokens = prompt, list[int]()
        self._limit, self._stop = limit, StopText(stops)
        self._stream = TextStream(tokenizer) if tokenizer is not None and prompt.text is not None else None
        self.text = "" if self._stream else None
        self.end: str | None = None
        self.first_token_s: float | None = None

    def add(self, tokens: Sequence[int], ended: bool, seconds: float) -> str:
        """Takes newly sampled tokens and returns what they add to what is shown.

        Args:
            ended: nothing more is sampled for it.
            seconds: since the start.
        """
        if tokens and self.first_token_s is None:
            self.first_token_s = seconds
        shown = "".join(self._piece(token) for token in tokens if not self._stop.found)
        if ended and self._stream and not self._stop.found:
            shown += self._stop.add(self._stream.end()) + self._stop.end()
        if self._stop.found or ended:
            self.end = "stop" if self._stop.found or len(self.tokens) < self._limit else "length"
        if self.text is not None:
            self.text += shown
        return shown

    def _piece(self, token: int) -> str:
        self.tokens.append(token)
        if self._stream:
            return self._stop.add(self._stream.add(token))
        return f"{',' if self.tokens[1:] else ''}{token}"

    def __str__(self) -> str:
        """The answer as it is shown, whole."""
        return ",".join(map(str, self.tokens)) if self.text is None else self.text

    def as_dict(self) -> dict[str, Any]:
        return {
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
            _write(piece + ("\n" if answer.end else ""))
            self._line_open = answer.end is None
        elif answer.end:
            self._whole(index, answer.end)

    def show_rest(self) -> None:
        """Shows what has not been shown yet of answers that will not be completed."""
        if self._silent:
            return
        if self._line_open:
            _write("\n")
        for index, answer in enumerate(self._answers):
            if len(self._answers) > 1 and answer.end is None and answer.tokens:
                self._whole(index, "interrupted")

    def _whole(self, index: int, end: str) -> None:
        answer = self._answers[index]
        named = short(answer.prompt.text or ",".join(map(str, answer.prompt.tokens[:20])))
        with self._progress.paused():
            _write(f"[{index + 1}] {named}: {len(answer.tokens)} tokens, {end}\n{answer}\n\n")


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


def _write(text: str) -> None:
    """Writes to stdout; characters that it has no bytes for as escapes."""
    if sys.stdout is None:  # it was closed
        return
    encoding = sys.stdout.encoding or "utf-8"
    shown = text.translate(_CONTROL) if sys.stdout.isatty() else text
    print(shown.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
