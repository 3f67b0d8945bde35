"""The engine behind `generate`: how large its cache is, where what it computed is kept, and its loop."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..capacity import device_limit, largest_fitting
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize
from ..records import block_record, snapshot_layouts, snapshot_record
from .answers import Answer, AnswerPrinter, Speed
from .options import naming
from .printing import Progress, human

if TYPE_CHECKING:
    from ..engine import Core, Executor
    from ..stores import AsyncStore

__all__ = ["DeviceMemory", "answer", "choose_size", "open_stores", "shares_a_block", "weights_name"]

_SPARE = 0.1  # of what the weights leave: for what a step computes with
_RECORDS = 1 << 16  # that each store keeps at most


class DeviceMemory(NamedTuple):
    """The bytes of a device, and those of them that the weights take."""

    total: int
    weights: int

    @classmethod
    def beside(cls, weights: int) -> DeviceMemory:
        """Of this machine's device. Raises `OptionError` if the weights leave nothing of it."""
        memory = cls(device_limit(), weights)
        if memory.free <= 0:
            raise OptionError(f"--weights: they take {human(weights)}, jax has {human(memory.total)} of the device")
        return memory

    @property
    def free(self) -> int:
        """The bytes that a cache may take."""
        return int((self.total - self.weights) * (1 - _SPARE))


def choose_size(
    layout: CacheLayout,
    needs: Sequence[int],
    high: int,
    memory: DeviceMemory,
    most: int | None = None,
    *,
    snapshots: bool = False,
    ranks: int = 1,
) -> CacheSize:
    """The cache in which up to `high` requests run at once, fewer if there is no memory for half of their blocks.

    Half: they do not reach their ends at once, and one that finds no blocks waits for those of another.

    Args:
        needs: tokens of each request.
        memory: of the device.
        most: bytes that the cache may take at most; None: what the weights leave.
        snapshots: states are kept, one for each request and one more.
        ranks: devices that share each request's blocks, each with this memory.

    Raises:
        OptionError: not even one request fits.
    """
    free = memory.free if most is None else min(memory.free, most)
    blocks = sorted((layout.blocks_for(need) for need in needs), reverse=True)

    def size(slots: int, share: float = 1.0) -> CacheSize:
        whole = sum(-(-count // ranks) for count in blocks[:slots])
        each = max(int(whole * share), -(-blocks[0] // ranks))
        return CacheSize(each, slots, blocks[0], slots + 1 if snapshots else 0, pool_ranks=ranks)

    fitting = largest_fitting(lambda slots: layout.total_bytes(size(slots, 0.5)) <= free, high)
    if not fitting:
        named = "" if most is None else "--cache-memory, "
        raise OptionError(
            f"{named}--max-new-tokens: a cache for {max(needs)} tokens, prompt included, takes "
            f"{human(layout.total_bytes(size(1)))}, the device has {human(max(free, 0))} for it beside "
            f"{human(memory.weights)} of weights"
        )
    share = largest_fitting(lambda part: layout.total_bytes(size(fitting, part / 64)) <= free, 64)
    with naming("--max-batch"):
        layout.check_size(size(fitting))
    return size(fitting, max(share, 32) / 64)


def shares_a_block(prompts: Sequence[Sequence[int]], block_tokens: int) -> bool:
    """Whether two prompts have their first block in common, and a token behind it: something to find in a cache."""
    firsts = Counter(tuple(prompt[:block_tokens]) for prompt in prompts if len(prompt) > block_tokens)
    return max(firsts.values(), default=0) > 1


def weights_name(checkpoint: pathlib.Path, form: str) -> str:
    """Names the weights for what outlives this process: by the names, sizes and times of a checkpoint's files."""
    digest = hashlib.sha256(form.encode())
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in (".safetensors", ".json"):
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def open_stores(folder: pathlib.Path | None, layout: CacheLayout) -> Iterator[tuple[AsyncStore, AsyncStore] | None]:
    """The stores of blocks and snapshots in a folder; None where none is given. Raises `OptionError`."""
    if folder is None:
        yield None
        return
    from ..stores import AsyncStore
    from ..stores.slab import SlabStore

    with contextlib.ExitStack() as opened, naming("--store"):
        folder.mkdir(parents=True, exist_ok=True)
        # With and without drafts alike, where both can do with the same records.
        states = max(snapshot_layouts(layout), key=lambda each: snapshot_record(each).bytes)
        kinds = (
            ("blocks", block_record(layout).bytes, layout.block_fingerprint),
            ("states", snapshot_record(states).bytes, states.snapshot_fingerprint),
        )
        stores = []
        for name, size, fingerprint in kinds:
            slab = SlabStore(
                folder / f"{name}.slab",
                record_bytes=size,
                max_records=_RECORDS,
                fingerprint=fingerprint,
                preallocate=False,
            )
            stores.append(opened.enter_context(AsyncStore(slab)))
        yield stores[0], stores[1]


def answer(
    core: Core, executor: Executor, answers: Sequence[Answer], printer: AnswerPrinter, progress: Progress
) -> Speed:
    """Answers all prompts that the core was given, whose ids are their places. Returns how fast it was."""
    from ..engine import drive

    speed = Speed()
    for turn in drive(core, executor):
        new = [output for output in turn.outputs if output.tokens]
        seconds = speed.note(turn.fed, sum(len(output.tokens) for output in new), len(new))
        for output in turn.outputs:
            if output.error is not None:
                raise output.error
            index: Any = output.id
            if answers[index].end:  # a stop string has ended it
                continue
            answers[index].take(output)
            piece = answers[index].add(output.tokens, output.finish is not None, seconds)
            printer.show(index, piece)
            progress.advance(len(output.tokens))
            if answers[index].end and output.finish is None:
                core.abort(index)
    return speed
