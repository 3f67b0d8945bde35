"""Requests of all kinds, most of them wrong, and clients that go at any moment: typed errors, nothing held."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

import pytest

from .serving import Stand, memory_of, wait_for
from .test_clients import SCHEMA, TOOLS

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    2**31,
    2**70,
    1e300,
    "",
    "a",
    "\ufffd\u0000\U0001f600",
    "x" * 5000,
    [],
    [None],
    [[]],
    [1, 2, 3],
    ["a", 1],
    {},
    {"a": {}},
    {"type": "object"},
    {"": None},
]
NUMBERS = (
    "n",
    "seed",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "min_tokens",
    "priority",
)
OTHERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stream_options",
)
MORE = (
    "stop",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "user",
    "cache_salt",
    "messages",
    "prompt",
    "input",
)
MOST = (
    "reasoning_effort",
    "thinking",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "stop_token_ids",
    "system",
    "text",
)
FIELDS = (*NUMBERS, *OTHERS, *MORE, *MOST, "model", "stream", "echo", "metadata", "reasoning", "max_output_tokens")


def good(chance: random.Random, route: str) -> dict[str, Any]:
    """A request that could be answered."""
    words = " ".join(
        chance.choice(("cache", "block", "token", "\u4e16\u754c", "<think>")) for _ in range(chance.randrange(1, 30))
    )
    turns = [{"role": "user", "content": words}]
    body: dict[str, Any] = {"model": "tiny"}
    if route == "/v1/completions":
        body |= {"prompt": chance.choice((words, [chance.randrange(272) for _ in range(chance.randrange(1, 200))]))}
    elif route == "/v1/responses":
        body |= {"input": words, "max_output_tokens": 20}
    elif route == "/detokenize":
        body |= {"tokens": [3, 4, 5]}
    else:
        body |= {"messages": turns}
    if route != "/v1/responses":
        body["max_tokens"] = chance.randrange(1, 40)
    if route == "/v1/chat/completions":
        body |= chance.choice(
            (
                {},
                {"tools": TOOLS},
                {"tools": TOOLS, "tool_choice": "required"},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
                {"thinking": True, "stop": ["a"]},
                {"n": 3, "logprobs": True},
            )
        )
    return body | chance.choice(({}, {"stream": True}, {"temperature": 0.5, "top_p": 0.9}, {"seed": 5}))


def odd(chance: random.Random) -> bytes:
    """A body: of fields with odd values, torn, or nested too deeply."""
    route = chance.choice(ROUTES)
    body = good(chance, route)
    for _ in range(chance.randrange(4)):
        body[chance.choice(FIELDS)] = chance.choice(ODD)
    data = json.dumps(body).encode()
    kind = chance.random()
    if kind < 0.05:
        data = data[: chance.randrange(len(data))]
    elif kind < 0.1:
        place = chance.randrange(len(data))
        data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    elif kind < 0.12:
        data = b'{"model":"tiny","messages":' + b"[" * chance.choice((10, 5000)) + b"]" * 10 + b"}"
    elif kind < 0.14:  # a schema bomb
        schema: Any = {"type": "string", "pattern": "(a|a)*" * 50}
        for _ in range(chance.choice((3, 60))):
            schema = {"type": "object", "properties": {f"k{i}": schema for i in range(chance.choice((1, 2)))}}
            if len(json.dumps(schema)) > 200_000:
                break
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        data = json.dumps(good(chance, "/v1/chat/completions") | {"response_format": form}).encode()
    return route.encode() + b"\n" + data


async def one(port: int, path: str, data: bytes, leaves: float | None) -> tuple[int, bytes]:
    """Asks, and reads the answer, or goes after so many seconds: status 0 then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        cut = len(data) if leaves is None or leaves > 0.001 else len(data) // 2
        writer.write(head.encode() + data[:cut])
        if leaves is not None:
            try:
                async with asyncio.timeout(leaves):
                    await reader.read(-1)
            except TimeoutError:
                pass
            return 0, b""
        answer = await reader.read(-1)
        first, _, rest = answer.partition(b"\r\n\r\n")
        return int(first.split()[1]), rest
    finally:
        writer.transport.abort()


def checked(status: int, body: bytes, path: str) -> None:
    """An answer is one of the API's."""
    assert status in (0, 200, 400, 404, 413, 429), (path, status, body[:500])
    if status >= 400:
        error = json.loads(body)["error"]
        assert error["message"] and error["type"], body


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_fuzz(stand, count):
    chance = random.Random(count)
    (pid,) = stand.server.pids
    before, seen = files_of(pid), set[int]()

    async def worker(bodies: list[bytes]) -> None:
        for body in bodies:
            path, _, data = body.partition(b"\n")
            leaves = chance.choice((0.0, 0.002, 0.05)) if chance.random() < 0.15 else None
            status, said = await one(stand.port, path.decode(), data, leaves)
            checked(status, said, path.decode())
            seen.add(status)

    async def all_of_them() -> None:
        await asyncio.gather(*(worker([odd(chance) for _ in range(count // 12)]) for _ in range(12)))

    asyncio.run(all_of_them())
    assert {0, 200, 400} <= seen
    stand.idle()
    wait_for(lambda: files_of(pid) <= before + 2)
    assert stand.post("/v1/completions", {"model": "tiny", "prompt": "Hi"})[0] == 200


@pytest.mark.parametrize("seconds", [1.0, pytest.param(600.0, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_soak(tmp_path, seconds):
    """Streams and answers, many of them left; in the end no slot, block or file descriptor is held."""
    with Stand(tmp_path, slots=6, blocks=300, queue_tokens=20_000) as stand:
        (pid,), chance = stand.server.pids, random.Random(5)
        assert stand.post("/v1/chat/completions", good(chance, "/v1/chat/completions"))[0] == 200
        files, own, until = files_of(pid), files_of(os.getpid()), time.monotonic() + seconds
        done, marks = dict.fromkeys(("asked", "left", "answered", "refused"), 0), [memory_of(pid)]

        async def user(number: int) -> None:
            mine = random.Random(number)
            while time.monotonic() < until:
                path = mine.choice(ROUTES[:4])
                body = good(mine, path) | {"stream": mine.random() < 0.7}
                leaves = mine.choice((0.0, 0.003, 0.01, 0.05)) if mine.random() < 0.4 else None
                status, said = await one(stand.port, path, json.dumps(body).encode(), leaves)
                checked(status, said, path)
                done["asked"] += 1
                done["left" if not status else "answered" if status == 200 else "refused"] += 1

        async def watch() -> None:
            while time.monotonic() < until:
                await asyncio.sleep(min(10.0, seconds))
                marks.append(memory_of(pid))

        async def all_of_them() -> None:
            await asyncio.gather(watch(), *(user(number) for number in range(24)))

        asyncio.run(all_of_them())
        print(done, f"{max(marks) >> 20} MiB", stand.engine.stats().counts)
        assert min(done["left"], done["answered"]) > 10
        stand.idle()
        wait_for(lambda: files_of(pid) <= files and files_of(os.getpid()) <= own)
        for manager in stand.managers:
            manager.commit()
            manager.check_integrity()
            stats = manager.stats()
            assert stats.slots_used == 0 and stats.cache.pools["device"].private == 0
        middle = marks[len(marks) // 2]
        assert max(marks[len(marks) // 2 :]) < middle + (64 << 20), "memory does not grow"
