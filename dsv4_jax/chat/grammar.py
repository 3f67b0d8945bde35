"""What an answer may be, as masks of tokens: JSON of a schema, a regular expression, calls of declared tools.

`constraint` makes plain data of a request, wherever that is read; `Grammars`, beside the engine, makes of it what fills
`engine.Prompt.mask`. Grammars are llguidance's. A mask begins behind the reasoning.
"""

from __future__ import annotations

import collections
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, RequestError
from ..text import Tokenizer
from ..untrusted import brief
from .encoding import DSML, END, THINK, ChatPrompt, tool_functions

__all__ = ["Constraint", "Grammars", "Mask", "constraint", "format_constraint"]

_MAX_TEXT = 1 << 17  # characters of a schema or expression, and of all schemas of a request
_MAX_DEPTH = 48
_MAX_MULTIPLES = 10_000  # states of an automaton that counts
_MATCHERS = 64  # that a mask keeps: of its samples
_FULL = np.uint32(0xFFFFFFFF)
# Some room to write JSON prettily, not for ever.
_PRETTY = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,64}", "coerce_one_of": True}
# As the values of earlier calls are encoded, so that what was drawn is found in the cache.
_CANONICAL = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
}
_ANY_TEXT, _NEWLINE = r"(?s:.*)", r'"\n"'


class Constraint(NamedTuple):
    """What an answer may be. Plain data.

    Attributes:
        grammar: llguidance's, of the answer behind its reasoning.
        thinking: the answer begins with reasoning, which is free; it must end.
    """

    grammar: str
    thinking: bool


def constraint(
    prompt: ChatPrompt,
    tokenizer: Tokenizer,
    *,
    tool_choice: Any = None,
    response_format: Any = None,
    parallel_tool_calls: bool = True,
) -> Constraint | None:
    """What a request asks its answer to be; None if that is free.

    Schemas of `response_format` and of strict tools hold wholly, but for `format` of a tool's text; of other tools
    their names, keys, types and what else can be held. Calls are held to their syntax if one is required, a tool is
    strict, or an answer without calls is held to `response_format`.

    Args:
        prompt: of the same request.
        tool_choice, response_format, parallel_tool_calls: as OpenAI's.

    Raises:
        RequestError: a schema or expression is none, cannot be held, or is too large; within a bounded time.
        CheckpointError: the extra `serve` is not installed, or the tokenizer lacks the mark of calls.
    """
    required = tool_choice == "required" or isinstance(tool_choice, Mapping)
    llguidance = _package()
    if prompt.tools and (required or any(_is_strict(tool) for tool in prompt.tools)):
        grammar = _calls(prompt, tokenizer.mark(DSML), tool_choice, required, parallel_tool_calls)
        grammar, where = llguidance.LLMatcher.grammar_from_lark(grammar), "tools"
    else:
        grammar, where = _format_grammar(response_format, llguidance), "response_format"
        if grammar is None:
            return None
        if prompt.tools:
            grammar = _calls(prompt, tokenizer.mark(DSML), None, False, parallel_tool_calls, _rule(grammar))
            grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
    _raise(llguidance.LLMatcher.validate_grammar(grammar, limits=_limits(llguidance)), where)
    return Constraint(grammar, prompt.start == "reasoning")


def format_constraint(response_format: Any, *, thinking: bool = False) -> Constraint | None:
    """As `constraint`, of an answer to a prompt that is no conversation, and so without tools."""
    llguidance = _package()
    grammar = _format_grammar(response_format, llguidance)
    if grammar is None:
        return None
    _raise(llguidance.LLMatcher.validate_grammar(grammar, limits=_limits(llguidance)), "response_format")
    return Constraint(grammar, thinking)


def _format_grammar(response_format: Any, llguidance: Any) -> str | None:
    """The grammar of a `response_format`, not yet validated; None: any text. Raises `RequestError`."""
    kind = response_format.get("type", "text") if isinstance(response_format, Mapping) else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_grammar({"type": "object"})
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema", {"type": "object"}) if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise RequestError(f"response_format.json_schema.schema must be an object, got {brief(schema)}")
        _check_schema(schema, "response_format")
        return _json_grammar(schema)
    if kind == "regex":
        pattern = response_format.get("regex", response_format.get("pattern"))
        if not isinstance(pattern, str) or len(pattern) > _MAX_TEXT:
            raise RequestError(f"response_format.regex must be a text of at most {_MAX_TEXT} characters")
        return llguidance.LLMatcher.grammar_from_regex(pattern)
    raise RequestError(f"response_format.type: there is no {brief(kind)}")


