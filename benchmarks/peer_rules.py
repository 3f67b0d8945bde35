"""What the cache rules of SGLang 0.5.23 and vLLM 0.33.0 find on a trace of V4, as read in these releases. No jax.

Both are replayed request by request, in the order of arrival: nobody is under way at the same time and nothing is held
for live requests, so the whole memory is the cache's. That is at most what they would find. Memory is counted in the
bytes of our layout (their index keys take more). Both count in pages of 256 tokens, of which the last token of a prompt
is never part.

**SGLang**: a tree of pages with two pools. One has the compressed entries, the other one the windows, with the
compressors' states: a tenth as many pages (`swa_full_tokens_ratio` 0.1), of which each serves a hit that ends with it.
What leaves the window while a request runs is given back, so it leaves the windows at the ends of its chunks of 8,192
tokens, of its prompt and of its output. They leave (a tombstone then) the least recently used first, of one request
those nearest to the root; entries from the leaves on, the least recently used first, their windows with them.

**vLLM**: one pool for all. A request leaves windows and states at the last page of its prompt and of its output
(`retention interval` 0: only semantic checkpoints), a hit ends at one. What is freed leaves in the order in which it
was freed, of one request from the end on.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import snapshot_record
from dsv4_jax.simulate.tokens import prefix_names, run_tokens
from dsv4_jax.simulate.trace import TraceRequest

__all__ = ["PEERS", "sglang", "vllm"]

PAGE = 256
CHUNK = 8192 // PAGE
WINDOW_SHARE = 0.1


class _Turn(NamedTuple):
    names: list[int]  # of all whole pages
    asked: int  # leading ones that may be found
    prompt: int  # those of the prompt


def _turns(trace: Iterable[TraceRequest], layout: CacheLayout) -> Iterable[_Turn]:
    for request in trace:
        ids = run_tokens((*request.prompt, *request.output), layout.cfg.vocab_size)
        names = prefix_names(ids[:-1] if request.output else ids, PAGE, request.tenant)
        yield _Turn(names, (request.prompt_tokens - 1) // PAGE, request.prompt_tokens // PAGE)


def sglang(trace: Iterable[TraceRequest], layout: CacheLayout, memory: int) -> int:
    """Returns the prompt tokens that SGLang's rules find in so many bytes."""
    entries = layout.bytes_per_token * PAGE
    states = layout.bytes_per_slot - layout.window_bytes_per_request
    windows = layout.window_bytes_per_request * PAGE / layout.cfg.sliding_window + states
    pages = int(memory / (entries + WINDOW_SHARE * windows))
    return _sglang(_turns(trace, layout), pages, int(WINDOW_SHARE * pages)) * PAGE


def _sglang(turns: Iterable[_Turn], num_pages: int, num_windows: int) -> int:
    full: collections.OrderedDict[int, None] = collections.OrderedDict()  # the least recently used first
    near: collections.OrderedDict[int, None] = collections.OrderedDict()
    found = 0
    for names, asked, prompt in turns:
        hit = 0
        for i, name in enumerate(names[:asked]):
            if name not in full:
                break
            if name in near:
                hit = i + 1
        found += hit
        ends = {*range(hit + CHUNK, prompt, CHUNK), prompt, len(names)}
        for name in reversed(names):  # the first page last: so leaves leave before what they stand on
            full[name] = None
            full.move_to_end(name)
        for i, name in enumerate(names, 1):  # of this path the deepest is the most recent
            if name in near or (i > hit and i in ends):
                near[name] = None
                near.move_to_end(name)
        while len(near) > num_windows:
            near.popitem(last=False)
        while len(full) > num_pages:
            near.pop(full.popitem(last=False)[0], None)
    return found


def vllm(trace: Iterable[TraceRequest], layout: CacheLayout, memory: int) -> int:
    """Returns the prompt tokens that vLLM's rules find in so many bytes."""
    return _vllm(_turns(trace, layout), layout.bytes_per_token * PAGE, snapshot_record(layout).bytes, memory) * PAGE


def _vllm(turns: Iterable[_Turn], page: float, state: float, memory: float) -> int:
    kept: collections.OrderedDict[tuple[int, bool], float] = collections.OrderedDict()  # (name, is a state) -> bytes
    used, found = 0.0, 0
    for names, asked, prompt in turns:
        hit = 0
        for i, name in enumerate(names[:asked]):
            if (name, False) not in kept:
                break
            if (name, True) in kept:
                hit = i + 1
        found += hit
        ends = {hit, asked, prompt, len(names)}
        for i in range(len(names), 0, -1):
            units = [((names[i - 1], False), page)]
            if i in ends or (names[i - 1], True) in kept:
                units.append(((names[i - 1], True), state))
            for unit, size in units:
                if unit not in kept:
                    used += size
                elif unit[1] and i not in ends:
                    continue  # nobody has used it
                kept[unit] = size
                kept.move_to_end(unit)
        while used > memory:
            used -= kept.popitem(last=False)[1]
    return found


PEERS = {"SGLang's rules": sglang, "vLLM's rules": vllm}
