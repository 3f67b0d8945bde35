"""Request traces: JSON lines, one request each, in either of two forms. Pure Python.

Native form; times in seconds, hashes are integers or strings:

    {"arrival": 0.5, "prompt": [["system", 2000], ["chat 7, question 1", 90]], "output": 120, "tenant": "a"}

A run `[hash, n]` stands for the first n tokens of an endless sequence that the hash alone determines; `[hash, n,
start]` for n tokens from token `start` of it on. So prompts that begin with the same runs begin with the same
tokens. `output` is a number of tokens, or runs as well: then a later prompt can contain what was generated here.
`tenant` (optional) is the namespace.

Mooncake's form; every hash id stands for `trace_block_tokens` tokens, the last one for what is left (if there
is an id for that; without one it is never shared):

    {"timestamp": 500, "input_length": 1300, "output_length": 120, "hash_ids": [0, 1, 17]}

Further fields are ignored in this form and refused in the native one.

A trace is UTF-8. Its lines have at most 8 Mi characters, and its runs (or hash ids) and four times its lines are
together at most 16 Mi: so no file, however long, takes all memory.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from ..checks import check_integer, shown
from ..errors import TraceError

__all__ = ["TraceRequest", "TraceRun", "is_private", "read_trace", "write_trace"]

_FIELDS = frozenset({"arrival", "prompt", "output", "tenant"})
_PRIVATE = "\0"  # what the names of sequences begin with that no trace names
MAX_TOKENS = 2**31  # of one run
MAX_TIME = 1e18
MAX_LINE = 1 << 23  # characters: a context of 1 Mi tokens in blocks of 16 takes less
MAX_PARTS = 1 << 24  # runs of a trace and four times its lines


class TraceRun(NamedTuple):
    """`tokens` tokens of the sequence called `hash`, from token `start` on."""

    hash: int | str
    tokens: int
    start: int = 0

    @property
    def plain(self) -> tuple:
        """The run as a trace is written: without a start of 0."""
        return tuple(self) if self.start else self[:2]


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds from the start of the trace.
        prompt: at least one token.
        output: what is generated; no token at all for a request that is only prefilled.
        tenant: namespace of its blocks.
        prompt_tokens, output_tokens: of all runs.
    """

    arrival: float
    prompt: tuple[TraceRun, ...]
    output: tuple[TraceRun, ...]
    tenant: int | str | None = None
    prompt_tokens: int = dataclasses.field(init=False, compare=False, repr=False)
    output_tokens: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, runs in (("prompt_tokens", self.prompt), ("output_tokens", self.output)):
            object.__setattr__(self, name, sum([run.tokens for run in runs]))


def is_private(output: Sequence[TraceRun]) -> bool:
    """Whether it was a number of tokens in the trace: no other request can have them."""
    return len(output) == 1 and str(output[0].hash).startswith(_PRIVATE)


def read_trace(
    lines: Iterable[str],
    *,
    source: str = "trace",
    trace_block_tokens: int = 512,
    timestamp_unit: float = 1e-3,
    limit: int | None = None,
) -> list[TraceRequest]:
    """Returns the requests of a trace, earliest first; of equal arrivals the earlier line first. Empty lines are
    skipped.

    Args:
        lines: such as an open text file, of which no more than a line is read at a time. Opened with
            `errors="surrogateescape"`, what is not UTF-8 is an error that names the line.
        source: name in error messages.
        trace_block_tokens: tokens of a hash id of Mooncake's form.
        timestamp_unit: seconds of one unit of Mooncake's `timestamp`.
        limit: read that many requests at most.

    Raises:
        TraceError: an argument is impossible, a line is no request (names line and field), there is none at all, or
            there is too much.
    """
    block = check_integer("trace_block_tokens", trace_block_tokens, 1, MAX_TOKENS - 1, error=TraceError)
    if isinstance(timestamp_unit, bool) or not isinstance(timestamp_unit, int | float) or not 0 < timestamp_unit < 1e18:
        raise TraceError(f"timestamp_unit must be a time above 0 (below 1e18), got {shown(timestamp_unit)}")
    limit = None if limit is None else check_integer("limit", limit, 1, error=TraceError)
    requests: list[TraceRequest] = []
    parts = 0
    for number, line in _numbered(lines, source):
        if limit is not None and len(requests) == limit:
            break
        if line.strip():
            requests.append(_Line(source, number, line).request(block, timestamp_unit))
            parts += len(requests[-1].prompt) + len(requests[-1].output)
        if 4 * number + parts > MAX_PARTS:
            raise TraceError("the trace is too long: a limit on its requests leaves the rest out", source, number)
    if not requests:
        raise TraceError("there is no request in it", source)
    requests.sort(key=lambda request: request.arrival)
    return requests


def _numbered(lines: Iterable[str], source: str) -> Iterator[tuple[int, str]]:
    """The lines from 1 on, none of them long. Raises `TraceError`."""
    if isinstance(lines, io.TextIOBase):
        lines = iter(functools.partial(lines.readline, MAX_LINE + 1), "")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE:
            raise TraceError(f"is longer than {MAX_LINE} characters", source, number)
        if not line.isascii() and any("\ud800" <= c <= "\udfff" for c in line):  # what `surrogateescape` makes
            raise TraceError("not UTF-8", source, number)
        yield number, line