class Grammars:
    """Makes masks for one tokenizer. From any thread.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: of the model.

    Raises:
        CheckpointError: the extra `serve` is not installed, or llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._package = _package()
        source = json.loads(tokenizer.source)
        for added in source["added_tokens"]:  # or their texts would be allowed where texts are
            added["special"] = True
        end = tokenizer.mark(END)
        try:
            self._tokenizer = self._package.LLTokenizer(json.dumps(source), n_vocab=vocab_size, eos_token=end)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"masks cannot be made for the tokenizer: {_first_line(str(error))}") from None
        self._words = -(-vocab_size // 32)
        self._close = tokenizer.mark(THINK[1])
        self._never = [end, tokenizer.mark(DSML)]  # while it reasons

    def mask(self, asked: Constraint) -> Mask:
        """Returns what fills an engine's row with the tokens that may come next; it serves all samples of a prompt.

        Raises:
            RequestError: the grammar is none, or too large.
        """
        matcher = self._package.LLMatcher(self._tokenizer, asked.grammar, log_level=0, limits=_limits(self._package))
        _raise(matcher.get_error())
        free = np.full(self._words, _FULL)
        for token in self._never:
            free[token // 32] &= ~np.uint32(1 << token % 32)
        return Mask(matcher, self._close if asked.thinking else None, free)


class Mask:
    """`engine.Prompt.mask` of a `Constraint`: called with the ids so far and the row to fill."""

    def __init__(self, matcher: Any, close: int | None, free: np.ndarray):
        self._first, self._close, self._free = matcher, close, free
        self._used = collections.deque[tuple[list[int], Any]](maxlen=_MATCHERS)  # what each has consumed

    def __call__(self, ids: Sequence[int], row: np.ndarray) -> None:
        """Fills the row. Raises `RequestError` if the ids are none of the grammar's, or it grew too large."""
        ids = list(ids)
        if self._close is not None:
            if self._close not in ids:
                row[:] = self._free[: len(row)]
                return
            ids = ids[ids.index(self._close) + 1 :]
        known = max(
            (each for each in self._used if ids[: len(each[0])] == each[0]), key=lambda each: len(each[0]), default=None
        )
        if known is None:
            known = ([], self._first.deep_copy())
        else:
            self._used.remove(known)
        consumed, matcher = known
        if len(ids) > len(consumed) and not matcher.consume_tokens(ids[len(consumed) :]):
            raise RequestError(f"the answer has left its grammar: {_first_line(matcher.get_error())}")
        words = np.zeros(len(row), np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _raise(matcher.get_error())
        row[:] = words.view(np.uint32)
        self._used.append((ids, matcher))


def _package() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise CheckpointError("grammars need the extra serve (pip install 'dsv4_jax[serve]')") from None


def _limits(package: Any) -> Any:
    return package.LLParserLimits(
        initial_lexer_fuel=1_000_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
    )


def _first_line(text: str) -> str:
    return brief(" ".join(text.split())[:300]).strip("'\"")


def _raise(problem: str, where: str = "mask") -> None:
    if problem and not problem.startswith("WARNING"):
        raise RequestError(f"{where}: the schema or expression cannot be held: {_first_line(problem)}")


def _json_grammar(schema: Mapping[str, Any]) -> str:
    return _package().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_PRETTY)


def _rule(grammar: str) -> str:
    """A grammar of one schema or expression as the rule `answer` of a larger one."""
    (one,) = json.loads(grammar)["grammars"]
    if one["json_schema"] is not None:
        return f"answer: %json {json.dumps(one['json_schema'], ensure_ascii=False)}"
    return f"answer: {one['lark_grammar'].removeprefix('start: ')}"


