"""Bodies of requests, field by field: what they ask for, or an error that names the field.

Fields that nobody knows are ignored, as OpenAI does; known ones that this server cannot do are refused by name.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..checks import MAX_BIASES
from ..engine.prompt import derived_seed
from ..untrusted import brief
from .problems import ApiError, invalid

__all__ = ["Body", "Wanted", "common", "parse", "prompts"]

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters
MAX_PROMPTS = 2048
_UNSUPPORTED = {  # names, and what a value may be that asks for nothing
    "audio": (None,),
    "best_of": (None, 1),
    "ebnf": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "json_schema": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None, False),
    "regex": (None,),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """A body's JSON object. Raises `ApiError`."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"the body is no JSON: {brief(str(error))}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {brief(value)}", code="invalid_json")
    return value


class Body:
    """The fields of a request. null is as good as not there."""

    def __init__(self, fields: Mapping[str, Any], within: str = ""):
        self.fields, self._within = fields, within

    def name(self, field: str) -> str:
        return f"{self._within}.{field}" if self._within else field

    def get(self, field: str) -> Any:
        return self.fields.get(field)

    def refuse(self, field: str, wanted: str) -> ApiError:
        return invalid(self.name(field), f"{self.name(field)} must be {wanted}, got {brief(self.fields.get(field))}")

    def integer(self, field: str, default: Any, low: int, high: int = 2**31 - 1) -> Any:
        value = self.fields.get(field)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, default: Any, low: float, high: float, *, above: bool = False) -> Any:
        value = self.fields.get(field)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not fits or (above and value == low):
            raise self.refuse(field, f"a number from {low:g} to {high:g}" + (f", and not {low:g}" if above else ""))
        return float(value)

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def string(self, field: str, *, most: int = 1 << 16) -> str | None:
        value = self.fields.get(field)
        if value is not None and (not isinstance(value, str) or len(value) > most):
            raise self.refuse(field, f"a string of at most {most} characters")
        return value

    def object(self, field: str) -> Body | None:
        value = self.fields.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return None if value is None else Body(value, self.name(field))

    def array(self, field: str, most: int) -> list[Any] | None:
        value = self.fields.get(field)
        if value is not None and (not isinstance(value, list) or len(value) > most):
            raise self.refuse(field, f"an array of at most {most}")
        return value


@dataclasses.dataclass
class Wanted:
    """What all kinds of requests can ask for.

    Attributes:
        sampling: fields of a `model.Sampling`, seed included.
        max_tokens: None: not said.
        stops: texts that end an answer.
        logprobs: as of `Prompt`.
        mask: as of `Masks.of`, without a grammar.
        stream, usage: whether it is streamed; whether its usage is said at the end of the stream.
        token_ids: whether ids are told, too.
    """

    sampling: dict[str, Any]
    max_tokens: int | None
    n: int
    stops: list[str]
    stop_tokens: list[int]
    logprobs: int | None
    mask: dict[str, Any] | None
    stream: bool
    usage: bool
    priority: int
    tenant: str | None
    salt: str | None
    token_ids: bool

    def samples(self) -> list[dict[str, Any]]:
        """The sampling of each of the n answers, as an engine's prompt of n would have it."""
        seed = self.sampling["seed"]
        return [self.sampling | {"seed": derived_seed(seed, i) if i else seed} for i in range(self.n)]


