"""`/v1/responses` and Anthropic's `/v1/messages`: DeepSeek's package reads their requests and writes their answers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import deepseek_recipe as recipe
import msgspec
from starlette.requests import Request

from ..chat.encoding import check_texts
from ..errors import RequestError
from .chatting import Chats, begin, chats_of
from .completions import finite
from .generation import SILENCE, Answers, Generation, Piece
from .problems import ApiError, invalid
from .replies import as_json, aside
from .requests import Body

__all__ = ["count_tokens", "messages", "responses"]

_MOST = 1 << 31  # tokens of an answer, as far as the package is concerned


class _Kind:
    """One of the two protocols."""

    def __init__(self, name: str, request: Any, response: Any, limit: str, prefix: str):
        self.name, self.request, self.response, self.limit, self.prefix = name, request, response, limit, prefix

    def problem(self, error: ApiError) -> bytes:
        """The event that tells of an error in a stream."""
        if self.name == "messages":
            return b"event: error\ndata: " + error.encoded(messages=True) + b"\n\n"
        said = {"type": "error", "code": error.code or "server_error", "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(said | {"sequence_number": 0}) + b"\n\n"


_MESSAGES = _Kind("messages", recipe.MessagesRequest, recipe.MessagesResponse, "max_tokens", "msg_")
_RESPONSES = _Kind("responses", recipe.ResponsesRequest, recipe.ResponsesResponse, "max_output_tokens", "resp_")


class _Asked:
    """A request as the package reads it.

    Attributes:
        conversation: as the chat's encoder has it.
        request: of the package.
        echo, spaces: what answers of `responses` repeat of it.
    """

    def __init__(self, kind: _Kind, front: Any, chats: Chats, body: Body):
        options = (
            recipe.ConversionOptions()
            .with_model_versions_by_name({body.fields["model"]: recipe.ModelVersion.DeepseekV4Pro})
            .with_default_thinking_mode(front.config.thinking)
            .with_thinking_max_tokens_upper_bound(_MOST)
            .with_non_thinking_max_tokens_upper_bound(_MOST)
        )
        field = "input" if kind is _RESPONSES else "messages"
        try:
            check_texts(body.get(field))
        except RequestError as error:
            raise invalid(field, str(error)) from None
        data = msgspec.json.encode(body.fields)
        self.echo = self.spaces = None
        try:
            if kind is _RESPONSES:
                asked = recipe.ResponsesRequest(data)
                self.echo, self.spaces = asked.echo(), asked.namespace_tool_map(options)
            else:
                asked = recipe.MessagesRequest(data)
            self.request = asked.convert(options)
        except recipe.ConversionError as error:
            raise ApiError(error.status_code, _message(error)) from None
        except (ValueError, RuntimeError) as error:
            raise ApiError(400, str(error)) from None
        format = _format(body) if kind is _MESSAGES else {}
        self.conversation = chats.conversation(Body(_as_chat(self.request.conversation, body) | format))
        if self.conversation.prompt.start == "calls":
            self.request.parsing_options.starts_in_tool_calls = True


def _message(error: Any) -> str:
    """What the package says, without the form that it says it in."""
    try:
        found = json.loads(error.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        found = None
    return found if isinstance(found, str) else str(error)


def _as_chat(conversation: Any, body: Body) -> dict[str, Any]:
    """A conversation of the package as a request of `/v1/chat/completions`."""
    turns: list[dict[str, Any]] = []
    for message in conversation.messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning_content is not None:
            turn["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.prefix:
            turn["prefix"] = True
        turns.append(turn)
    fields: dict[str, Any] = {"messages": turns, "thinking": conversation.thinking_mode}
    if conversation.tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in conversation.tools]
        fields["tool_choice"] = _choice(body, conversation.tool_choice)
    if conversation.thinking_mode and conversation.reasoning_effort is not None:
        fields["reasoning_effort"] = conversation.reasoning_effort
    if conversation.response_format == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif conversation.response_format == "json_schema":
        schema = {"name": "answer", "schema": conversation.response_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _format(body: Body) -> dict[str, Any]:
    """What an answer is held to, in OpenAI's words, by Anthropic's `output_config` (`output_format` in its beta)."""
    config = body.object("output_config") or Body({})
    asked = config.object("format") or body.object("output_format")
    if asked is None:
        return {}
    if asked.get("type") != "json_schema":
        raise asked.refuse("type", "json_schema")
    if (schema := asked.object("schema")) is None:
        raise asked.refuse("schema", "an object")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.fields}}}


def _function(tool: Any) -> dict[str, Any]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {name: value for name, value in said.items() if value is not None}


def _choice(body: Body, otherwise: str) -> Any:
    """Which tools are to be called, in OpenAI's words."""
    choice = body.get("tool_choice")
    if isinstance(choice, str):
        return {"any": "required"}.get(choice, choice)
    if isinstance(choice, dict):
        kind, name = choice.get("type"), choice.get("name")
        if kind in ("tool", "function") and isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
        return {"any": "required", "auto": "auto", "none": "none"}.get(str(kind), otherwise)
    return otherwise


