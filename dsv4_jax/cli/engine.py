"""Engines behind `generate`, `chat` and `serve`: model, devices and memory as the options say, and their stores."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ..capacity import device_limit, largest_fitting, machine_bytes, plan_capacity, plan_host_capacity
from ..config import DSV4Config, Numerics
from ..errors import OptionError
from ..hf_config import read_hf
from ..layout import CacheLayout, CacheSize
from ..manager import HostSize
from ..records import block_record, snapshot_layouts, snapshot_record
from .answers import Answer, AnswerPrinter, Speed
from .models import add_drafts, add_weights, check, check_drafts, devices_that_hold, form_of, load, weight_bytes
from .options import add_implementation, check_devices, check_implementation, layout_from, naming, option, start_jax
from .printing import Progress, human
from .values import byte_count, given_path, positive

if TYPE_CHECKING:
    from ..engine import Core, Engine, Executor
    from ..stores import AsyncStore

__all__ = [
    "DeviceMemory",
    "Model",
    "Placed",
    "add_steps",
    "add_store",
    "answer",
    "choose_size",
    "host_size",
    "open_engine",
    "open_stores",
    "place",
    "shares_a_block",
    "steps_per_call",
    "weights_name",
]

_SPARE = 0.1  # of what the weights leave: for what a step computes with
_CPU_MEMORY = 2 << 30  # bytes of a CPU that the cache of `chat` or `serve` takes at most, if it is not said
_LOOP = 8  # decode steps per call that hide the host of one request on a GPU
_RECORDS = 1 << 16  # that each store keeps at most


def add_steps(
    parser: argparse.ArgumentParser,
    *,
    chunk: str = "512",
    decode: str = "text comes K tokens at a time",
    cache: str = "what the weights leave, on a CPU 2GiB",
    devices: str = "to run on",
    loops: bool = False,
) -> argparse._ArgumentGroup:
    """Adds how steps run.

    Args:
        chunk, cache: the defaults.
        decode: what more steps per call mean.
        devices: what they do.
        loops: whether several steps per call are the default where that hides the host: nobody else waits for a step.
    """
    group = parser.add_argument_group("how it runs")
    form = "matrices in this dtype, or released: FP8 and FP4 as they are"
    add_weights(group, f"{form} (default: released if they are FP8, on a CPU bfloat16; else float32)")
    rounded = "released: products round rows to e4m3 as the released model's do, with --weights released"
    group.add_argument("--numerics", choices=get_args(Numerics), default="plain", help=f"{rounded} (default: plain)")
    option(group, "--chunk", positive, "N", f"most tokens of a step (default: {chunk})")
    alone = f"{_LOOP} on a GPU, else 1" if loops else "1"
    option(group, "--decode-steps", positive, "K", f"steps per call: {decode} (default: {alone})")
    add_drafts(group)
    option(group, "--cache-memory", byte_count, "SIZE", f"bytes of each device for the cache (default: {cache})")
    option(group, "--devices", positive, "N", f"{devices}, 1, 2, 4 or 8", default=1)
    add_implementation(group)
    return group


def steps_per_call(args: argparse.Namespace) -> int:
    """Returns K of `--decode-steps` where nobody else waits for a step: by default several on a GPU. Starts jax."""
    import jax

    return args.decode_steps or (_LOOP if jax.default_backend() == "gpu" else 1)


def add_store(group: argparse._ActionsContainer) -> None:
    """Adds where that is kept for which the cache has no room."""
    option(group, "--host-memory", byte_count, "SIZE", "of this machine, for what the cache has no room for", default=0)
    kept = "keep what prompts have computed in this folder, and look there first (needs --host-memory)"
    option(group, "--store", given_path, "DIR", kept)


class DeviceMemory(NamedTuple):
    """The bytes of a device, and those of them that the weights take."""

    total: int
    weights: int

    @property
    def free(self) -> int:
        """The bytes that a cache may take."""
        return int((self.total - self.weights) * (1 - _SPARE))


class Model:
    """A checkpoint as the options of a command say to run it, as far as that is known without a device.

    Attributes:
        hf, cfg: its config, in Hugging Face's form and as it is read.
        layout: of the cache.
        drafts: whether layers that draft are part of it.

    Raises:
        OptionError: there is no such model, or it cannot have this layout or so many drafts.
    """

    def __init__(self, args: argparse.Namespace):
        with naming("--checkpoint"):
            self.hf: Mapping[str, Any] = read_hf(args.checkpoint)
            self.cfg = DSV4Config.from_hf(self.hf)
        check_drafts(self.cfg, args.draft_tokens, args.least_confidence)
        if args.numerics == "released" and args.weights not in (None, "released"):
            raise OptionError(f"--numerics: released ones are of --weights released, got {args.weights}")
        self.drafts = args.draft_tokens > 0
        self.layout = layout_from(args, self.cfg, include_drafts=self.drafts, numerics=args.numerics)


class Placed(NamedTuple):
    """Where a model is to run: the form of its weights, how devices share them, and their memory beside them."""

    form: str
    mesh: Any  # None: one device
    memory: DeviceMemory


def place(args: argparse.Namespace, model: Model, tensor: int) -> Placed:
    """Starts jax and decides where a model is to run. Nothing is loaded.

    Args:
        tensor: devices that share the heads.

    Raises:
        OptionError: there are not so many devices, the model cannot be split over them, or its weights do not fit (it
            says over how many devices they would).
        ImplementationError: jax finds no device.
    """
    from ..model import Split

    start_jax()
    check_implementation(args.implementation)
    cfg, drafts = model.cfg, model.drafts
    form = form_of(args, model.hf, cfg, tensor, drafts=drafts)
    check(args.checkpoint, cfg, form, drafts=drafts)
    weights = weight_bytes(cfg, form, args.devices, tensor, drafts=drafts)
    check_devices(args.devices)
    memory = DeviceMemory(device_limit(), weights)
    if memory.free <= 0:
        more = devices_that_hold(cfg, form, memory.total, more_than=args.devices, drafts=drafts)
        raise OptionError(
            f"--weights: {form} weights take {human(weights)}, jax has {human(memory.total)} of the device "
            f"(XLA_PYTHON_CLIENT_MEM_FRACTION is its share){more}"
        )
    mesh = Split(args.devices // tensor, tensor).mesh() if args.devices > 1 else None
    return Placed(form, mesh, memory)


def open_engine(
    opened: contextlib.ExitStack,
    args: argparse.Namespace,
    model: Model,
    placed: Placed,
    *,
    max_requests: int,
    **options: Any,
) -> Engine:
    """Loads the weights and returns an engine that has compiled its steps. The stack closes it.

    Args:
        max_requests: of each data shard.
        options: of the engine, beside those that the command line of `chat` and of `serve` has.

    Raises:
        OptionError: the cache does not fit, or steps have no room for its requests: before anything is loaded.
        CacheError: as `load`.
    """
    import jax

    from ..engine import Engine
    from ..engine.build import MIN_CHUNK
    from ..ops.exchange_buffers import open_exchanges

    memory, asked = placed.memory, args.cache_memory
    if asked and asked > (left := memory.total - memory.weights):
        raise OptionError(f"--cache-memory: {human(asked)}, the device has {human(left)} beside its weights")
    most = min(memory.free, _CPU_MEMORY) if jax.default_backend() == "cpu" else memory.free
    names = {"max_requests": "--max-requests", "max_context": "--max-context", "hbm_bytes": "--cache-memory"}
    with naming(fields=names | {"CacheSize.num_blocks": "--max-requests", "CacheSize.num_slots": "--max-requests"}):
        size = plan_capacity(
            model.layout,
            hbm_bytes=asked or most,
            max_requests=max_requests,
            max_context=args.max_context,
            states="blocks",
        )
    # Larger steps would only take memory.
    longest = min(size.max_blocks_per_request, size.num_blocks) * model.layout.block_tokens
    chunk = args.chunk and min(args.chunk, max(MIN_CHUNK, longest * size.num_slots))
    rows = size.num_slots * (1 + args.draft_tokens)
    if args.chunk and args.chunk < rows:
        raise OptionError(f"--chunk: requests and their drafts are {rows} tokens of a step at least, got {args.chunk}")
    how: dict[str, Any] = dict(drafts=model.drafts, numerics=model.layout.numerics, mesh=placed.mesh)
    _, params = load(args.checkpoint, placed.form, **how)
    exchanges = opened.enter_context(open_exchanges(placed.mesh))
    engine = opened.enter_context(
        Engine.of(
            params,
            model.layout,
            size,
            mesh=placed.mesh,
            exchanges=exchanges,
            chunk_tokens=chunk,
            decode_steps=min(args.decode_steps or 1, longest),
            drafts=args.draft_tokens,
            least_confidence=args.least_confidence,
            implementation=args.implementation,
            **options,
        )
    )
    with Progress("compiling"):
        engine.warm_up()
    return engine


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


def host_size(args: argparse.Namespace, layout: CacheLayout, shards: int) -> HostSize:
    """What `--host-memory` holds for each of so many data shards. Raises `OptionError`."""
    if not args.host_memory:
        return HostSize(0)
    if args.host_memory > (there := machine_bytes()):
        raise OptionError(f"--host-memory: {human(args.host_memory)}, this machine has {human(there)}")
    with naming(fields={"host_bytes": "--host-memory"}):
        return HostSize(plan_host_capacity(layout, args.host_memory // shards))


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
