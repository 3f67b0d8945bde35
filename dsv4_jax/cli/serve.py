"""`serve`: a checkpoint behind HTTP, as clients of OpenAI's and Anthropic's APIs speak it, with a page at `/`."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import pathlib
import signal
import ssl
import threading
import time
from typing import Any

from ..errors import FileError, ImplementationError, OptionError
from ..text import stop_tokens_of
from .engine import Model, add_steps, add_store, host_size, open_engine, open_stores, place, weights_name
from .inputs import open_regular, read_whole
from .options import add_command, add_json, add_layout, naming, option
from .printing import one_line, present, say
from .values import byte_count, given_path, natural, positive, short, token_count, unicode_text

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax serve --checkpoint DIR                            http://127.0.0.1:8000: a chat there, OpenAI's API below /v1
  dsv4-jax serve --checkpoint DIR --devices 2 --port 9000     heads and experts over two devices
  dsv4-jax serve --checkpoint DIR --host 0.0.0.0 --api-keys keys.txt --tls cert.pem key.pem     for other machines
  dsv4-jax serve --checkpoint DIR --host-memory 64GiB --store cache/    what was computed is found again, also later
"""
_POLL = 0.2
_MAX_KEYS = 1 << 20  # bytes of their file


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "serve", "a checkpoint behind HTTP, and a page", __doc__, _EXAMPLES)
    option(parser, "--checkpoint", given_path, "DIR", "config.json, safetensors, tokenizer.json", required=True)
    reached = parser.add_argument_group("where it is reached, and by whom")
    option(reached, "--host", unicode_text, "NAME", "address to listen at", default="127.0.0.1")
    option(reached, "--port", _port, "P", "0: any that is free (default: 8000)", default=8000)
    names = "the model's; several: several times (default: the folder's)"
    option(reached, "--model-name", unicode_text, "NAME", names, action="append", default=[])
    keys = "of API keys, one a line, NAME KEY or KEY: without one of them nothing is answered"
    option(reached, "--api-keys", given_path, "FILE", keys)
    origin = "whose pages may ask, https://example.org or *; several: several times (default: none)"
    option(reached, "--cors", unicode_text, "ORIGIN", origin, action="append", default=[])
    option(
        reached,
        "--name",
        unicode_text,
        "HOST",
        "another name of this server, behind a proxy",
        action="append",
        default=[],
    )
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
    steps = add_steps(parser, decode="while nobody waits")
    add_store(steps)
    tensor = "of them, share the heads; groups of so many have requests of their own (default: all)"
    option(steps, "--tensor", positive, "T", tensor)
    add_layout(parser, drafts=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_extra()
    from ..serve.config import Config
    from ..serve.server import Server, listen

    model = Model(args)
    with naming("--checkpoint"):
        end_tokens = stop_tokens_of(args.checkpoint)
    if args.store is not None and not args.host_memory:
        raise OptionError("--store: what is kept goes there from --host-memory")
    keys = {} if args.api_keys is None else _keys(args.api_keys)
    names = args.model_name or [args.checkpoint.resolve().name]
    certificate, key = args.tls or (None, None)
    if args.tls:
        _check_certificate(*args.tls)
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
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(listen(args.host, args.port))
        if not config.loopback and not keys:
            say("dsv4-jax serve: warning: whoever reaches this machine can use it (--api-keys)")
        server = opened.enter_context(Server(listening, config, frontends=args.frontends))
        scheme = "http" if certificate is None else "https"
        shown = f"[{server.address[0]}]" if ":" in server.address[0] else server.address[0]
        address = f"{scheme}://{shown}:{server.address[1]}"
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        engine, facts = _engine(args, model, opened)
        server.attach(engine, **facts)
        ready = time.monotonic()
        say(one_line(f"{address}/ serves {names[0]}: {facts['context']} tokens of context"))
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


def _port(text: str) -> int:
    if (port := natural(text)) > 0xFFFF:  # the C library would take it for another
        raise argparse.ArgumentTypeError(f"{short(text)} is no port, they are 0..65535")
    return port


def _check_extra() -> None:
    """Raises `ImplementationError` if what the server is made of is not installed."""
    for name in ("starlette", "uvicorn", "msgspec", "deepseek_recipe", "llguidance"):
        try:
            __import__(name)
        except ImportError as error:
            raise ImplementationError(f"it needs the extra serve (pip install 'dsv4_jax[serve]'): {error}") from None


def _engine(args: argparse.Namespace, model: Model, opened: contextlib.ExitStack) -> tuple[Any, dict[str, Any]]:
    """The engine, warm, and what its server has to know of it."""
    from ..engine import Limits
    from ..serve.masks import grammars_of

    tensor = args.tensor or args.devices
    placed, shards = place(args, model, tensor), args.devices // tensor
    weights_id = weights_name(args.checkpoint, placed.form)
    stores = opened.enter_context(open_stores(args.store, model.layout))
    engine = open_engine(
        opened,
        args,
        model,
        placed,
        freeze=True,
        max_requests=-(-args.max_requests // shards),
        host=host_size(args, model.layout, shards),
        stores=stores,
        weights_id=weights_id,
        limits=Limits(queued=args.queue),
    )

    def keep() -> None:
        """What is still on the device goes to the stores as well."""
        if engine.health().live:
            engine.sleep()

    if stores is not None:
        opened.callback(keep)

    def update(checkpoint: str, name: str) -> None:
        from ..model import load_hf

        form = placed.form
        how: dict[str, Any] = dict(drafts=model.drafts, numerics=model.layout.numerics, mesh=placed.mesh)
        other = load_hf(checkpoint, weights=form, packed=form == "released", **how)[1]
        engine.update_weights(other, name)

    first = engine.managers[0]
    facts = {
        "vocab_size": model.cfg.vocab_size,
        "context": min(first.context_limit, first.pool_limit),
        "queued": args.queue,
        "queue_tokens": args.queue_tokens,
        "weights_id": weights_id,
        "grammar": grammars_of(args.checkpoint, model.cfg.vocab_size),
        "update": update,
    }
    return engine, facts


def _keys(path: pathlib.Path) -> dict[str, str]:
    """Names and API keys of a file. Raises `FileError`."""
    try:
        lines = read_whole(path, "--api-keys", _MAX_KEYS).decode().splitlines()
    except UnicodeDecodeError:
        raise FileError(f"--api-keys {path}: not UTF-8") from None
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


def _check_certificate(certificate: pathlib.Path, key: pathlib.Path) -> None:
    """Raises `FileError` if processes of HTTP could not use it: nobody is there who would type a password."""

    def password() -> str:
        raise FileError(f"--tls {key}: is encrypted")

    for path in (certificate, key):
        with open_regular(path, "--tls"):
            pass
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except OSError as error:
        raise FileError(f"--tls: {certificate} and {key} are no certificate and its key: {error}") from None


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
