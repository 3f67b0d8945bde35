"""`serve`: a checkpoint behind HTTP, as clients of OpenAI's and Anthropic's APIs speak it, with a page at `/`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import pathlib
import signal
import threading
import time
from typing import Any

from ..capacity import device_limit
from ..config import DSV4Config
from ..errors import FileError, ImplementationError, OptionError
from ..hf_config import read_hf
from ..text import stop_tokens_of
from .engine import open_stores, weights_name
from .models import add_drafts, add_weights, check, check_drafts, form_of, load, weight_bytes
from .options import (
    add_command,
    add_implementation,
    add_json,
    add_layout,
    check_devices,
    check_implementation,
    devices_sharing_heads,
    layout_from,
    naming,
    option,
    start_jax,
)
from .printing import Progress, human, present, say
from .values import byte_count, given_path, natural, positive, short, token_count

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax serve --checkpoint DIR                            http://127.0.0.1:8000: a chat there, OpenAI's API below /v1
  dsv4-jax serve --checkpoint DIR --devices 2 --port 9000     heads and experts over two devices
  dsv4-jax serve --checkpoint DIR --host 0.0.0.0 --api-keys keys.txt --tls cert.pem key.pem     for other machines
  dsv4-jax serve --checkpoint DIR --host-memory 64GiB --store cache/    what was computed is found again, also later
"""
_CPU_MEMORY = 2 << 30  # bytes of a CPU that a cache takes if it is not said, at most
_POLL = 0.2


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "serve", "a checkpoint behind HTTP, and a page", __doc__, _EXAMPLES)
    option(parser, "--checkpoint", given_path, "DIR", "config.json, safetensors, tokenizer.json", required=True)
    reached = parser.add_argument_group("where it is reached, and by whom")
    option(reached, "--host", str, "NAME", "address to listen at", default="127.0.0.1")
    option(reached, "--port", natural, "P", "0: any that is free (default: 8000)", default=8000)
    names = "the model's; several: several times (default: the folder's)"
    option(reached, "--model-name", str, "NAME", names, action="append", default=[])
    keys = "of API keys, one a line, NAME KEY or KEY: without one of them nothing is answered"
    option(reached, "--api-keys", given_path, "FILE", keys)
    origin = "whose pages may ask, https://example.org or *; several: several times (default: none)"
    option(reached, "--cors", str, "ORIGIN", origin, action="append", default=[])
    option(reached, "--name", str, "HOST", "another name of this server, behind a proxy", action="append", default=[])
    tls = "TLS with this certificate and its key"
    reached.add_argument("--tls", nargs=2, type=given_path, metavar=("CERT", "KEY"), help=tls)
    admin = "also pause, resume, sleep, wake_up, reset_prefix_cache, update_weights"
    reached.add_argument("--admin", action="store_true", help=admin)
    reached.add_argument("--no-page", action="store_true", help="nothing at /")
    bounds = parser.add_argument_group("how much it takes on")
    option(bounds, "--max-requests", positive, "N", "that run at once, if they fit", default=64)
    option(bounds, "--max-context", token_count, "TOKENS", "of one request (default: what the cache can hold)")
    option(bounds, "--queue", positive, "N", "requests that wait; others get 429", default=1024)
    option(bounds, "--queue-tokens", token_count, "TOKENS", "of all prompts that wait (default: 4M)", default=1 << 22)
    option(bounds, "--body", byte_count, "SIZE", "of a request (default: 16MiB)", default=16 << 20)
    option(bounds, "--connections", positive, "N", "at once, of a process of HTTP", default=10_000)
    option(bounds, "--frontends", positive, "N", "processes of HTTP, one for each 2,000 tokens a second", default=1)
    option(bounds, "--drain", natural, "S", "seconds that answers have when it is told to end", default=30)
    chat = parser.add_argument_group("conversations")
    models = "how they are written (default: as the checkpoint says, else v4-0731)"
    chat.add_argument("--encoding", choices=("v4-preview", "v4-0731", "v4.1"), help=models)
    chat.add_argument("--no-thinking", action="store_true", help="answers begin without reasoning if nobody says")
    steps = parser.add_argument_group("how it runs")
    form = "matrices in this dtype, or released: FP8 and FP4 as they are"
    add_weights(steps, f"{form} (default: released if they are FP8, on a CPU bfloat16; else float32)")
    option(steps, "--chunk", positive, "N", "most tokens of a step (default: 512)")
    option(steps, "--decode-steps", positive, "K", "steps per call while nobody waits", default=1)
    add_drafts(steps)
    cache = "bytes of each device for the cache (default: what the weights leave, on a CPU 2GiB)"
    option(steps, "--cache-memory", byte_count, "SIZE", cache)
    option(steps, "--host-memory", byte_count, "SIZE", "of this machine, for what the cache has no room for", default=0)
    kept = "keep what prompts have computed in this folder, and look there first (needs --host-memory)"
    option(steps, "--store", given_path, "DIR", kept)
    option(steps, "--devices", positive, "N", "to run on, 1, 2, 4 or 8", default=1)
    tensor = "of them, share the heads; groups of so many have requests of their own (default: all)"
    option(steps, "--tensor", positive, "T", tensor)
    add_implementation(steps)
    add_layout(parser, drafts=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_extra()
    from ..serve.config import Config
    from ..serve.server import Server, listen

    mtp = args.draft_tokens > 0
    with naming("--checkpoint"):
        hf = read_hf(args.checkpoint)
        cfg = DSV4Config.from_hf(hf)
        end_tokens = stop_tokens_of(args.checkpoint)
    check_drafts(cfg, args.draft_tokens)
    layout_from(args, cfg, include_drafts=mtp)
    if args.store is not None and not args.host_memory:
        raise OptionError("--store: what is kept goes there from --host-memory")
    keys = {} if args.api_keys is None else _keys(args.api_keys)
    names = args.model_name or [args.checkpoint.resolve().name]
    certificate, key = args.tls or (None, None)
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise FileError(f"--tls: {path} is no file")
    config = Config(
        socket="",
        checkpoint=str(args.checkpoint),
        models=names,
        encoding=args.encoding,
        thinking=not args.no_thinking,
        end_tokens=end_tokens,
        keys=keys,
        cors=args.cors,
        loopback=_is_loopback(args.host),
        names=args.name,
        admin=args.admin,
        page=not args.no_page,
        body_bytes=args.body,
        connections=args.connections,
        certificate=None if certificate is None else str(certificate),
        key=None if key is None else str(key),
        drain_s=args.drain,
    )
    if not config.loopback and not keys:
        say("dsv4-jax serve: warning: whoever reaches this machine can use it (--api-keys)")
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        listening = listen(args.host, args.port)
        server = opened.enter_context(Server(listening, config, frontends=args.frontends))
        scheme = "http" if certificate is None else "https"
        shown = f"[{server.address[0]}]" if ":" in server.address[0] else server.address[0]
        address = f"{scheme}://{shown}:{server.address[1]}"
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        engine, facts = _engine(args, hf, cfg, opened)
        server.attach(engine, **facts)
        ready = time.monotonic()
        say(f"{address}/ serves {names[0]}: {facts['context']} tokens of context")
        failed = _wait(server, engine)
        say("ending: answers under way may end; once more to end at once")
        with contextlib.suppress(KeyboardInterrupt):
            server.close()
        counts = engine.stats().counts
    report = {
        "address": address,
        "models": names,
        "begin_s": ready - began,
        "run_s": time.monotonic() - ready,
        **counts,
    }
    present(report, args.json, lambda console: None)
    if failed:
        say(f"dsv4-jax serve: error: {failed}")
    return 1 if failed else 0


def _check_extra() -> None:
    """Raises `ImplementationError` if what the server is made of is not installed."""
    for name in ("starlette", "uvicorn", "msgspec", "deepseek_recipe", "llguidance"):
        try:
            __import__(name)
        except ImportError as error:
            raise ImplementationError(f"it needs the extra serve (pip install 'dsv4_jax[serve]'): {error}") from None


def _engine(
    args: argparse.Namespace, hf: Any, cfg: DSV4Config, opened: contextlib.ExitStack
) -> tuple[Any, dict[str, Any]]:
    """The engine, warm, and what its server has to know of it."""
    from ..engine import Engine, Limits
    from ..model import Split
    from ..ops.exchange_buffers import open_exchanges
    from ..serve.masks import grammars_of

    mtp = args.draft_tokens > 0
    start_jax()
    check_implementation(args.implementation)
    check_devices(args.devices)
    tensor = devices_sharing_heads(args.tensor or args.devices, args.devices, 1)
    form = form_of(args, hf, cfg, tensor, drafts=mtp)
    check(args.checkpoint, cfg, form, drafts=mtp)
    shards = max(1, args.devices // tensor)
    weights = weight_bytes(cfg, form, args.devices, tensor, drafts=mtp)
    memory = args.cache_memory or _memory(weights)
    mesh = Split(shards, tensor).mesh() if args.devices > 1 else None
    layout = layout_from(args, cfg, include_drafts=mtp)
    _, params = load(args.checkpoint, form, drafts=mtp, mesh=mesh)
    weights_id = weights_name(args.checkpoint, form)
    exchanges = opened.enter_context(open_exchanges(mesh))
    stores = opened.enter_context(open_stores(args.store, layout))
    limits = Limits(queued=args.queue)
    with naming(
        fields={"max_requests": "--max-requests", "max_context": "--max-context", "hbm_bytes": "--cache-memory"}
    ):
        engine = opened.enter_context(
            Engine.of(
                params,
                layout,
                memory,
                freeze=True,
                max_requests=-(-args.max_requests // shards),
                max_context=args.max_context,
                host=args.host_memory,
                stores=stores,
                weights_id=weights_id,
                mesh=mesh,
                exchanges=exchanges,
                chunk_tokens=args.chunk,
                decode_steps=args.decode_steps,
                drafts=args.draft_tokens,
                limits=limits,
                implementation=args.implementation,
            )
        )
    with Progress("compiling"):
        engine.warm_up()

    def update(checkpoint: str, name: str) -> None:
        from ..model import load_hf

        other = load_hf(checkpoint, weights=form, packed=form == "released", drafts=mtp, mesh=mesh)[1]
        engine.update_weights(other, name)

    first = engine.managers[0]
    facts = {
        "vocab_size": cfg.vocab_size,
        "context": min(first.context_limit, first.pool_limit),
        "queued": args.queue,
        "queue_tokens": args.queue_tokens,
        "weights_id": weights_id,
        "grammar": grammars_of(args.checkpoint, cfg.vocab_size),
        "update": update,
    }
    return engine, facts


def _memory(weights: int) -> int:
    """Bytes of each device for the cache."""
    import jax

    from .engine import DeviceMemory

    memory = DeviceMemory(device_limit(), weights)
    if memory.free <= 0:
        raise OptionError(f"--weights: they take {human(weights)}, jax has {human(memory.total)} of the device")
    return min(memory.free, _CPU_MEMORY) if jax.default_backend() == "cpu" else memory.free


def _keys(path: pathlib.Path) -> dict[str, str]:
    """Names and API keys of a file. Raises `FileError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"--api-keys {path}: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) > 2 or len(words[-1]) < 8:
            raise FileError(
                f"--api-keys {path}, line {number}: expected NAME KEY or KEY, a key of 8 characters at least"
            )
        name = words[0] if len(words) == 2 else f"key{number}"
        if name in keys:
            raise FileError(f"--api-keys {path}, line {number}: {short(name)} is there twice")
        keys[name] = words[-1]
    if not keys:
        raise FileError(f"--api-keys {path} has no key in it")
    return keys


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wait(server: Any, engine: Any) -> str | None:
    """Returns when the process is told to end, or why it has to."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        while not ended.wait(_POLL):
            if server.problem is not None:
                return server.problem
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
