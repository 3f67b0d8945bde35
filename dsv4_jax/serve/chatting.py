"""`/v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from ..chat import Chat, ChatPrompt, Parser, constraint, model_of
from ..errors import CacheError
from ..text import Tokenizer
from .completions import SILENCE, event, finite, joined, usage
from .config import Config
from .generation import Answers, Generation, Piece
from .problems import ApiError, invalid
from .replies import aside
from .requests import Body, Wanted

__all__ = ["ChatForm", "Chats", "Conversation", "begin", "chat_completions", "chats_of"]

LONG = 1 << 14  # characters from which on a conversation is not encoded in the loop's own thread
_MAX_MESSAGES, _MAX_TOOLS = 20_000, 1024
_DEFAULT = {False: 8192, True: 65536}  # tokens of an answer without and with reasoning, as its vendor has them
_HARDEST = 131072
_FIELD = re.compile(  # ours begin with the field; the package has sentences of its own
    r"(?P<tool_choice>tool_choice)|(?P<reasoning_effort>reasoning_effort)|(?P<thinking>thinking)"
    r"|(?P<chat_template_kwargs>chat_template_kwargs)"
    r"|(?P<response_format>response_format|Invalid json schema|.*`json_object`, `json_schema`)"
    r"|(?P<tools>tools|the tool |Tool names|Invalid 'tools|Invalid schema for function)"
)


class Conversation:
    """A conversation as ids, and what answers to it may look like.

    Attributes:
        prompt: its ids, and how an answer begins.
        grammar: plain data of what may come; None: anything.
    """

    def __init__(self, prompt: ChatPrompt, grammar: Any):
        self.prompt, self.grammar = prompt, grammar


class Chats:
    """A checkpoint's conversations.

    Raises:
        CheckpointError: its tokenizer lacks a mark.
    """

    def __init__(self, config: Config, texts: Tokenizer):
        from deepseek_recipe import Tokenizer as RecipeTokenizer

        self._config, self._ends = config, frozenset(config.end_tokens)
        self.chat = Chat(texts, model=config.encoding or model_of(config.checkpoint))
        self.bytes_of, self.recipe_tokenizer = texts.bytes_of, RecipeTokenizer.from_str(texts.source)

    def conversation(self, body: Body) -> Conversation:
        """What a request's messages, tools and formats are as a prompt. Raises `ApiError`."""
        for field, most in (("messages", _MAX_MESSAGES), ("tools", _MAX_TOOLS)):
            body.array(field, most)
        if not body.get("messages"):
            raise body.refuse("messages", "an array of messages, one at least")
        if body.get("tools") == []:
            raise body.refuse("tools", "an array of tools, one at least")
        try:
            settings: dict[str, Any] = {"thinking": self._config.thinking} | Chat.settings(body.fields)
            prompt = self.chat.prompt(**settings)
            return Conversation(prompt, self._grammar(body, settings, prompt))
        except CacheError as error:
            raise invalid(_field(str(error)), str(error)) from None

    def _grammar(self, body: Body, settings: dict[str, Any], prompt: ChatPrompt) -> Any:
        parallel = body.boolean("parallel_tool_calls", True)
        asked = {name: settings.get(name) for name in ("tool_choice", "response_format")}
        found = constraint(prompt, self.chat.tokenizer, parallel_tool_calls=parallel, **asked)
        return None if found is None else list(found)

    def prompt_of(self, front: Any, body: Body) -> list[int]:
        """The ids of a request's conversation (`/tokenize`)."""
        return self.conversation(body).prompt.ids

    def read(self, tokens: list[int]) -> list[int]:
        """Ids that are to be read. An end that comes all the same was to be ignored (`ignore_eos`): it is no text."""
        return tokens if self._ends.isdisjoint(tokens) else [token for token in tokens if token not in self._ends]

    def parser(self, conversation: Conversation, stops: list[str]) -> Parser:
        """Reads an answer."""
        return self.chat.parser(conversation.prompt, stops=stops)


def _field(message: str) -> str:
    """The field that an error of the encoder is about."""
    found = _FIELD.match(message)
    return next(name for name, there in found.groupdict().items() if there) if found else "messages"


async def chat_completions(front: Any, request: Request) -> Any:
    """Answers the request."""
    body = await front.read(request)
    front.check_model(body)
    chats = chats_of(front)
    conversation = await aside(chats.conversation, body)
    prompt = conversation.prompt
    tools = bool(prompt.tools)
    top_p = 0.95 if tools and prompt.thinking else 1.0
    wanted = front.wanted(request, body, limit="max_completion_tokens", top_p=top_p)
    if body.boolean("logprobs"):
        wanted.logprobs = body.integer("top_logprobs", 0, 0, front.hello().top)
    elif body.get("top_logprobs") is not None:
        body.integer("top_logprobs", 0, 0, front.hello().top)
        raise invalid("top_logprobs", "top_logprobs wants logprobs to be true")
    generation = begin(front, conversation, wanted, body.get("reasoning_effort"))
    form = ChatForm(chats, conversation, wanted, generation, front.head("chatcmpl"))
    return Answers(generation, wanted.stream, form)


