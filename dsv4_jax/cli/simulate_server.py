"""The server of `simulate`: the options that choose one, and variants of it given in one argument."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from ..capacity import SNAPSHOT_FRACTION, largest_fitting, plan_host_capacity, snapshots_beside
from ..errors import CapacityError, TraceError
from ..layout import CacheLayout, CacheSize
from ..manager import CachePolicy, HostSize, NamespaceShares, SnapshotPlacement, WritePolicy
from ..manager.policies import EVICTION_POLICIES, StatePlace
from ..simulate import Server, StepTime, TraceRequest
from .options import naming, option
from .values import byte_count, fraction, natural, positive, short, token_count

__all__ = ["DEFAULTS", "Variant", "add_server", "given_sizes", "placement", "server_from", "variant"]

_DEFAULT_PLACEMENT = "prompt,output,junctions,doubling:4,every:64"
_PLACEMENT_HELP = (
    "where states are kept, a list: prompt and output (at their ends), junctions (where a prompt leaves what is "
    "cached), doubling:N (N, 2N, 4N ... blocks before the end of the prompt), every:N (blocks); or none "
    f"(default: {_DEFAULT_PLACEMENT})"
)
_FLAGS = {"prompt": "end_of_prompt", "output": "end_of_output", "junctions": "junctions"}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("blocks", "hbm", "context", "snapshots", "snapshot_fraction", "host", "host_pages")),
    "max_requests": 64,
    "policy": WritePolicy.write_back(),
    "snapshots_at": SnapshotPlacement(),
    "order": "worth",
    "namespace_share": None,
    "states": "slots",
    "token_budget": 8192,
    "step_time": StepTime(),
    "every_step": False,
}
# Options of which a variant's replaces those of the command line.
_INSTEAD = (("hbm", "blocks"), ("snapshots", "snapshot_fraction"), ("host", "host_pages"))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named set of options, of which `simulate --compare` runs several.

    Attributes:
        name: of at least one character.
        text: the options as given.
        options: those given, by attribute.
    """

    name: str
    text: str
    options: dict[str, Any]

    def of(self, args: argparse.Namespace) -> argparse.Namespace:
        """Returns the command line's arguments with these options instead."""
        cleared = {
            other: None
            for pair in _INSTEAD
            for given, other in (pair, pair[::-1])
            if self.options.get(given) is not None and other not in self.options
        }
        return argparse.Namespace(**{**vars(args), **cleared, **self.options})


class _VariantParser(argparse.ArgumentParser):
    """Reports bad arguments as the value of another one."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"{self.prog}: {message}")


def variant(text: str) -> Variant:
    """Parses `NAME: OPTIONS`."""
    name, colon, options = text.partition(":")
    if not colon or not (name := name.strip()):
        raise argparse.ArgumentTypeError(f"{short(text)} has no name: give 'NAME: OPTIONS'")
    parser = _VariantParser(short(name), add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_server(parser)
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{short(name)}: {error}") from None
    return Variant(name, options.strip(), vars(parser.parse_args(words)))


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a `Server`, but for the model and its layout. Defaults are `DEFAULTS`."""
    size = parser.add_argument_group("cache size")
    pool = size.add_mutually_exclusive_group()
    option(pool, "--hbm", byte_count, "SIZE", "for the device's cache, such as 20GiB (default: 8GiB)")
    option(pool, "--blocks", positive, "N", "on the device")
    option(size, "--context", token_count, "TOKENS", "of one request (default: the longest)")
    option(size, "--max-requests", positive, "N", "live at once (default: 64)")
    states = size.add_mutually_exclusive_group()
    share = f"share of the bytes cached on the device that states get (default: {SNAPSHOT_FRACTION})"
    option(states, "--snapshot-fraction", fraction, "F", share)
    option(states, "--snapshots", natural, "N", "slots for states on the device")
    option(size, "--host", byte_count, "SIZE", "for the host tier, such as 64GiB (default: none)")
    option(size, "--host-pages", natural, "N", "instead of --host")
    policy = parser.add_argument_group("policy")
    names = "none (no caching), write_back (default), write_through, or selective:N (blocks with N hits)"
    option(policy, "--policy", _write_policy, "NAME", names)
    policy.add_argument("--order", choices=sorted(EVICTION_POLICIES), help="of eviction (default: worth)")
    option(policy, "--snapshots-at", placement, "LIST", _PLACEMENT_HELP)
    where = "whether states on the device lie in slots of their own or in blocks (default: slots)"
    policy.add_argument("--states", choices=get_args(StatePlace), help=where)
    most = "the most of a tier that one tenant may take from the others (default: all)"
    option(policy, "--namespace-share", fraction, "F", most)
    step = parser.add_argument_group("server")
    option(step, "--token-budget", positive, "N", "of a step (default: 8192)")
    constants = ", ".join(f"{field.name} ({field.default:.3g})" for field in dataclasses.fields(StepTime))
    measured = "constants of the step's time instead of those measured for Flash on one H200, attention alone"
    option(step, "--step-time", _step_time, "NAME=VALUE,...", f"{measured}: {constants}")
    step.add_argument(
        "--every-step", action="store_true", help="plan every decode step (slower; all but CPU times stay the same)"
    )


