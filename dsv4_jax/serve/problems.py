"""Errors as OpenAI's API has them, and as Anthropic's."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ApiError", "invalid", "of_engine"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_ANTHROPIC = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 529: "overloaded_error"}


class ApiError(Exception):
    """What a client is told.

    Attributes:
        status: of HTTP.
        param: the field that it is about.
        code: a name for programs.
        retry_after: seconds after which it may work.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, Any]:
        """As Anthropic writes it."""
        kind = _ANTHROPIC.get(self.status) or _TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def encoded(self, *, messages: bool = False) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.messages_body() if messages else self.body())


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A field has a value that it cannot have."""
    return ApiError(400, message, param=param, code=code)


def of_engine(kind: str, message: str) -> ApiError:
    """What the engine's end of the socket says (`bridge`)."""
    if kind == "full":
        return ApiError(429, f"the server is full: {message}", code="queue_full", retry_after=1)
    if kind == "context":
        return ApiError(400, message, param="messages", code="context_length_exceeded")
    if kind == "request":
        return ApiError(400, message)
    if kind in ("engine", "gone", "starting"):
        return ApiError(
            503, message, code=f"engine_{kind}" if kind != "engine" else "engine_unavailable", retry_after=5
        )
    return ApiError(500, message, code="engine_failure")
