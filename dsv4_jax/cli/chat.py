"""`chat`: a conversation with a checkpoint in the terminal, answers as they come, reasoning dimmed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from ..chat import Chat, ChatPrompt, Delta, Parser
from ..errors import CacheError, OptionError, RequestError
from .answers import DIM, PLAIN, Shown, write_text
from .engine import Model, add_steps, open_engine, place
from .options import add_command, add_json, add_layout, naming, option
from .printing import one_line, present, say
from .prompts import add_conversation, open_chat, open_tokenizer
from .sampling import add_sampling, sampling_of, stops_of
from .values import given_path, token_count, unicode_text

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["add_parser", "run"]

_EXAMPLES = """
  dsv4-jax chat --checkpoint DIR                                              a question a line; /help says more
  dsv4-jax chat --checkpoint DIR --thinking --effort low --temperature 1      it reasons first, dimmed; sampled
  dsv4-jax chat --checkpoint DIR --system 'You are terse.' --devices 2        over two devices
  dsv4-jax chat --checkpoint DIR --json turns.json < questions.txt            a question a line from a file
"""
_HELP = """\
/think [on|off]   reason first, or not
/effort [LEVEL]   how hard: low, medium, high, max
/system [TEXT]    what it is told first; nothing: it is told nothing
/undo             forget the last question and its answer
/reset            begin anew
/exit             or Ctrl-D; Ctrl-C ends an answer
a line that ends in \\ goes on in the next one; one that begins with // begins with /
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_command(commands, "chat", "a conversation with a checkpoint in the terminal", __doc__, _EXAMPLES)
    option(parser, "--checkpoint", given_path, "DIR", "config.json, safetensors, tokenizer.json", required=True)
    group = parser.add_argument_group("the conversation")
    option(group, "--system", unicode_text, "TEXT", "what it is told first")
    thinking = "it reasons before it answers (default: yes)"
    group.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True, help=thinking)
    add_conversation(group)
    add_sampling(parser, limit=4096)
    steps = add_steps(parser, devices="that share the heads")
    option(steps, "--max-context", token_count, "TOKENS", "of the conversation (default: what the cache can hold)")
    add_layout(parser, drafts=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    model = Model(args)
    if "" in args.stop:
        raise OptionError("--stop: an empty text")
    chat = open_chat(args, open_tokenizer(args.checkpoint))
    talk = _Talk(args, chat, model.cfg.vocab_size)
    with contextlib.ExitStack() as opened:
        talk.converse(
            open_engine(opened, args, model, place(args, model, args.devices), max_requests=1, seed=args.seed)
        )
    report = {"checkpoint": str(args.checkpoint), "model": chat.model, "turns": talk.turns}
    present(report, args.json, lambda console: None)
    return 0


class _Talk:
    """The conversation: what was said, and how the next answer is asked for.

    Attributes:
        turns: of each answer what `--json` says.
    """

    def __init__(self, args: argparse.Namespace, chat: Chat, vocab_size: int):
        self._args, self._chat, self._vocab = args, chat, vocab_size
        self._system, self._thinking, self._effort = args.system, args.thinking, args.effort
        self._messages: list[dict[str, Any]] = []
        self._sampling, self._stops = sampling_of(args), stops_of(args)
        self._silent = args.json == "-"
        self.turns: list[dict[str, Any]] = []
        with naming("--effort" if args.effort is not None else "--checkpoint"):
            self._prompt("a")

    def converse(self, engine: Engine) -> None:
        """Reads lines and answers them until there are none."""
        if _is_terminal():
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # lines can be edited
            say(f"{self._chat.model}, thinking {'on' if self._thinking else 'off'}; /help says what else can be typed")
        while True:
            try:
                line = self._read()
                if line is None or line.strip() in ("/exit", "/quit"):
                    return
                if line.startswith("/") and not line.startswith("//"):
                    self._command(*[*line.split(maxsplit=1), ""][:2])
                elif line.strip():
                    self._answer(engine, line.removeprefix("/") if line.startswith("//") else line)
            except KeyboardInterrupt:  # at the prompt, or just as an answer ended
                self._write("\n")
            except RequestError as error:
                say(one_line(error))

    def _read(self) -> str | None:
        """The next line, or several that go on; None: there is none."""
        lines: list[str] = []
        while True:
            if _is_terminal():
                try:
                    line = input("... " if lines else "> ")
                except EOFError:
                    self._write("\n")
                    return None
            else:
                line = sys.stdin.readline() if sys.stdin is not None else ""
                if not line:
                    return "\n".join(lines) if lines else None
                line = line.rstrip("\r\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def _command(self, word: str, value: str) -> None:
        if word == "/help":
            sys.stderr.write(_HELP)
        elif word == "/reset":
            self._messages = []
        elif word == "/undo":
            while self._messages and self._messages.pop()["role"] != "user":
                pass
        elif word == "/system":
            self._system = value or None
        elif word == "/think" and value in ("", "on", "off"):
            self._thinking = value != "off" if value else not self._thinking
            say(f"thinking {'on' if self._thinking else 'off'}")
        elif word == "/effort":
            before, self._effort = self._effort, (int(value) if value.isdecimal() else value) or None
            try:
                self._prompt("a")
            except RequestError:
                self._effort = before
                raise
        else:
            say(f"{one_line(word)}: /help says what can be typed")

    def _prompt(self, question: str) -> ChatPrompt:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *self._messages, {"role": "user", "content": question}]
        prompt = self._chat.prompt(messages, thinking=self._thinking, reasoning_effort=self._effort)
        wrong = next((token for token in prompt.ids if token >= self._vocab), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is outside the vocabulary (the tokenizer is another model's)")
        return prompt

    def _answer(self, engine: Engine, question: str) -> None:
        from ..engine import Prompt

        prompt = self._prompt(question)
        manager = engine.managers[0]
        room = min(manager.context_limit, manager.pool_limit) - len(prompt.ids)
        if room < 1:
            raise RequestError("the conversation is as long as it can be: /reset begins anew, /undo forgets a question")
        parser = self._chat.parser(prompt, stops=self._args.stop)
        began = time.perf_counter()
        first = last = None
        drawn = cached = 0
        finish, failed = "abort", None
        asked = Prompt(
            tokens=prompt.ids,
            max_new_tokens=min(self._args.max_new_tokens, room),
            sampling=self._sampling,
            stop_tokens=self._stops,
            reuse=prompt.reuse,
        )
        shown = Shown()
        handle = engine.add(asked)
        try:
            for output in handle:
                last = time.perf_counter()
                first = first or last
                drawn, cached, failed = drawn + len(output.tokens), output.cached, output.error
                self._show(shown, parser.feed(output.tokens))
                if output.finish is not None:
                    finish = output.finish
                if parser.stopped:
                    break
        except KeyboardInterrupt:
            say("")
        finally:
            handle.abort()  # of one that has ended it is nothing
        self._show(shown, parser.end(finish))
        shown.end()
        if shown.last and not shown.last.endswith("\n"):
            self._write("\n")
        if failed is not None:
            raise failed if isinstance(failed, CacheError) else RequestError(f"the answer failed: {failed}")
        self._keep(question, parser)
        seconds = (last or began) - (first or began)
        rate = (drawn - 1) / seconds if seconds and drawn > 1 else None
        turn = {
            "question": question,
            "reasoning": parser.reasoning,
            "answer": parser.content,
            "end": parser.finish_reason,
            "prompt_tokens": len(prompt.ids),
            "cached_tokens": cached,
            "tokens": drawn,
            "reasoning_tokens": parser.reasoning_tokens,
            "first_token_s": None if first is None else first - began,
            "tokens_per_s": rate,
        }
        self.turns.append(turn)
        ended = "" if parser.finish_reason == "stop" else f", ended by {_ENDS.get(finish, finish)}"
        speed = f", {rate:,.1f}/s" if rate else ""
        after = "" if first is None else f"; the first after {first - began:.3f} s"
        _dimmed(
            f"{drawn} tokens{speed}{after}; {cached:,} of {len(prompt.ids):,} tokens of the prompt were cached{ended}"
        )

    def _keep(self, question: str, parser: Parser) -> None:
        """What was said is part of the next prompt; an answer that was ended before it began is not."""
        if parser.content or parser.finish_reason == "stop":
            self._messages += [{"role": "user", "content": question}, parser.message()]

    def _show(self, shown: Shown, delta: Delta) -> None:
        if not self._silent:
            shown.add(delta)

    def _write(self, text: str) -> None:
        if not self._silent:
            write_text(text)


_ENDS = {"abort": "Ctrl-C", "length": "--max-new-tokens"}


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _dimmed(line: str) -> None:
    """A line on stderr."""
    dims = sys.stderr is not None and sys.stderr.isatty()
    say(f"{DIM}{line}{PLAIN}" if dims else line)