def _check_schema(schema: Any, where: str) -> None:
    """Raises `RequestError` if a schema is larger than what is compiled in a bounded time."""
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: the schema is no JSON: {brief(str(error))}") from None
    if size > _MAX_TEXT:
        raise RequestError(f"{where}: a schema of {size} characters is too large, {_MAX_TEXT} are taken")
    multiples, left = 0.0, [(schema, 1)]
    while left:
        value, depth = left.pop()
        if depth > _MAX_DEPTH:
            raise RequestError(f"{where}: the schema is nested deeper than {_MAX_DEPTH}")
        if isinstance(value, Mapping):
            step = value.get("multipleOf")
            if isinstance(step, int | float) and step:
                multiples += float(re.sub(r"[-.]|e.*", "", str(step)) or 0)
            left += ((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            left += ((inner, depth + 1) for inner in value)
    if multiples > _MAX_MULTIPLES:
        raise RequestError(f"{where}: multipleOf adds up to more than {_MAX_MULTIPLES}")


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


# Calls


def _calls(
    prompt: ChatPrompt, mark: int, choice: Any, required: bool, parallel: bool, answer: str | None = None
) -> str:
    """The grammar of an answer that may, or must, have calls. `answer`: the rule of one without (default: any)."""
    dsml = f"<[{mark}]>"
    before = " " if prompt.model == "v4.1" else ""
    block = "calls" if before else "tool_calls"
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    total = 0
    rules, names = [], []
    for i, tool in enumerate(prompt.tools):
        ((name, schema),) = tool_functions([tool])
        if named not in (None, name):
            continue
        _check_schema(schema, f"the tool {brief(name)}")
        total += len(json.dumps(schema))
        names.append(f"call{i}")
        rules += _Tool(i, name, schema, strict=_is_strict(tool), dsml=dsml, before=before).rules()
    if total > _MAX_TEXT:
        raise RequestError(f"tools: schemas of {total} characters are too large, {_MAX_TEXT} are taken")
    more = '("\\n" call)*' if parallel else ""
    rules.append(f'calls: call {more} "\\n</" {dsml} "{before}{block}>"')
    rules.append(f"call: {' | '.join(names)}")
    opened = f'{dsml} "{before}{block}>\\n" calls'
    if prompt.start == "calls":
        start = "calls"
    elif required:
        start = f'"\\n\\n<" {opened}'
    elif answer is not None:
        start = f'answer | "\\n\\n<" {opened}'
        rules.append(answer)
    else:
        start = f"PLAIN | HEAD {opened}"
        rules += [f"PLAIN: /{_ANY_TEXT}/", f"HEAD: /({_ANY_TEXT}\\n\\n)?</"]
    return "\n".join([f"start: {start}", *rules]) + "\n"


class _Tool:
    """The rules of one tool's calls."""

    def __init__(self, index: int, name: str, schema: Any, *, strict: bool, dsml: str, before: str):
        self._index, self._name, self._strict, self._dsml, self._before = index, name, strict, dsml, before
        self._schema = schema if isinstance(schema, Mapping) else {}
        self._rules: list[str] = []
        self._count = 0

    def rules(self) -> list[str]:
        known = self._schema.get("properties")
        if known is not None and not isinstance(known, Mapping):
            self._refuse("properties is no object")
        required = self._schema.get("required", ())
        needed = set(required if isinstance(required, Sequence) else ())
        if self._strict:
            needed = set(known or ())
            beside = set(self._schema) & {"patternProperties", "allOf", "anyOf", "oneOf", "not", "if", "$ref"}
            if beside:
                self._refuse(f"{', '.join(sorted(beside))} beside its properties")
        if known or self._strict:
            each = (
                f"({self._parameter(_literal(key), schema)} {_NEWLINE}){'' if key in needed else '?'}"
                for key, schema in (known or {}).items()
            )
            inside = " ".join(each)
        else:
            key = self._rule("KEY", '/[^"<>\\n]+/', terminal=True)
            inside = f"({self._parameter(key, True)} {_NEWLINE})*"
        head = _literal(f'{self._before}invoke name="{self._name}">\n')
        call = f'"<" {self._dsml} {head} {inside} "</" {self._dsml} "{self._before}invoke>"'
        return [f"call{self._index}: {call}", *self._rules]

    def _parameter(self, key: str, schema: Any) -> str:
        """The rule of a parameter of this key."""
        texts, others = self._kinds(schema, 0)
        forms = []
        for text in texts:
            value = self._rule("TEXT", f"/{text}<\\//", terminal=True)
            forms.append(f'"\\" string=\\"true\\">" {value}')
        if others:
            whole = others[0] if len(others) == 1 else {"anyOf": others}
            whole = self._with_definitions(whole) | {"x-guidance": _CANONICAL | {"lenient": not self._strict}}
            value = self._rule("json", f"%json {json.dumps(whole, ensure_ascii=False)}")
            forms.append(f'"\\" string=\\"false\\">" {value} "</"')
        if not forms:
            self._refuse("a parameter can have no value")
        head = _literal(f'{self._before}parameter name="')
        return self._rule(
            "par", f'"<" {self._dsml} {head} {key} ({" | ".join(forms)}) {self._dsml} "{self._before}parameter>"'
        )

    def _rule(self, kind: str, body: str, *, terminal: bool = False) -> str:
        name = f"{kind}_{self._index}_{self._count}"
        name = name.upper() if terminal else name
        self._count += 1
        self._rules.append(f"{name}: {body}")
        return name

    def _with_definitions(self, schema: Any) -> dict[str, Any]:
        more = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        return (dict(schema) if isinstance(schema, Mapping) else {}) | more

    def _kinds(self, schema: Any, depth: int) -> tuple[list[str], list[Any]]:
        """The texts that a value may be, as expressions, and schemas of what else it may be."""
        if schema is True or schema is None or schema == {}:
            return [_ANY_TEXT], [{"type": ["object", "array", "number", "boolean", "null"]}]
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            self._refuse("a parameter's schema is no object")
        if "$ref" in schema:
            return self._kinds(self._resolved(schema["$ref"]), depth + 1)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list) or not values:
                self._refuse("enum is no list of values")
            texts = [_escaped(value) for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return ["(" + "|".join(texts) + ")"] if texts else [], [{"enum": others}] if others else []
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                base = {key: value for key, value in schema.items() if key not in (union, "$defs", "definitions")}
                told = [key for key in base if key not in ("description", "title", "default", "type")]
                if told and self._strict:
                    self._refuse(f"{', '.join(told)} beside {union}")
                found = [self._kinds(inner, depth + 1) for inner in schema[union]]
                texts = list(dict.fromkeys(text for each in found for text in each[0]))
                return texts, [other for each in found for other in each[1]]
        if "allOf" in schema:
            inner = schema["allOf"]
            if isinstance(inner, list) and len(inner) == 1:
                return self._kinds(inner[0], depth + 1)
            if self._strict:
                self._refuse("allOf of a parameter")
            return self._kinds(True, depth)
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds is None:
            keys = set(schema)
            if keys & {"properties", "required", "additionalProperties"}:
                kinds = ["object"]
            elif "items" in keys:
                kinds = ["array"]
            else:
                kinds = ["string", "object", "array", "number", "boolean", "null"]
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            self._refuse(f"type is {brief(kinds)}")
        others = [kind for kind in kinds if kind != "string"]
        texts = [self._text(schema)] if "string" in kinds else []
        return texts, [{**schema, "type": others[0] if len(others) == 1 else others}] if others else []

    def _text(self, schema: Mapping[str, Any]) -> str:
        """The expression of a text."""
        pattern, low, high = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
        bounds = [bound for bound in (low, high) if bound is not None]
        if not all(isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0 for bound in bounds):
            self._refuse("minLength and maxLength must be integers")
        if pattern is None:
            if high is None and not low:
                return _ANY_TEXT
            if max(bounds) > 10_000:
                if self._strict:
                    self._refuse("a text with a bound of more than 10000")
                return _ANY_TEXT
            return f"(?s:.{{{low},{'' if high is None else high}}})"
        if not isinstance(pattern, str):
            self._refuse(f"pattern is {brief(pattern)}")
        if self._strict and (low or high is not None):
            self._refuse("a pattern beside bounds of the length")
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begins : len(pattern) - ends]
        if (begins or ends) and "|" in inner and not _grouped(inner):
            if self._strict:
                self._refuse("an anchored pattern with alternatives; put them into a group: ^(a|b)$")
            return _ANY_TEXT
        inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner).replace("\n", "\\n")
        return f"{'' if begins else _ANY_TEXT}(?:{inner}){'' if ends else _ANY_TEXT}"

    def _resolved(self, ref: Any) -> Any:
        value: Any = self._schema
        if not isinstance(ref, str) or not ref.startswith("#/"):
            self._refuse(f"$ref {brief(ref)} is not within the schema")
        for part in ref[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(value, Mapping) or part not in value:
                self._refuse(f"$ref {brief(ref)} is not within the schema")
            value = value[part]
        return value

    def _refuse(self, problem: str) -> Any:
        raise RequestError(f"the tool {brief(self._name)}: {problem}")


def _grouped(pattern: str) -> bool:
    """Whether a pattern is one group, so that its alternatives are within."""
    depth = 0
    for i, char in enumerate(re.sub(r"\\.", "..", pattern)):
        depth += (char == "(") - (char == ")")
        if not depth and i < len(pattern) - 1:
            return False
    return depth == 0


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """An expression that is this text alone."""
    return "".join(
        char if char.isalnum() else {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, f"\\x{{{ord(char):x}}}")
        for char in text
    )
