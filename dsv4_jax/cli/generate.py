"""`generate`: continues prompts with a checkpoint: text or token ids, streamed, many prompts side by side."""

from __future__ import annotations

import argparse
import time

from ..chat import Parser
from ..config import DSV4Config
from ..errors import OptionError
from ..manager import CachePolicy, SnapshotPlacement
from ..text import TextStream
from .answers import Answer, AnswerPrinter
from .engine import (
    Model,
    add_steps,
    add_store,
    answer,
    choose_size,
    host_size,
    open_stores,
    place,
    shares_a_block,
    steps_per_call,
    weights_name,
)
from .models import load
from .options import (
    LATENCY_REQUESTS,
    add_command,
    add_json,
    add_layout,
    devices_sharing_heads,
    option,
    refuse_same,
)
from .printing import Progress, present, say
from .prompts import Prompt, add_prompts, encode, given_prompts, open_chat, open_tokenizer
from .sampling import add_sampling, sampling_of, stops_of
from .values import given_path, natural, positive

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time'             streams what follows
  dsv4-jax generate --checkpoint DIR --chat --prompt 'Why is the sky blue?' \\
      --temperature 0.7 --top-p 0.95 --seed 1                                a question; sampled, not the likeliest
  dsv4-jax generate --checkpoint DIR --prompt-file questions.txt --max-batch 16 --json answers.json
      a prompt a line, 16 side by side; each answer is printed when it is complete
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' --drafts 1    several tokens a step, the same text
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' --devices 2   heads and experts over two devices
  dsv4-jax generate --checkpoint DIR --prompt-file questions.txt --host-memory 8GiB --store cache/
      what was computed of these prompts is found again, now and in the next run
  dsv4-jax generate --checkpoint DIR --tokens 1,2,3 --stop-tokens none       ids in, ids out: needs no tokenizer