def common(
    body: Body,
    *,
    vocab_size: int,
    end_tokens: list[int],
    top: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    limit: str = "max_tokens",
    tenant: str | None = None,
) -> Wanted:
    """Reads the fields that all kinds of requests share, but for log-probabilities. Raises `ApiError`.

    Args:
        end_tokens: what ends an answer, unless it asks for other.
        temperature, top_p: if it asks for none.
        limit: the name of another field of most tokens.
        tenant: whose key it has.
    """
    for field, nothing in _UNSUPPORTED.items():
        if body.get(field) not in nothing:
            raise invalid(body.name(field), f"{body.name(field)} is not supported", "unsupported_parameter")
    seed = body.integer("seed", None, -(2**63), 2**64 - 1)
    sampling = {
        "temperature": body.number("temperature", temperature, 0, 2),
        "top_p": body.number("top_p", top_p, 0, 1, above=True),
        "top_k": max(body.integer("top_k", 0, -1), 0),
        "min_p": body.number("min_p", 0.0, 0, 1),
        "repetition_penalty": body.number("repetition_penalty", 1.0, 1e-3, 1e3),
        "presence_penalty": body.number("presence_penalty", 0.0, -2, 2),
        "frequency_penalty": body.number("frequency_penalty", 0.0, -2, 2),
        "seed": secrets.randbits(64) if seed is None else seed & (2**64 - 1),
        "logit_bias": _biases(body, vocab_size),
    }
    if 0 < sampling["temperature"] < 1e-5:
        sampling["temperature"] = 0.0
    low = 0 if body.get("echo") is True else 1
    most = body.integer(limit, None, low)
    if most is None:
        most = body.integer("max_tokens", None, low)
    stops = _stops(body)
    ids = _token_ids(body, "stop_token_ids", vocab_size)
    if not body.boolean("ignore_eos"):
        ids = [*dict.fromkeys([*end_tokens, *ids])]
    least = body.integer("min_tokens", 0, 0)
    stream, usage = body.boolean("stream"), False
    if (options := body.object("stream_options")) is not None:
        if not stream:
            raise invalid("stream_options", "stream_options is for streams: set stream to true")
        usage = options.boolean("include_usage")
    user, salt = body.string("user", most=512), body.string("cache_salt", most=512)
    return Wanted(
        sampling=sampling,
        max_tokens=most,
        n=body.integer("n", 1, 1, MAX_SAMPLES),
        stops=stops,
        stop_tokens=ids,
        logprobs=None,
        mask={"min_tokens": least, "stops": ids} if least else None,
        stream=stream,
        usage=usage,
        priority=body.integer("priority", 0, -(1 << 20), 1 << 20),
        tenant=tenant if user is None else f"{tenant or ''}/{user}",
        salt=salt,
        token_ids=body.boolean("return_token_ids"),
    )


def _stops(body: Body) -> list[str]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    good = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not good or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise body.refuse("stop", f"a string or up to {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH} characters each")
    return stops


def _token_ids(body: Body, field: str, vocab_size: int) -> list[int]:
    ids = body.array(field, 1024) or []
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise body.refuse(field, f"an array of token ids below {vocab_size}")
    return ids


def _biases(body: Body, vocab_size: int) -> list[tuple[int, float]]:
    """What is added to the logits of which tokens, as a `model.Sampling` has it."""
    biases, found = body.object("logit_bias"), dict[int, float]()
    for key, value in (biases.fields if biases is not None else {}).items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not 0 <= token < vocab_size or not number or not -100 <= value <= 100:
            wanted = f"token ids below {vocab_size} and numbers from -100 to 100"
            raise invalid("logit_bias", f"logit_bias must be an object of {wanted}, got {brief({key: value})}")
        if token in found:
            raise invalid("logit_bias", f"logit_bias has token {token} twice")
        found[token] = float(value)
    if len(found) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias has at most {MAX_BIASES} tokens")
    return [*found.items()]


def prompts(body: Body, vocab_size: int, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The prompts of a completion, as ids: of a text, of several, of ids, or of several lists of them."""
    value = body.get("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        raise body.refuse("prompt", f"a text, token ids, or up to {MAX_PROMPTS} of either")
    found = []
    for one in value:
        if isinstance(one, str):
            one = encode(one)
        good = isinstance(one, list) and all(type(token) is int and 0 <= token < vocab_size for token in one)
        if not good or not one:
            wanted = f"a text with a token, or token ids from 0 to {vocab_size - 1}"
            raise invalid("prompt", f"prompt must be {wanted}, got {brief(one)}")
        found.append(one)
    return found