def write_trace(requests: Iterable[TraceRequest], file: IO[str]) -> None:
    """Writes requests in the native form."""
    for request in requests:
        fields: dict[str, Any] = {
            "arrival": request.arrival,
            "prompt": [run.plain for run in request.prompt],
            "output": [run.plain for run in request.output],
            "tenant": request.tenant,
        }
        json.dump(fields, file)
        file.write("\n")


class _Line:
    """One line of a trace and its checks."""

    def __init__(self, source: str, number: int, text: str):
        self.source, self.number = source, number
        try:
            value = json.loads(text)
        except ValueError as error:
            raise TraceError(f"not JSON: {error}", source, number) from error
        except RecursionError as error:
            raise TraceError("not a request: nested too deep", source, number) from error
        if not isinstance(value, dict):
            raise TraceError(f"a request is a JSON object, got {_short(value)}", source, number)
        self.fields: dict[str, Any] = value

    def request(self, block_tokens: int, unit: float) -> TraceRequest:
        if "hash_ids" in self.fields or "input_length" in self.fields:
            return self._mooncake(block_tokens, unit)
        for name in self.fields:
            if name not in _FIELDS:
                raise self.error(_clipped(name), f"unknown field; there are {', '.join(sorted(_FIELDS))}")
        arrival, output = self.seconds("arrival"), self.get("output")
        prompt = self.runs("prompt")
        if not sum(run.tokens for run in prompt):
            raise self.error("prompt", "has no tokens")
        answer = self.runs("output") if isinstance(output, list) else self.private_output("output")
        return TraceRequest(arrival, prompt, answer, self.tenant())

    def _mooncake(self, block: int, unit: float) -> TraceRequest:
        arrival = self.seconds("timestamp") * unit
        length = self.count("input_length", self.get("input_length"), 1)
        answer = self.private_output("output_length")
        ids = self.get("hash_ids")
        if not isinstance(ids, list):
            raise self.error("hash_ids", f"must be a list, got {_short(ids)}")
        whole, rest = divmod(length, block)
        if len(ids) - whole not in ((0, 1) if rest else (0,)):
            needed = f"{whole} or {whole + 1}" if rest else f"{whole}"
            raise self.error("hash_ids", f"has {len(ids)} ids, not {needed} for {length} tokens in blocks of {block}")
        names = [self.hash("hash_ids", i, value) for i, value in enumerate(ids)]
        runs = [TraceRun(name, block) for name in names[:whole]]
        if rest:  # some tools give the last, partial block no id: it is never shared
            name = names[whole] if len(names) > whole else f"{_PRIVATE}rest of line {self.number}"
            runs.append(TraceRun(name, rest))
        return TraceRequest(arrival, tuple(runs), answer, self.tenant())

    # Fields

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(name, "is missing")
        return self.fields[name]

    def seconds(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_TIME:
            raise self.error(name, f"must be a time >= 0 (below {MAX_TIME:.0e}), got {_short(value)}")
        return float(value)

    def count(self, name: str, value: Any, low: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < MAX_TOKENS:
            raise self.error(name, f"must be an integer of at least {low} (below 2^31), got {_short(value)}")
        return value

    def hash(self, name: str, index: int, value: Any) -> int | str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.error(name, f"item {index}: a hash is an integer or a string, got {_short(value)}")
        return value

    def runs(self, name: str) -> tuple[TraceRun, ...]:
        value = self.get(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list of [hash, tokens], got {_short(value)}")
        return tuple(self._runs(name, value))

    def _runs(self, name: str, value: list[Any]) -> Iterator[TraceRun]:
        for i, item in enumerate(value):
            if not isinstance(item, list) or len(item) not in (2, 3):
                raise self.error(name, f"item {i}: must be [hash, tokens] or [hash, tokens, start], got {_short(item)}")
            start = item[2] if len(item) > 2 else 0
            for number, low, what in ((item[1], 1, "have at least 1 token"), (start, 0, "start at 0 or later")):
                if isinstance(number, bool) or not isinstance(number, int) or not low <= number < MAX_TOKENS:
                    raise self.error(name, f"item {i}: must {what} (below 2^31), got {_short(number)}")
            yield TraceRun(self.hash(name, i, item[0]), item[1], start)

    def private_output(self, name: str) -> tuple[TraceRun, ...]:
        """Tokens that no other request has."""
        count = self.count(name, self.get(name))
        return (TraceRun(f"{_PRIVATE}output of line {self.number}", count),) if count else ()

    def tenant(self) -> int | str | None:
        value = self.fields.get("tenant")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
            raise self.error("tenant", f"must be an integer or a string, got {_short(value)}")
        return value

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(problem, self.source, self.number, field)


def _short(value: Any) -> str:
    try:
        return _clipped(json.dumps(value))
    except RecursionError:
        return "a value nested too deep"


def _clipped(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
