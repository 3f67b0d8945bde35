"""The command line: one file per command, `add_parser` and `run` each.

`options.EXIT_STATUS` has the exit statuses. An error is one line on stderr, and names the option it is about.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from ..errors import CacheError, PerformanceWarning
from ..version import __version__
from .options import EXIT_STATUS, FAILURES, PROGRAM, Parser
from .printing import one_line, say

__all__ = ["entry", "main"]

_COMMANDS = ("demo", "init", "generate", "chat", "serve", "logits", "plan", "simulate", "bench", "doctor", "build")
_EXAMPLES = """\
examples:
  dsv4-jax demo                                                  real text through the cache, checked
  dsv4-jax init DIR                                              a tiny checkpoint to try things with
  dsv4-jax plan --model flash --hbm 80GiB --context 128K         how many requests fit?
  dsv4-jax simulate trace.jsonl --hbm 20GiB                      what would prefix caching find?
  dsv4-jax generate --checkpoint DIR --prompt 'Once upon a time' text from a checkpoint
  dsv4-jax chat --checkpoint DIR                                 a conversation in the terminal
  dsv4-jax serve --checkpoint DIR                                the same behind HTTP, and a page
  dsv4-jax logits --checkpoint DIR --tokens t.npy --out l.npy    to compare with another engine
  dsv4-jax bench attend --quick                                  does it run, and is it right?
  dsv4-jax doctor                                                what works on this machine
  dsv4-jax build                                                 the CUDA kernels, where the package came without

all commands take --json [FILE]: JSON alone on stdout, or in FILE beside the table; progress and errors are on stderr

exit status:
"""


def entry() -> NoReturn:
    """The process: runs `main` on the command line and exits with its status."""
    _raise_swallowed_interrupts()
    _hold_standard_streams()
    _shorten_warnings()
    try:
        status = main()
    except SystemExit as done:  # of argparse: bad usage and --help
        status = done.code if isinstance(done.code, int) else 2
    status = _settle(sys.stdout, status)
    _settle(sys.stderr, status)
    if status == 130:
        # Steps may still be running on XLA's threads, and taking Python down under them crashes.
        os._exit(status)
    sys.exit(status)


def _hold_standard_streams() -> None:
    """Opens what is closed of stdin, stdout and stderr, or the next file that is opened would be taken for it.

    Names of files may hold what the terminal's encoding does not: they are escaped there.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = io.StringIO()
    if sys.stdout is None:
        print(f"{PROGRAM}: error: stdout is closed", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _settle(stream: TextIO, status: int) -> int:
    """The exit status once all that a stream holds is written. If that fails it is dropped: Python would complain."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is sys.stdout and not status:
            return 141 if isinstance(error, BrokenPipeError) else _failed("", error, 2)
    return status


def _raise_swallowed_interrupts() -> None:
    """Python drops what is raised in a finaliser or a garbage collector's callback, of which JAX has one.

    A KeyboardInterrupt that lands there would be lost, so it is raised again a moment later.
    """
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # Not at once: that would be raised in this function, and dropped too.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            report(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = hook


def _shorten_warnings() -> None:
    """Shows the package's own warnings in one line, as errors are: without the source line that warns."""
    whole = warnings.formatwarning

    def form(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
        if issubclass(category, PerformanceWarning):
            return f"{PROGRAM}: warning: {one_line(message)}\n"
        return whole(message, category, *where, **line)

    warnings.formatwarning = form


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status (`argparse` raises SystemExit for bad usage and --help)."""
    command = ""
    try:
        args = _arguments(argv)
        command = f" {args.command}"
        status = args.run(args)
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        return 141
    except MemoryError:
        return _failed(command, "there is not enough memory", 1)
    except (CacheError, OSError) as error:
        return _failed(command, error, 1 if isinstance(error, FAILURES) else 2)
    except RuntimeError as error:
        if type(error).__name__ != "JaxRuntimeError":
            raise
        return _failed(command, error, 1)


def _failed(command: str, problem: object, status: int) -> int:
    say(f"{PROGRAM}{command}: error: {one_line(problem)}")
    return status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    args = _parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def _parser() -> Parser:
    statuses = "".join(f"  {status:<3}  {meaning}\n" for status, meaning in EXIT_STATUS.items())
    parser = Parser(
        prog=PROGRAM,
        description=f"The KV cache of DeepSeek-V4 for JAX. `python -m dsv4_jax` is the same program as `{PROGRAM}`.",
        epilog=_EXAMPLES + statuses,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name in _COMMANDS:
        importlib.import_module(f".{name}", __name__).add_parser(commands)
    return parser
