"""`generate`: continues prompts with a checkpoint: text or token ids, streamed, many prompts side by side."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..config import DSV4Config
from ..errors import OptionError
from ..hf_config import check_drafts, read_hf
from .answers import Answer, Speed, Teller
from .engine import Engine
from .generate_cache import Room, choose_size, shared_tokens
from .options import (
    LATENCY_REQUESTS,
    add_command,
    add_json,
    add_layout,
    check_devices,
    device_bytes,
    devices_sharing_heads,
    layout_from,
    naming,
    refuse_same,
    start_jax,
)
from .printing import Progress, present, say
from .prompts import Prompt, add_prompts, encode, given_prompts, token_ids
from .tokenizer import Tokenizer, stop_tokens_of
from .values import given_path, natural, number, positive
from .weights import FORMS, check, load, taken

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time'             streams what follows
  dsv4-jax generate --checkpoint DIR --chat --prompt 'Why is the sky blue?' \\
      --temperature 0.7 --top-p 0.95 --seed 1                                a question; draws, not the likeliest
  dsv4-jax generate --checkpoint DIR --prompt-file questions.txt --max-batch 16 --json answers.json
      a prompt a line, 16 side by side; each answer is printed when it is complete
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' --drafts 1    several tokens a step, the same text
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' --devices 2   heads and experts over two devices
  dsv4-jax generate --checkpoint DIR --tokens 1,2,3 --stop-tokens none       ids in, ids out: needs no tokenizer
"""
_MOST_CHUNK, _LEAST_CHUNK = 2048, 64
_SAMPLING = {"temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p"}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "generate", "continues prompts with a checkpoint", __doc__, _EXAMPLES)
    parser.add_argument("--checkpoint", type=given_path, required=True, metavar="DIR", help="config.json, safetensors")
    add_prompts(parser)
    drawing = parser.add_argument_group("what is drawn")
    drawing.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="for each prompt (default: %(default)s)"
    )
    drawing.add_argument(
        "--temperature", type=number, default=0.0, metavar="X", help="0: always the likeliest token (default)"
    )
    drawing.add_argument("--top-k", type=natural, default=0, metavar="K", help="of the K likeliest only (default: all)")
    drawing.add_argument(
        "--top-p", type=number, default=1.0, metavar="P", help="of the fewest that reach P (default: 1)"
    )
    drawing.add_argument("--seed", type=natural, default=0, metavar="N", help="of the draws (default: 0)")
    drawing.add_argument(
        "--stop-tokens",
        type=_stop_tokens,
        metavar="IDS",
        help="end before one of these; none (default: the checkpoint's)",
    )
    drawing.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; several: several times"
    )
    steps = parser.add_argument_group("how it runs")
    steps.add_argument(
        "--weights",
        choices=FORMS,
        help="matrices in this dtype, or released: FP8 and FP4 as they are (default: released if they are FP8, else "
        "float32)",
    )
    steps.add_argument(
        "--max-batch", type=positive, default=16, metavar="N", help="prompts side by side (default: 16, if they fit)"
    )
    steps.add_argument(
        "--chunk", type=positive, metavar="N", help="most tokens of a step (default: what prompts need, at most 2048)"
    )
    steps.add_argument(
        "--decode-steps", type=positive, default=1, metavar="K", help="steps per call: text comes K tokens at a time"
    )
    steps.add_argument(
        "--drafts",
        dest="draft_tokens",
        type=natural,
        choices=range(4),
        default=0,
        metavar="N",
        help="tokens that the MTP layer guesses ahead and the model verifies, at most 3 (default: none)",
    )
    steps.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute what prompts begin with once (default: if some begin with the same block)",
    )
    steps.add_argument(
        "--devices", type=positive, default=1, metavar="N", help="to run on, 1, 2, 4 or 8 (default: %(default)s)"
    )
    steps.add_argument(
        "--tensor",
        type=positive,
        metavar="T",
        help="of them, have the same prompts and share the heads; the others have prompts of their own (default: all "
        f"up to {LATENCY_REQUESTS} prompts side by side, else 1)",
    )
    steps.add_argument(
        "--pool",
        action="store_true",
        help="devices that share the heads share each prompt's blocks too: for contexts that one of them cannot hold",
    )
    steps.add_argument("--implementation", choices=("xla", "pallas", "cuda"), help="of the cache ops (default: best)")
    add_layout(parser, drafts=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..cuda.exchange import open_exchanges

    refuse_same({"--prompt-file": args.prompt_file, "--json": args.json})
    with naming("--checkpoint"):
        hf = read_hf(args.checkpoint)
        cfg = DSV4Config.from_hf(hf)
    mtp = args.draft_tokens > 0
    if mtp:
        with naming("--drafts"):
            check_drafts(hf)
    prompts, tokenizer = _prompts(args, cfg)
    layout = layout_from(args, cfg, include_mtp=mtp)
    start_jax()
    form = args.weights or ("released" if hf.get("quantization_config") else "float32")
    side_by_side = min(args.max_batch, len(prompts))
    tensor = devices_sharing_heads(args.tensor, args.devices, side_by_side)
    if args.pool and tensor == 1:
        raise OptionError("--pool: blocks are shared by devices that share the heads, give --devices and --tensor")
    shards = max(1, args.devices // tensor)
    options = _options(args, cfg, prompts, shards)
    check(args.checkpoint, cfg, form, mtp=mtp)
    weight_bytes = taken(cfg, form, args.devices, tensor, mtp=mtp)  # which refuses what does not divide
    check_devices(args.devices)
    room = Room(device_bytes(), weight_bytes)
    room.check(form)
    shared = shared_tokens([prompt.tokens for prompt in prompts], layout.block_tokens)
    keeps = shared is not None if args.prefix_caching is None else args.prefix_caching
    most = min(-(-side_by_side // shards), options["chunk_tokens"] // (1 + args.draft_tokens))
    steps = options["decode_steps"]
    needs = _needs(prompts, args.max_new_tokens, steps * (1 + args.draft_tokens) - 1, cfg)
    size = choose_size(layout, needs, most, room, snapshots=keeps, ranks=tensor if args.pool else 1)

    if args.chat == "think" and tokenizer:
        say(f"--chat think: {tokenizer.effort}")
    began = time.perf_counter()
    mesh = _mesh(shards, tensor)
    cfg, params = load(args.checkpoint, form, mtp=mtp, mesh=mesh)
    loaded = time.perf_counter()
    answers = [Answer(prompt, tokenizer, args.stop, args.max_new_tokens) for prompt in prompts]
    with open_exchanges(mesh) as exchanges:
        engine = Engine(params, layout, size, keeps, options | {"exchanges": exchanges}, mesh)
        with Progress("compiling"):
            engine.compile(max(len(prompt.tokens) for prompt in prompts))
        compiled, speed = time.perf_counter(), Speed()
        with Progress("tokens", args.max_new_tokens * len(prompts)) as progress:
            teller = Teller(answers, progress, silent=args.json == "-")
            try:
                if shared and keeps:
                    engine.remember(prompts[0].tokens[: shared + 1], speed)
                engine.answer(answers, teller, progress, speed)
            except KeyboardInterrupt:
                teller.tell_rest()
                raise
    cached = engine.found_tokens
    say(speed.in_words(answers, cached, mtp and steps == 1))
    report = {
        "checkpoint": str(args.checkpoint),
        "weights": form,
        "kv_format": layout.kv_row.name,
        "index_format": layout.index_row.name,
        "cache_bytes": layout.total_bytes(size),
        "devices": args.devices,
        "tensor": tensor,
        "pool_ranks": size.pool_ranks,
        "max_batch": shards * size.num_slots,
        "chunk_tokens": options["chunk_tokens"],
        "decode_steps": steps,
        "drafts": args.draft_tokens,
        "prefix_caching": keeps,
        "load_s": loaded - began,
        "compile_s": compiled - loaded,
        **speed.as_dict(),
        "cached_tokens": cached,
        "answers": [answer.as_dict() for answer in answers],
    }
    present(report, args.json, lambda console: None)
    return 0


def _prompts(args: argparse.Namespace, cfg: DSV4Config) -> tuple[list[Prompt], Tokenizer | None]:
    """And the tokenizer if there are texts among them. Raises `OptionError`, `InputError`, `PlanError`."""
    given = given_prompts(args)
    texts = any(isinstance(content, str) for _, content in given)
    if args.stop and not texts:
        raise OptionError("--stop: ends texts, and there are only ids (--stop-tokens)")
    if "" in args.stop:
        raise OptionError("--stop: an empty text")
    tokenizer = Tokenizer(args.checkpoint) if texts else None
    return encode(given, tokenizer, args.chat, cfg.vocab_size), tokenizer


def _mesh(shards: int, tensor: int) -> Any:
    """None for one device."""
    from ..model import Split

    return Split(shards, tensor).mesh() if shards * tensor > 1 else None


def _options(args: argparse.Namespace, cfg: DSV4Config, prompts: list[Prompt], shards: int) -> dict[str, Any]:
    """Those of `model.generate` that the command line says. Raises `OptionError`."""
    from ..model import Sampling

    drafts = args.draft_tokens
    if drafts and cfg.num_mtp_layers != 1:
        raise OptionError(f"--drafts: one MTP layer drafts, the checkpoint has {cfg.num_mtp_layers}")
    if drafts and (args.chunk or _MOST_CHUNK) <= drafts:
        raise OptionError(f"--chunk: a token and its {drafts} drafts are {1 + drafts}, got {args.chunk}")
    with naming(fields=_SAMPLING):
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
    total = -(-sum(len(prompt.tokens) for prompt in prompts) // shards)
    chunk = _LEAST_CHUNK
    while chunk < min(total, args.chunk or _MOST_CHUNK):
        chunk *= 2
    return {
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling,
        "seed": args.seed,
        "chunk_tokens": min(chunk, args.chunk or _MOST_CHUNK),
        "decode_steps": min(args.decode_steps, args.max_new_tokens),
        "drafts": drafts,
        "stop_tokens": frozenset(stop_tokens_of(args.checkpoint) if args.stop_tokens is None else args.stop_tokens),
        "implementation": args.implementation,
    }


def _needs(prompts: list[Prompt], new: int, ahead: int, cfg: DSV4Config) -> list[int]:
    """Tokens of each request, with `ahead` more, which the steps of a call may draw too many.

    Raises `OptionError` if the model has no position for one.
    """
    limit = cfg.max_position_embeddings
    for source, tokens, _ in prompts:
        if len(tokens) + new - 1 > limit:
            raise OptionError(
                f"{source}, --max-new-tokens: {len(tokens)} tokens and {new} new ones exceed the model's {limit}"
            )
    return [min(len(tokens) + new - 1 + ahead, limit) for _, tokens, _ in prompts]


def _stop_tokens(text: str) -> list[int]:
    """argparse type."""
    return [] if text == "none" else token_ids(text)