"""
_MIN_CHUNK, _MAX_CHUNK = 64, 2048


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "generate", "continues prompts with a checkpoint", __doc__, _EXAMPLES)
    option(parser, "--checkpoint", given_path, "DIR", "config.json, safetensors", required=True)
    add_prompts(parser)
    sampling = add_sampling(parser, limit=128)
    option(sampling, "--logprobs", natural, "N", "report log-probabilities (--json), and those of the N likeliest")
    steps = add_steps(parser, chunk="what prompts need, at most 2048", cache="what is needed", loops=True)
    option(steps, "--max-batch", positive, "N", "prompts side by side, if they fit", default=16)
    cached = "compute what prompts begin with once (default: if some begin with the same block)"
    steps.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=None, help=cached)
    add_store(steps)
    tensor = "of them, have the same prompts and share the heads; the others have prompts of their own"
    latency = f"(default: all up to {LATENCY_REQUESTS} prompts side by side, else 1)"
    option(steps, "--tensor", positive, "T", f"{tensor} {latency}")
    pool = "devices that share the heads share each prompt's blocks too: for contexts that one of them cannot hold"
    steps.add_argument("--pool", action="store_true", help=pool)
    add_layout(parser, drafts=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..engine import Limits
    from ..engine import Prompt as Asked
    from ..engine.build import build
    from ..ops.exchange_buffers import open_exchanges

    refuse_same({"--prompt-file": args.prompt_file, "--json": args.json})
    model = Model(args)
    cfg, layout = model.cfg, model.layout
    answers = _answers(args, cfg)
    prompts = [answer.prompt for answer in answers]
    side_by_side = min(args.max_batch, len(prompts))
    tensor = devices_sharing_heads(args.tensor, args.devices, side_by_side)
    if args.pool and tensor == 1:
        raise OptionError("--pool: blocks are shared by devices that share the heads, give --devices and --tensor")
    shards = max(1, args.devices // tensor)
    sampling, stops, chunk = sampling_of(args), stops_of(args), _chunk(args, prompts, shards)
    form, mesh, memory = place(args, model, tensor)
    keeps = args.prefix_caching
    if keeps is None:
        keeps = args.store is not None or shares_a_block([prompt.tokens for prompt in prompts], layout.block_tokens)
    if args.store is not None and not (keeps and args.host_memory):
        raise OptionError("--store: what is kept goes there from --host-memory, and by --prefix-caching")
    if args.host_memory and not keeps:
        raise OptionError("--host-memory: without --prefix-caching nothing is kept")
    host = host_size(args, layout, shards)
    high = min(-(-side_by_side // shards), chunk // (1 + args.draft_tokens))
    steps = min(steps_per_call(args), args.max_new_tokens)
    needs = _needs(prompts, args.max_new_tokens, steps * (1 + args.draft_tokens) - 1, cfg)
    ranks = tensor if args.pool else 1
    size = choose_size(layout, needs, high, memory, args.cache_memory, snapshots=keeps, ranks=ranks)

    with open_stores(args.store, layout) as stores, open_exchanges(mesh) as exchanges:
        began = time.perf_counter()
        _, params = load(args.checkpoint, form, drafts=model.drafts, numerics=layout.numerics, mesh=mesh)
        loaded = time.perf_counter()
        core, executor = build(
            params,
            layout,
            size,
            host=host,
            stores=stores,
            policy=CachePolicy(snapshots=SnapshotPlacement(end_of_output=False, doubling=None)) if keeps else None,
            weights_id=weights_name(args.checkpoint, form) if stores is not None else None,
            mesh=mesh,
            pool=args.pool,
            exchanges=exchanges,
            limits=Limits(queued=len(prompts)),
            top=args.logprobs or 0,
            chunk_tokens=chunk,
            prefill_tokens=(),  # for one run it takes longer to compile another than it saves
            decode_steps=steps,
            drafts=args.draft_tokens,
            least_confidence=args.least_confidence,
            seed=args.seed,
            implementation=args.implementation,
        )
        draws = not sampling.greedy or sampling.penalised
        with Progress("compiling"):
            longer, waits = any(len(prompt.tokens) > 1 for prompt in prompts), len(prompts) > shards * size.num_slots
            # Copies are compiled when there are any.
            for work in core.warm_up(prompts=longer, draws=draws, copies=False, waits=waits):
                executor.send(work).get()
        compiled = time.perf_counter()
        for i, prompt in enumerate(prompts):
            one = dict(sampling=sampling, stop_tokens=stops, logprobs=args.logprobs)
            core.add(Asked(tokens=prompt.tokens, max_new_tokens=args.max_new_tokens, id=i, **one), time.monotonic())
        with Progress("tokens", args.max_new_tokens * len(prompts)) as progress:
            printer = AnswerPrinter(answers, progress, silent=args.json == "-")
            try:
                speed = answer(core, executor, answers, printer, progress)
            except KeyboardInterrupt:
                printer.show_rest()
                raise
        if stores is not None:  # what is still on the device goes there as well
            executor.move(core.sleep())
            executor.drain()
    cached = core.counts["cached_tokens"]
    say(speed.in_words(answers, cached, model.drafts and steps == 1))
    report = {
        "checkpoint": str(args.checkpoint),
        "weights": form,
        "numerics": layout.numerics,
        "kv_format": layout.kv_row.name,
        "index_format": layout.index_row.name,
        "cache_bytes": layout.total_bytes(size),
        "devices": args.devices,
        "tensor": tensor,
        "pool_ranks": size.pool_ranks,
        "max_batch": shards * size.num_slots,
        "chunk_tokens": chunk,
        "decode_steps": steps,
        "drafts": args.draft_tokens,
        "prefix_caching": keeps,
        "load_s": loaded - began,
        "compile_s": compiled - loaded,
        **speed.as_dict(),
        "cached_tokens": cached,
        "host_memory": args.host_memory,
        "preemptions": core.counts["preemptions"],
        "answers": [answer.as_dict() for answer in answers],
    }
    present(report, args.json, lambda console: None)
    return 0


def _answers(args: argparse.Namespace, cfg: DSV4Config) -> list[Answer]:
    """What is to be sampled for each prompt. Raises `OptionError`, `FileError`, `PlanError`."""
    given = given_prompts(args)
    texts = any(isinstance(content, str) for _, content in given)
    if args.stop and not texts:
        raise OptionError("--stop: ends texts, and there are only ids (--stop-tokens)")
    if "" in args.stop:
        raise OptionError("--stop: an empty text")
    tokenizer = open_tokenizer(args.checkpoint) if texts else None
    chat = open_chat(args, tokenizer) if args.chat and tokenizer is not None else None

    def reader(prompt: Prompt) -> TextStream | Parser | None:
        if chat is not None and prompt.chat is not None:
            return chat.parser(prompt.chat, stops=args.stop)
        return None if tokenizer is None or prompt.text is None else TextStream(tokenizer, args.stop)

    prompts = encode(given, tokenizer, chat, args, cfg.vocab_size)
    return [Answer(prompt, reader(prompt), args.max_new_tokens) for prompt in prompts]


def _chunk(args: argparse.Namespace, prompts: list[Prompt], shards: int) -> int:
    """Tokens of a step: what the prompts need, within bounds. Raises `OptionError`."""
    most, drafts = args.chunk or _MAX_CHUNK, args.draft_tokens
    if drafts and most <= drafts:
        raise OptionError(f"--chunk: a token and its {drafts} drafts are {1 + drafts}, got {args.chunk}")
    total = -(-sum(len(prompt.tokens) for prompt in prompts) // shards)
    chunk = _MIN_CHUNK
    while chunk < min(total, most):
        chunk *= 2
    return min(chunk, most)


def _needs(prompts: list[Prompt], new: int, ahead: int, cfg: DSV4Config) -> list[int]:
    """Tokens of each request, with `ahead` more, which the steps of a call may sample too many.

    Raises `OptionError` if the model has no position for one.
    """
    limit = cfg.max_position_embeddings
    for source, tokens, *_ in prompts:
        if len(tokens) + new - 1 > limit:
            raise OptionError(
                f"{source}, --max-new-tokens: {len(tokens)} tokens and {new} new ones exceed the model's {limit}"
            )
    return [min(len(tokens) + new - 1 + ahead, limit) for _, tokens, *_ in prompts]
