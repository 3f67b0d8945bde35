"""What a Dynamo worker is asked, by its command line and by requests, and how it answers in Dynamo's words."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any, get_args

from ..cli.values import byte_count, positive
from ..config import Numerics
from ..engine import Engine, Limits, Output
from ..errors import RequestError
from ..serve.masks import Masks

__all__ = ["build_engine", "chunk_of", "load_weights", "parser", "prompt_arguments"]

# How a request ended, as Dynamo says it. (A prefill that ends as "stop" is taken for the whole answer.)
ENDS = {"stop": "stop", "length": "length", "handoff": "length", "abort": "cancelled", "deadline": "cancelled"}
THINK = 128821  # <think> of V4's tokenizer: an answer that begins behind it is free until it ends
SIZES = ("memory", "max_requests", "max_context", "chunk_tokens", "decode_steps", "drafts")
_FILTERS = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m dsv4_jax.integrations.dynamo", description="A worker of NVIDIA Dynamo."
    )
    add = made.add_argument
    add("--checkpoint", type=pathlib.Path, required=True, help="folder with config.json, weights and the tokenizer")
    add("--served-model-name", help="default: the folder's name")
    add(
        "--mode", choices=("agg", "prefill", "decode"), default="agg", help="all of a request, or a part (default: agg)"
    )
    add("--namespace", default="dynamo")
    add("--component", help="default: backend, or prefill")
    add("--discovery-backend", default="file", help="file (DYN_FILE_KV says where), etcd, kubernetes (default: file)")
    add("--tool-call-parser", default="deepseek_v4", help="of the frontend (default: deepseek_v4)")
    add("--reasoning-parser", default="deepseek_v4", help="of the frontend (default: deepseek_v4)")
    add("--no-kv-routing", action="store_true", help="tell no router of blocks and load")
    add("--devices", type=positive, default=1, help="that share the heads")
    add("--memory", type=byte_count, help="of the device, for the cache (default: 0.9 of it, weights included)")
    add(
        "--host-memory",
        type=byte_count,
        default=0,
        help="of the host tier (default: none; 1GiB for prefill and decode)",
    )
    for name in SIZES[1:]:
        add(f"--{name.replace('_', '-')}", type=positive, help="as `Engine.of`")
    rounded = "as `Engine.load`; released: products round rows to e4m3 (default: plain)"
    add("--numerics", choices=get_args(Numerics), default="plain", help=rounded)
    add("--block-tokens", type=positive, default=128, help="of a block, as the frontend is told (default: 128)")
    add("--queue", type=positive, default=4096, help="requests that wait; others are refused (default: 4096)")
    add("--watchdog", type=float, help="seconds that a call of the device may take")
    add("--weights-id", help="name of the weights, the same on hosts that hand over (default: the folder's path)")
    add("--transport", default="nixl", help="of prefill and decode: nixl, jax, ... (default: nixl)")
    add("--transport-address", help="of this host, that the others reach")
    return made


def prompt_arguments(request: Any, context: int, masks: Masks) -> dict[str, Any]:
    """A request of Dynamo's, whose values may all be null, as arguments of a `Prompt`.

    Args:
        context: tokens of a request, answer included. A longer answer is cut there.
        masks: of the checkpoint's tokenizer, for answers of a form.

    Raises:
        RequestError: the prompt is too long, or something is asked for that cannot be done.
    """
    from ..model import Sampling

    tokens = [int(token) for token in request["token_ids"]]
    draw, stop, out = (request.get(key) or {} for key in ("sampling_options", "stop_conditions", "output_options"))
    if len(tokens) >= context:
        raise RequestError(f"the prompt has {len(tokens)} tokens, the context is {context} with the answer")
    if out.get("prompt_logprobs"):
        raise RequestError("prompt_logprobs are not given by this worker")
    how: dict[str, Any] = {name: draw[name] for name in (*_FILTERS, *_PENALTIES) if draw.get(name) is not None}
    how.setdefault("temperature", 1.0)
    how["top_k"] = max(int(how.get("top_k", 0)), 0)  # -1: all of them
    ends = {*(stop.get("stop_token_ids") or ())}
    if not stop.get("ignore_eos"):
        ends |= {*(stop.get("stop_token_ids_hidden") or ()), *(request.get("eos_token_ids") or ())}
    room = context - len(tokens) + 1  # the last one is never fed
    grammar = _grammar(draw.get("guided_decoding") or {}, tokens[-1:] == [THINK])
    least = int(stop.get("min_tokens") or 0)
    asked = dict(min_tokens=least, stops=sorted(ends)) | ({} if grammar is None else {"grammar": grammar})
    most, logprobs = stop.get("max_tokens"), out.get("logprobs")
    return dict(
        tokens=tokens,
        max_new_tokens=room if most is None else min(int(most), room),
        sampling=Sampling(**how),
        stop_tokens=ends,
        n=int(draw.get("n") or 1),
        logprobs=None if logprobs is None else int(logprobs),
        mask=masks.of(asked) if least or grammar is not None else None,
    )


def _grammar(guided: dict[str, Any], thinking: bool) -> Any:
    """A mask's grammar of Dynamo's `guided_decoding`; None: the answer is free. Raises `RequestError`."""
    asked = {name: value for name, value in guided.items() if value is not None and name != "backend"}
    if not asked:
        return None
    from ..chat.grammar import format_constraint

    match asked:
        case {"json": schema, **rest} if not rest:
            try:
                schema = json.loads(schema) if isinstance(schema, str) else schema
            except ValueError as error:
                raise RequestError(f"guided_decoding: json is none: {error}") from None
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"regex": pattern, **rest} if not rest:
            form = {"type": "regex", "regex": pattern}
        case _:
            raise RequestError(f"guided_decoding: json or regex alone, got {', '.join(sorted(asked))}")
    return format_constraint(form, thinking=thinking)


def chunk_of(output: Output, usage: tuple[int, int] | None) -> dict[str, Any]:
    """An output as Dynamo reads it. `usage`: tokens of the prompt, and sampled: of a request's last output."""
    chunk: dict[str, Any] = {"token_ids": [int(token) for token in output.tokens], "index": output.index}
    if output.logprobs:
        chunk["log_probs"] = [float(each) for each in output.logprobs]
    if output.top:
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": int(token), "token": f"token_id:{token}", "logprob": float(logprob)}
                for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
            ]
            for ids, logprobs in output.top
        ]
    if output.finish is not None:
        chunk["finish_reason"] = ENDS[output.finish]
    if usage is not None:
        chunk["completion_usage"] = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
            "prompt_tokens_details": {"cached_tokens": output.cached},
        }
    return chunk


