"""The loop of a core and an executor in the caller's own thread, call by call: what `generate` and the command run."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..errors import EngineError
from .core import Core
from .executor import Executor, Work
from .prompt import Output

__all__ = ["Turn", "drive"]


class Turn(NamedTuple):
    """What a call of the device brought.

    Attributes:
        fed: tokens of prompts that it computed; 0: it decoded and did nothing else.
        outputs: of all requests that there is something to tell of.
    """

    fed: int
    outputs: list[Output]


def drive(core: Core, executor: Executor, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Turn]:
    """Runs calls until no request is left; requests may be added and aborted between two turns.

    While a call runs, the next is planned and sent after it. A step that fails raises here: what the cache held is lost
    then (`Core.fail`, `Executor.recover`).

    Raises:
        NoFreeSlotError, OutOfBlocksError: a request can never be admitted, with none of the others live.
        EngineError: nothing can be planned for another reason (it is paused).
    """
    poll = getattr(executor, "poll", None)
    under_way: collections.deque[tuple[int, Any]] = collections.deque()
    while not core.idle:
        work = core.plan(clock())
        if work is not None:
            under_way.append((_fed(work), executor.send(work)))
        else:
            executor.move(core.flush())
        busy = poll is not None and poll(idle=work is None)
        if work is not None and len(under_way) < core.depth:
            continue
        if under_way:
            fed, call = under_way.popleft()
            yield Turn(fed, core.take(call.get(), clock()))
        elif outputs := core.drain():
            yield Turn(0, outputs)
        elif busy or core.fetching:
            time.sleep(1e-3)
        elif not core.idle:
            raise core.problem or EngineError("nothing can be planned, and no call is under way")
    executor.move(core.flush())


def _fed(work: Work) -> int:
    """Tokens of prompts in a call: all but those of requests that have sampled."""
    return sum(row.count for rows in work.rows for row in rows if row.prefills)