async def responses(front: Any, request: Request) -> Any:
    """Answers the request."""
    return await _answer(_RESPONSES, front, request)


async def messages(front: Any, request: Request) -> Any:
    """Answers the request."""
    return await _answer(_MESSAGES, front, request)


async def count_tokens(front: Any, request: Request) -> Any:
    """Tokens of a conversation's prompt."""
    body = await front.read(request)
    front.check_model(body)
    body.fields = {**body.fields, "max_tokens": 1, "stream": False}
    asked = await aside(_Asked, _MESSAGES, front, chats_of(front), body)
    return as_json({"input_tokens": len(asked.conversation.prompt.ids)})


async def _answer(kind: _Kind, front: Any, request: Request) -> Any:
    body = await front.read(request)
    front.check_model(body)
    if body.get("n") not in (None, 1):
        raise invalid("n", "n is 1 here")
    for field in ("previous_response_id", "conversation", "background"):
        if kind is _RESPONSES and body.get(field):
            raise invalid(
                field, f"{field} is not supported: this server keeps no conversations", "unsupported_parameter"
            )
    chats = chats_of(front)
    asked = await aside(_Asked, kind, front, chats, body)
    prompt = asked.conversation.prompt
    own = {**body.fields, "stop": None, "stream_options": None}  # what the package reads
    if kind is _MESSAGES and (user := (body.object("metadata") or Body({})).string("user_id", most=512)):
        own["user"] = user
    top_p = 0.95 if prompt.tools and prompt.thinking else 1.0
    wanted = front.wanted(request, Body(own), limit=kind.limit, top_p=top_p)
    if kind is _RESPONSES and asked.request.inference_options.logprobs:
        wanted.logprobs = min(asked.request.inference_options.top_logprobs or 0, front.hello().top)
    generation = begin(front, asked.conversation, wanted, asked.request.conversation.reasoning_effort)
    head = {"id": kind.prefix + secrets.token_hex(12), "model": front.config.models[0]}
    form = _Form(kind, chats, asked, generation, head)
    return Answers(generation, wanted.stream, form, kind.problem)


class _Form:
    """An answer in the form of a protocol."""

    def __init__(self, kind: _Kind, chats: Chats, asked: _Asked, generation: Generation, head: dict[str, Any]):
        self._kind, self._generation, self._head, self._prompt = kind, generation, head, asked.conversation.prompt
        made = kind.request.chunk_generator(asked.request, head["id"], head["model"])
        if asked.spaces is not None:
            made = made.with_namespace_tool_map(asked.spaces)
        if asked.echo is not None:
            made = made.with_echo(asked.echo)
        self._processor = recipe.StreamProcessor(made, asked.request.parsing_options, chats.recipe_tokenizer)
        self._begun = False

    def _read(self, piece: Piece) -> list[Any]:
        """The package's events for what is new."""
        processor, found = self._processor, []
        if not self._begun:
            self._begun = True
            used = recipe.PromptUsage(prompt_tokens=len(self._prompt.ids), prompt_cache_hit_tokens=piece.cached)
            found += processor.push(recipe.InferenceChunk.ready(prompt_usage=used))
        if piece.tokens and not processor.finished:
            found += processor.push(recipe.InferenceChunk.tokens(piece.tokens, _logprobs(piece)))
        if processor.finished:
            if piece.finish is None:
                self._generation.stop(piece.index)
        elif piece.finish is not None:
            reasons = recipe.InferenceFinishReason
            reason = reasons.Length if piece.finish == "length" else reasons.Stop
            found += processor.push(recipe.InferenceChunk.finish(reason))
            if not processor.finished:
                found += processor.finish()
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """The stream."""
        response = self._kind.response
        async for pieces in self._generation.pieces(SILENCE):
            data = b""
            for piece in pieces:
                for one in self._read(piece):
                    name, said = response.sse_event_name(one), one.to_json()
                    data += (f"event: {name}\n" if name else "").encode() + b"data: " + said.encode() + b"\n\n"
            if data or not pieces:
                yield data
        if (done := response.sse_done_data()) is not None:
            yield f"data: {done}\n\n".encode()

    async def whole(self) -> Any:
        """The answer at once."""
        answer = None
        async for pieces in self._generation.pieces():
            for piece in pieces:
                if answer is None:
                    used = len(self._prompt.ids), piece.cached
                    answer = self._kind.response(self._head["id"], self._head["model"], int(time.time()), *used)
                for one in self._read(piece):
                    answer.accumulate(one)
        assert answer is not None
        return msgspec.Raw(answer.to_json().encode())


def _logprobs(piece: Piece) -> Any:
    if not piece.logprobs:
        return None
    tops = [list(zip(ids, map(finite, values), strict=True)) for ids, values in piece.top]
    tops += [[]] * (len(piece.tokens) - len(tops))
    return [(finite(value), top) for value, top in zip(piece.logprobs, tops, strict=True)]
