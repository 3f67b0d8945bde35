"""The decode steps that `bench` was asked for: of the attention stack, and of the whole model."""

from __future__ import annotations

import argparse
import dataclasses
from types import MappingProxyType
from typing import Any

from ..capacity import device_limit
from ..errors import OptionError
from .options import check_devices, devices_sharing_heads, naming

__all__ = ["fits", "model_options", "step_options"]

_FIELDS = MappingProxyType(
    {"context": "--context", "CacheSize.num_blocks": "--batch, --context", "CacheSize": "--batch"}
)


def step_options(args: argparse.Namespace, quick: bool) -> list[Any]:
    """Returns the options of each step of the attention stack: one for each batch, context and implementation."""
    from ..bench.step import cache_shape

    options = _options(args, quick, context=128 * 1024, few=0)
    for option in options:
        with naming(fields=_FIELDS):
            layout, size = cache_shape(option.config(), option)
            needed = layout.total_bytes(size)
        fits(f"a step of {option.model}, batch {option.batch}, context {option.context}", needed)
    return options


def model_options(args: argparse.Namespace, quick: bool) -> list[Any]:
    """Returns the options of each step of whole layers, all of as many layers as fit. Raises `OptionError`."""
    from ..bench.model import DEFAULT_LAYERS, FEW_REQUESTS, bytes_needed
    from ..bench.step import MAX_DRAFTS
    from ..model.weights.split import check_split

    devices = args.devices or 1
    check_devices(devices)
    head, drafts = args.draft_head or "mtp", args.drafts or 0
    if args.draft_head and not drafts:
        raise OptionError("--draft-head: it makes --drafts, of which there are none")
    if drafts > MAX_DRAFTS[head]:
        raise OptionError(f"--drafts: {drafts} of a step, --draft-head {head} makes at most {MAX_DRAFTS[head]}")
    if args.chunk > 1 and (args.drafts or args.loop > 1):
        raise OptionError("--chunk: a model's prefill is one step, without --drafts and --loop")
    options = [
        dataclasses.replace(
            option,
            devices=devices,
            tensor=devices_sharing_heads(args.tensor, devices, option.batch),
            drafts=drafts,
            draft_head=head,
            numerics=numerics,
        )
        for numerics in args.numerics or ["plain"]
        for option in _options(args, quick, context=8 * 1024, few=FEW_REQUESTS)
    ]

    def needed(layers: int | None) -> int:
        with naming(fields=_FIELDS):
            return max(bytes_needed(dataclasses.replace(option, layers=layers)) for option in options)

    with naming("--devices, --tensor", fields=_FIELDS):
        for option in options:
            check_split(option.config(), option.split)
    held = device_limit()
    layers = args.layers
    if needed(layers) > held:
        whole = options[0].config().num_layers
        fit = next((n for n in range(min(whole, layers or DEFAULT_LAYERS), 0, -1) if needed(n) <= held), 0)
        if layers or not fit:
            raise OptionError(
                f"--layers, --batch, --context: {layers or whole} layers of {options[0].model} take {needed(layers)} "
                f"bytes, the device has {held}: {f'{fit} fit' if fit else 'not even one fits'}"
            )
        layers = fit
    return [dataclasses.replace(option, layers=layers) for option in options]


def fits(what: str, needed: int) -> None:
    """Raises `OptionError` if so many bytes do not lie in the device's memory."""
    if needed > (held := device_limit()):
        raise OptionError(f"--batch, --context: {what} takes at least {needed} bytes, the device has {held}")


def _options(args: argparse.Namespace, quick: bool, *, context: int, few: int) -> list[Any]:
    """`context`: the default of a run that is not quick. `few`: requests up to which "latency" is the key split's."""
    from ..bench.step import StepOptions
    from ..ops.registry import NAMES

    names: list[Any] = [name for name in args.implementations or [None] if name is None or name in NAMES]
    if not names:
        raise OptionError(f"--implementations: a step runs {', '.join(NAMES)}")
    asked_for = not quick or (args.model and args.layers)  # real layers on a CPU: only a few, and only by name
    model = (args.model or "flash") if asked_for else "tiny"
    options = [
        StepOptions(
            model=model,
            batch=batch,
            context=tokens,
            layers=args.layers,
            implementation=name,
            key_split=args.key_split or ("latency" if batch <= few else "throughput"),
            steps=2 if quick else args.steps,
            loop=args.loop,
            chunk=args.chunk,
            profile=args.profile,
            xla=tuple(args.xla),
        )
        for batch in args.batch or [2 if quick else 64]
        for tokens in args.context or [256 if quick else context]
        for name in names
    ]
    for option in options:
        if option.chunk > option.context:
            raise OptionError(f"--chunk: {option.chunk} tokens, --context has {option.context}")
        with naming(fields=_FIELDS):
            layers = option.config().num_layers
        if args.layers and args.layers > layers:
            raise OptionError(f"--layers: {option.model} has {layers}")
    return options