def chats_of(front: Any) -> Chats:
    """The checkpoint's conversations. Raises `ApiError` if there are none."""
    if front.chat is None:
        raise ApiError(400, "this checkpoint has no tokenizer: prompts are ids (/v1/completions)")
    return front.chat


def begin(front: Any, conversation: Conversation, wanted: Wanted, effort: Any) -> Generation:
    """Asks the engine for the answers. Raises `ApiError`."""
    prompt = conversation.prompt
    default = _HARDEST if prompt.thinking and effort == "max" else _DEFAULT[prompt.thinking]
    most = front.room(len(prompt.ids), wanted.max_tokens, default)
    if conversation.grammar is not None:  # whose end is an end
        wanted.stop_tokens = [*dict.fromkeys([*wanted.stop_tokens, *front.config.end_tokens])]
    return Generation(front.backend, [prompt.ids], wanted, [most], grammar=conversation.grammar, reuse=prompt.reuse)


class ChatForm:
    """The answers, in the form of this route."""

    def __init__(
        self, chats: Chats, conversation: Conversation, wanted: Wanted, generation: Generation, head: dict[str, Any]
    ):
        self._chats, self._wanted, self._generation, self._head = chats, wanted, generation, head
        self._parsers = [chats.parser(conversation, wanted.stops) for _ in generation.samples]
        self._thinks = [conversation.prompt.start == "reasoning"] * len(generation.samples)

    def _read(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """What is new of an answer, and how it has ended."""
        parser = self._parsers[piece.index]
        found = [parser.feed(self._chats.read(piece.tokens))]
        finish = piece.finish
        if parser.stopped and finish is None:
            finish = "stop"
            self._generation.stop(piece.index)
        if finish is not None:
            found.append(parser.end(finish))
            finish = parser.finish_reason
            self._chats.chat.remember(parser.calls)
        delta: dict[str, Any] = {}
        if reasoning := "".join(each.reasoning for each in found):
            delta["reasoning_content"] = reasoning
        if content := "".join(each.content for each in found):
            delta["content"] = content
        if calls := [_call(each) for one in found for each in one.calls]:
            delta["tool_calls"] = calls
        return delta, finish

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Of each id, in what the model said: its reasoning or the rest."""
        if self._wanted.logprobs is None:
            return None
        into: dict[str, Any] = {"content": [], "refusal": None}
        tokenizer = self._chats.chat.tokenizer
        end = tokenizer.mark("</think>")
        for i, token in enumerate(piece.tokens):
            if self._thinks[piece.index] and token == end:
                self._thinks[piece.index] = False
                continue
            one = self._token(token, piece.logprobs[i])
            top = piece.top[i] if i < len(piece.top) else ((), ())
            one["top_logprobs"] = [self._token(*pair) for pair in zip(*top, strict=True)]
            into.setdefault("reasoning_content" if self._thinks[piece.index] else "content", []).append(one)
        return into

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._chats.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: one write for what a turn of the engine has brought."""
        head = self._head | {"object": "chat.completion.chunk"} | ({"usage": None} if self._wanted.usage else {})
        first = b""
        for index in range(len(self._parsers)):
            delta = {"role": "assistant", "content": ""}
            first += event(head | {"choices": [_choice(index, delta, None, None)]})
        yield first
        async for pieces in self._generation.pieces(SILENCE):
            data = b""
            for piece in pieces:
                delta, finish = self._read(piece)
                logprobs = self._logprobs(piece)
                if not (delta or finish or self._wanted.token_ids or (logprobs and len(piece.tokens))):
                    continue
                choice = _choice(piece.index, delta, finish, logprobs)
                if self._wanted.token_ids:
                    choice["token_ids"] = piece.tokens
                data += event(head | {"choices": [choice]})
            if data or not pieces:
                yield data
        if self._wanted.usage:
            yield event(head | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def whole(self) -> dict[str, Any]:
        """The answers at once."""
        choices = [_choice(i, None, None, None) for i in range(len(self._parsers))]
        async for pieces in self._generation.pieces():
            for piece in pieces:
                choice = choices[piece.index]
                _, finish = self._read(piece)
                choice["finish_reason"] = finish
                if (logprobs := self._logprobs(piece)) is not None:
                    choice["logprobs"] = joined(choice["logprobs"], logprobs)
                if self._wanted.token_ids:
                    choice["token_ids"] = choice.get("token_ids", []) + piece.tokens
        for choice, parser in zip(choices, self._parsers, strict=True):
            del choice["delta"]
            choice["message"] = parser.message()
            if choice["message"].get("tool_calls") and not choice["message"]["content"]:
                choice["message"]["content"] = None
        return self._head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation, sum(parser.reasoning_tokens for parser in self._parsers))


def _choice(index: int, delta: Any, finish: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _call(piece: Any) -> dict[str, Any]:
    """A piece of a call, as streams have it."""
    said: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        said |= {"id": piece.id, "type": "function"}
        said["function"]["name"] = piece.name
    return said