def server_from(args: argparse.Namespace, layout: CacheLayout, trace: Sequence[TraceRequest]) -> Server:
    """Makes the server that the options choose.

    Raises:
        OptionError: the memory is too small, or there is more of something than can be simulated.
    """
    with naming(fields=_size_options(args)):
        return _server(args, layout, trace)


def given_sizes(args: argparse.Namespace) -> str:
    """The options that say how long a request may be."""
    given = [f"--{name}" for name in ("hbm", "blocks", "context") if getattr(args, name) is not None]
    return ", ".join(given) or "--hbm"


def _size_options(args: argparse.Namespace) -> dict[str, str]:
    """What the sizes of a server are called on this command line."""
    blocks = "--blocks" if args.blocks else "--hbm"
    snapshots = "--snapshot-fraction" if args.snapshots is None else "--snapshots"
    context = "--context, " if args.context else ""
    fields = {"num_blocks": blocks, "num_slots": "--max-requests", "num_snapshots": snapshots}
    fields |= {f"CacheSize.{field}": name for field, name in fields.items()} | {"token_budget": "--token-budget"}
    return fields | {
        "CacheSize": "--max-requests, --snapshots",
        "num_pages": "--host-pages" if args.host is None else "--host",
        "host_bytes": "--host",
        "pool": f"{context}{blocks}, --max-requests, {snapshots}: pool",
    }


def _server(args: argparse.Namespace, layout: CacheLayout, trace: Sequence[TraceRequest]) -> Server:
    longest = max(request.prompt_tokens + request.output_tokens for request in trace)
    context = min(args.context or longest, layout.cfg.max_position_embeddings)
    share = SNAPSHOT_FRACTION if args.snapshot_fraction is None else args.snapshot_fraction
    if args.policy is None or args.states == "blocks":
        share = 0.0  # no hit could end at them, or they need no slots

    def size(blocks: int) -> CacheSize:
        states = args.snapshots
        if states is None:
            states = snapshots_beside(share, blocks * layout.bytes_per_block, layout.bytes_per_slot)
        return CacheSize(blocks, args.max_requests, layout.blocks_for(context), states)

    blocks = args.blocks
    if not blocks:
        memory = byte_count("8GiB") if args.hbm is None else args.hbm
        least = layout.total_bytes(size(1))
        if least > memory:
            problem = f"{memory} bytes are too few: one block and {size(1).slot_units} slots take {least}"
            raise CapacityError(f"--hbm: {problem}: {least - memory} bytes are missing")
        blocks = largest_fitting(lambda n: layout.total_bytes(size(n)) <= memory, memory // layout.bytes_per_block)
    host = None
    if args.host:
        host = HostSize(plan_host_capacity(layout, args.host))
    elif args.host_pages:
        host = HostSize(args.host_pages)
    policy = None
    if args.policy is not None:
        policy = CachePolicy(
            write=args.policy,
            snapshots=args.snapshots_at,
            eviction=EVICTION_POLICIES[args.order],
            shares=NamespaceShares(args.namespace_share) if args.namespace_share else None,
            states=args.states,
        )
    server = Server(layout, size(blocks), policy, host, args.token_budget, args.step_time, args.every_step)
    layout.check_size(server.size)
    return server


def placement(text: str) -> SnapshotPlacement:
    """Parses the names of a placement."""
    choices: dict[str, Any] = {"every": None, "doubling": None, **dict.fromkeys(_FLAGS.values(), False)}
    named = set[str]()
    for part in text.split(",") if text != "none" else ():
        name, colon, number = part.partition(":")
        if name in named:
            raise argparse.ArgumentTypeError(f"{short(name)} is named twice")
        named.add(name)
        if name in ("every", "doubling") and colon:
            choices[name] = positive(number)
        elif part in _FLAGS:
            choices[_FLAGS[part]] = True
        else:
            names = ", ".join((*_FLAGS, "doubling:N, every:N or none"))
            raise argparse.ArgumentTypeError(f"{short(part)} is none of {names}")
    return SnapshotPlacement(**choices)


def _write_policy(text: str) -> WritePolicy | None:
    """Parses a write policy, None for no caching at all."""
    plain = {"none": None, "write_back": WritePolicy.write_back(), "write_through": WritePolicy.write_through()}
    if text in plain:
        return plain[text]
    name, _, threshold = text.partition(":")
    if name != "selective":
        raise argparse.ArgumentTypeError(f"{short(text)} is neither none, write_back, write_through nor selective:N")
    return WritePolicy.write_through_selective(positive(threshold))


def _step_time(text: str) -> StepTime:
    """Parses constants by name."""
    try:
        return StepTime.parse(text)
    except TraceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
