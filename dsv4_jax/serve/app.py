"""The routes: one ASGI application a frontend."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import hmac
import importlib.resources
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import CacheError
from ..version import __version__
from .backend import Backend
from .completions import Completions, Texts
from .config import Config
from .generation import Answers, EventStream, Generation, watched
from .problems import ApiError, invalid
from .replies import as_json, aside
from .requests import Body, Wanted, common, parse, prompts

__all__ = ["Frontend"]

LONG = 1 << 16  # bytes from which on a body is not worked on in the loop's own thread
VALUE = 96  # bytes that a value of JSON takes at most, on average
A_VALUE = 8  # bytes of a body for each value that it may have: it is of text and ids, not of brackets
POLL = 0.5  # seconds between two events of the page
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_PAGES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"

Endpoint = Callable[["Frontend", Request], Awaitable[Any]]


class Frontend:
    """Answers HTTP requests with an engine at the other end of a socket.

    Args:
        config: what it may do.
        backend: the engine.
        texts: the checkpoint's tokenizer; None: ids only.
        chat: the checkpoint's conversations (`chatting.Chats`); None: none can be had.
    """

    def __init__(self, config: Config, backend: Backend, texts: Texts | None, chat: Any = None):
        self.config, self.backend, self.texts, self.chat = config, backend, texts, chat
        self.begun = int(time.time())
        self.requests = collections.Counter[tuple[str, int]]()  # by route and status
        self.body_bytes = 0  # of bodies that are being read or worked on, and of what was made of them
        self._keys = {hashlib.sha256(key.encode()).digest(): name for name, key in config.keys.items()}
        self._watchers: set[asyncio.Event] = set()
        self._status: bytes = b""
        self._poller: asyncio.Task[None] | None = None

    def app(self) -> Any:
        """The application."""
        from . import chatting, protocols

        routes: list[tuple[str, str, Endpoint, bool]] = [
            ("GET", "/health", Frontend.health, False),
            ("GET", "/ready", Frontend.ready, False),
            ("GET", "/metrics", Frontend.metrics, False),
            ("GET", "/version", Frontend.version, False),
            ("GET", "/events", Frontend.events, True),
            ("GET", "/v1/models", Frontend.models, True),
            ("GET", "/v1/models/{model:path}", Frontend.model, True),
            ("POST", "/v1/completions", Frontend.completions, True),
            ("POST", "/v1/chat/completions", chatting.chat_completions, True),
            ("POST", "/v1/responses", protocols.responses, True),
            ("POST", "/v1/messages", protocols.messages, True),
            ("POST", "/v1/messages/count_tokens", protocols.count_tokens, True),
            ("POST", "/tokenize", Frontend.tokenize, True),
            ("POST", "/detokenize", Frontend.detokenize, True),
        ]
        if self.config.admin:
            routes += [
                ("POST", f"/{name}", _order(name), True)
                for name in ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "update_weights")
            ]
        made = [Route(path, self._endpoint(path, call, key), methods=[method]) for method, path, call, key in routes]
        if self.config.page:
            made += [Route(path, self._page(*file), methods=["GET"]) for path, file in _PAGES.items()]
        middleware = []
        if self.config.cors:
            cors: dict[str, Any] = {"allow_origins": self.config.cors, "allow_methods": ["GET", "POST"]}
            middleware.append(Middleware(CORSMiddleware, allow_headers=["*"], **cors))
        handlers: Any = {HTTPException: self._http_problem}
        return Starlette(routes=made, middleware=middleware, exception_handlers=handlers)

    # What every request passes through

    def _endpoint(self, path: str, call: Endpoint, needs_key: bool) -> Callable[[Request], Awaitable[Any]]:
        anthropic = path.startswith("/v1/messages")

        async def endpoint(request: Request) -> Any:
            request.state.body_bytes = 0
            try:
                self._check_origin(request)
                if needs_key:
                    request.state.tenant = self._tenant(request)
                answer = await call(self, request)
                if isinstance(answer, Answers):
                    self._count(request, -request.state.body_bytes)  # nothing of it is kept
                    answer = await self._answer(request, answer)
            except ApiError as error:
                answer = self._refusal(error, anthropic)
            except (ClientDisconnect, asyncio.CancelledError):  # nobody reads it
                self.requests[path, 499] += 1
                return Response(status_code=499)
            except Exception:
                traceback.print_exc()
                answer = self._refusal(ApiError(500, "the server has failed", code="internal_error"), anthropic)
            finally:
                self._count(request, -request.state.body_bytes)
            self.requests[path, getattr(answer, "status_code", 200)] += 1
            return answer

        return endpoint

    def _refusal(self, error: ApiError, anthropic: bool = False) -> Response:
        headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.status in (408, 413):
            headers["connection"] = "close"
        status = 529 if anthropic and error.status == 503 else error.status
        return Response(error.encoded(messages=anthropic), status, headers, "application/json")

    async def _http_problem(self, request: Request, error: Exception) -> Response:
        """Of Starlette: no such route, or another method."""
        assert isinstance(error, HTTPException)
        said = f"{request.method} {request.url.path}: {error.detail}"
        self.requests["", error.status_code] += 1
        found = self._refusal(
            ApiError(error.status_code, said, code="unknown_url" if error.status_code == 404 else None)
        )
        found.headers.update(error.headers or {})
        return found

    def _check_origin(self, request: Request) -> None:
        """A page of another site must not reach a server that trusts whoever is on this machine.

        Raises `ApiError`.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if sum(len(name) + len(value) for name, value in request.headers.raw) > self.config.head_bytes:
            raise ApiError(431, f"headers are of at most {self.config.head_bytes} bytes")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self.config.loopback and name not in (*LOOPBACK, *self.config.names):
            raise ApiError(403, f"this server is not called {json.dumps(name)} (--name)", code="wrong_host")
        if origin is None or {origin, "*"} & set(self.config.cors):
            return
        if origin.partition("://")[2] != host:
            raise ApiError(403, "pages of other origins may not ask this server (--cors)", code="wrong_origin")

    def _tenant(self, request: Request) -> str | None:
        """Whose key it has; None if there are no keys. Raises `ApiError`."""
        if not self._keys:
            return None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        key = given.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                return name
        said = "the API key is wrong" if key else "this server wants an API key (Authorization: Bearer KEY)"
        raise ApiError(401, said, code="invalid_api_key")

    def _count(self, request: Request, size: int) -> None:
        """Memory that a request takes, or gives back, until it is answered. Raises `ApiError`: all take too much."""
        request.state.body_bytes += size
        self.body_bytes += size
        if size > 0 and self.body_bytes > self.config.bodies_bytes:
            raise ApiError(503, "too much is being sent at once", code="busy", retry_after=1)

    async def body(self, request: Request) -> bytes:
        """The body of a request. Raises `ApiError`: it is too long, or too slow."""
        most, announced = self.config.body_bytes, request.headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
            raise ApiError(413, f"a body is of at most {most} bytes", code="body_too_large")
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self.config.body_s):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise ApiError(413, f"a body is of at most {most} bytes", code="body_too_large")
                    self._count(request, len(part))
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body was not there in {self.config.body_s:.0f} s", code="timeout") from None
        return b"".join(parts)

    async def read(self, request: Request) -> Body:
        """The JSON object of a request. Raises `ApiError`."""
        data = await self.body(request)
        values = 1 + sum(map(data.count, (b",", b"[", b"{")))  # or more: these may stand in texts
        if values > (most := max(1024, self.config.body_bytes // A_VALUE)):
            said = f"a body has at most {most} values (commas and opening brackets are counted)"
            raise ApiError(413, said, code="body_too_large")
        self._count(request, VALUE * values)
        return Body(await aside(parse, data) if len(data) > LONG else parse(data))

    def check_model(self, body: Body) -> None:
        """Raises `ApiError` if it is for another model."""
        model = body.get("model")
        if not isinstance(model, str):
            raise body.refuse("model", "the name of a model")
        if model not in self.config.models:
            said = f"the model {json.dumps(model[:200])} does not exist; here is {self.config.models[0]}"
            raise ApiError(404, said, param="model", code="model_not_found")

    def wanted(self, request: Request, body: Body, **more: Any) -> Wanted:
        """What all kinds of requests ask for. Raises `ApiError`."""
        hello = self.hello()
        known = {"vocab_size": hello.vocab_size, "top": hello.top, "end_tokens": self.config.end_tokens}
        return common(body, tenant=request.state.tenant, **known, **more)

    def hello(self) -> Any:
        """What the engine has said of itself. Raises `ApiError` if it is not there."""
        if not self.backend.there:
            raise self.backend.problem()
        return self.backend.hello

    def room(self, prompt: int, wanted: int | None, default: int, param: str = "messages") -> int:
        """Most tokens of an answer to a prompt of so many. Raises `ApiError`: they exceed the context."""
        context = self.hello().context
        if prompt >= context or (wanted is not None and prompt + wanted > context):
            asked = "" if wanted is None else f" and {wanted} of the answer"
            said = f"the context is of {context} tokens; the prompt has {prompt}{asked}"
            raise ApiError(400, said, param=param, code="context_length_exceeded")
        return min(default, context - prompt) if wanted is None else wanted

    def need_texts(self) -> Texts:
        """The tokenizer. Raises `ApiError` if there is none."""
        if self.texts is None:
            raise invalid(None, "this checkpoint has no tokenizer: prompts are ids (/v1/completions)")
        return self.texts

    def head(self, kind: str) -> dict[str, Any]:
        """Fields of every object that is answered."""
        now, hello = int(time.time()), self.hello()
        print_ = hashlib.sha256(f"{hello.weights_id} {__version__}".encode()).hexdigest()[:12]
        name = f"{kind}-{secrets.token_hex(12)}"
        return {"id": name, "created": now, "model": self.config.models[0], "system_fingerprint": f"fp_{print_}"}

    async def _answer(self, request: Request, asked: Answers) -> Any:
        """Begins, and answers in its form: as a stream, or at once when all is there."""
        generation, form = asked.generation, asked.form
        await watched(request.receive, generation.begin(), generation.abort)
        if asked.stream:
            return EventStream(form.events(), generation.abort, asked.problem or _stream_problem)
        return as_json(await watched(request.receive, form.whole(), generation.abort))

    # Routes

    async def health(self, request: Request) -> Response:
        """Whether the engine lives: if not, the server is to be started anew."""
        if self.backend.hello is None:
            return as_json({"status": "starting"})
        try:
            said = await self.backend.call("health", 5.0)
        except ApiError as error:
            return as_json({"status": "ended", "reason": error.message}, 503)
        return as_json({"status": "ok" if said["live"] else "failed", **said}, 200 if said["live"] else 503)

    async def ready(self, request: Request) -> Response:
        """Whether a request would be answered now."""
        try:
            said = await self.backend.call("health", 5.0)
        except ApiError as error:
            return as_json({"ready": False, "reason": error.message}, 503)
        return as_json({"ready": said["ready"], "reason": said["reason"]}, 200 if said["ready"] else 503)

    async def metrics(self, request: Request) -> Response:
        """The engine's numbers, and this frontend's, for Prometheus."""
        try:
            text = await self.backend.call("metrics", model_name=self.config.models[0])
        except ApiError:
            text = ""
        lines = [
            "# HELP dsv4_http_requests_total Requests answered by this frontend.",
            "# TYPE dsv4_http_requests_total counter",
            *(
                f'dsv4_http_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self.requests.items())
            ),
            "# HELP dsv4_http_samples Answers that are being drawn for this frontend.",
            "# TYPE dsv4_http_samples gauge",
            f"dsv4_http_samples {self.backend.live}",
            "# HELP dsv4_http_engine_up Whether this frontend reaches the engine.",
            "# TYPE dsv4_http_engine_up gauge",
            f"dsv4_http_engine_up {int(self.backend.there)}",
            "",
        ]
        return Response(text + "\n".join(lines), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return as_json({"version": __version__})

    async def models(self, request: Request) -> Response:
        return as_json({"object": "list", "data": [self._model(name) for name in self.config.models]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.check_model(Body({"model": name}))
        return as_json(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        said = {"id": name, "object": "model", "created": self.begun, "owned_by": "dsv4_jax"}
        return said | ({} if self.backend.hello is None else {"max_model_len": self.backend.hello.context})

    async def completions(self, request: Request) -> Any:
        body = await self.read(request)
        self.check_model(body)
        wanted = self.wanted(request, body)
        hello = self.hello()
        wanted.logprobs = body.integer("logprobs", None, 0, hello.top)
        encode = (lambda text: self.need_texts().encode(text)) if _is_text(body.get("prompt")) else _no_text
        ids = await aside(prompts, body, hello.vocab_size, encode)
        echo = body.boolean("echo")
        if echo and (wanted.max_tokens == 0 or wanted.logprobs is not None):
            raise invalid("echo", "echo is of texts alone: neither with logprobs nor with max_tokens 0")
        if len(ids) * wanted.n > 1024:
            raise invalid("n", f"{len(ids)} prompts, {wanted.n} times each, are more than 1024 answers")
        limits = [self.room(len(one), wanted.max_tokens, 16, "prompt") for one in ids]
        texts = self.need_texts() if self.texts is not None or wanted.stops else _NoTexts()
        said = [texts.decode(one) for one in ids] if echo else None
        grammar = await aside(self._grammar, body)
        if grammar is not None:  # whose end is an end
            wanted.stop_tokens = [*dict.fromkeys([*wanted.stop_tokens, *self.config.end_tokens])]
        generation = Generation(self.backend, ids, wanted, limits, grammar=grammar)
        form = Completions(texts, wanted, generation, self.head("cmpl"), said)
        return Answers(generation, wanted.stream, form)

    def _grammar(self, body: Body) -> Any:
        """What a completion's `response_format` allows, as plain data; None: anything. Raises `ApiError`."""
        asked = body.object("response_format")
        if asked is None or asked.get("type") == "text":
            return None
        from ..chat.grammar import format_constraint

        self.need_texts()
        try:
            found = format_constraint(asked.fields)
        except CacheError as error:
            raise invalid("response_format", str(error)) from None
        return None if found is None else list(found)

    async def tokenize(self, request: Request) -> Response:
        body = await self.read(request)
        if body.get("messages") is not None:
            if self.chat is None:
                raise invalid("messages", "this checkpoint has no conversations")
            ids = await aside(self.chat.prompt_of, self, body)
        else:
            text = body.string("prompt", most=self.config.body_bytes)
            if text is None:
                raise body.refuse("prompt", "a text (or messages)")
            ids = await aside(self.need_texts().encode, text)
        said: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": self.hello().context}
        if body.boolean("return_token_strs"):
            said["token_strs"] = [self.need_texts().bytes_of(i).decode("utf-8", "replace") for i in ids]
        return as_json(said)

    async def detokenize(self, request: Request) -> Response:
        body = await self.read(request)
        ids = body.array("tokens", self.hello().context)
        size = self.hello().vocab_size
        if ids is None or not all(type(i) is int and 0 <= i < size for i in ids):
            raise body.refuse("tokens", f"an array of token ids below {size}")
        return as_json({"prompt": self.need_texts().decode(ids)})

    async def events(self, request: Request) -> Any:
        """What the page draws, twice a second."""
        return EventStream(self._watch(), lambda: None, _stream_problem)

    async def _watch(self) -> AsyncIterator[bytes]:
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            if self._poller is None:
                self._poller = asyncio.create_task(self._poll())
            while True:
                await event.wait()
                event.clear()
                yield self._status
        finally:
            self._watchers.discard(event)

    async def _poll(self) -> None:
        """One question to the engine for all that watch."""
        try:
            while self._watchers:
                try:
                    said = await self.backend.call("status", 5.0)
                except ApiError as error:
                    said = {"problem": error.message}
                self._status = b"data: " + msgspec.json.encode(said) + b"\n\n"
                for event in self._watchers:
                    event.set()
                await asyncio.sleep(POLL)
        finally:
            self._poller = None

    def _page(self, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        data = importlib.resources.files("dsv4_jax.serve").joinpath("page", name).read_bytes()

        async def page(request: Request) -> Response:
            headers = {
                "content-security-policy": _POLICY,
                "x-content-type-options": "nosniff",
                "cache-control": "no-cache",
            }
            return Response(data, 200, headers, kind)

        return page


class _NoTexts:
    """In place of a tokenizer: ids have no text."""

    def encode(self, text: str) -> list[int]:
        raise invalid("prompt", "this checkpoint has no tokenizer: prompts are ids")

    def decode(self, ids: Any) -> str:
        return ""

    def bytes_of(self, token: int) -> bytes:
        return b""

    def is_special(self, token: int) -> bool:
        return True


def _no_text(text: str) -> list[int]:
    raise invalid("prompt", "prompt is either texts or ids")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(one, str) for one in value))


def _order(name: str) -> Endpoint:
    async def order(self: Frontend, request: Request) -> Response:
        data = await self.body(request)
        body = Body(parse(data) if data else {})
        arguments: dict[str, Any] = {}
        if name == "resume":
            arguments["keep"] = body.boolean("keep", True)
        if name == "update_weights":
            for field in ("checkpoint", "weights_id"):
                arguments[field] = body.string(field)
                if not arguments[field]:
                    raise body.refuse(field, "a text")
        await self.backend.call(name, 600.0, **arguments)
        return as_json({"status": "done"})

    return order


def _stream_problem(error: ApiError) -> bytes:
    return b"data: " + error.encoded() + b"\n\ndata: [DONE]\n\n"