def build_engine(options: argparse.Namespace) -> tuple[Engine, Any]:
    """The engine of a command line, compiled, and the transport of its hand-offs or None.

    Raises: as `Engine.load` and `open_engine`.
    """
    transport = None
    if options.mode != "agg":
        from ..tiers.remote import RecordTransport
        from ..transports import open_engine

        where = {"address": options.transport_address} if options.transport_address else {}
        transport = RecordTransport(open_engine(options.transport, **where))
    engine = Engine.load(
        options.checkpoint,
        mesh=_mesh(options),
        weights_id=options.weights_id,
        transport=transport,
        host=options.host_memory or (1 << 30 if transport is not None else 0),
        events=True,
        limits=Limits(queued=options.queue),
        block_tokens=options.block_tokens,
        numerics=options.numerics,
        watchdog=options.watchdog,
        freeze=True,
        **{name: value for name in SIZES if (value := getattr(options, name)) is not None},
    )
    engine.warm_up()
    return engine, transport


def load_weights(engine: Engine, options: argparse.Namespace, path: str, name: str) -> None:
    """Other weights from a checkpoint of the same shapes, in the form and on the devices of those in use.

    Raises: as `load_hf` and `Engine.update_weights`.
    """
    from ..model.weights.loading import load_hf

    form, numerics = engine.weights_form, engine.managers[0].layout.numerics
    how: dict[str, Any] = dict(drafts=bool(options.drafts), numerics=numerics, mesh=_mesh(options))
    _, params = load_hf(path, weights=form, packed=form == "released", **how)
    engine.update_weights(params, name, donate=True)


def _mesh(options: argparse.Namespace) -> Any:
    """The devices that share the heads; None: one that has them all."""
    if options.devices == 1:
        return None
    from ..model.weights.split import Split

    return Split(1, options.devices).mesh()
