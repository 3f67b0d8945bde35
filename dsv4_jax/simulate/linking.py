"""Gives a chat's outputs the tokens by which its next turn goes on, for traces that do not name outputs. Pure Python.

In Mooncake's traces a prompt has hash ids and an output has none: what was generated comes back in the next turn's
prompt, under ids that nothing generated ever had, and no cache finds it. `link_outputs` finds the next turn of a
request and gives its output those ids. What is guessed: that the next prompt is this prompt, the whole output and then
something new. (Servers that drop the reasoning, or write the chat down anew, do not keep to that.)
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from .trace import TraceRequest, TraceRun, is_private

__all__ = ["link_outputs"]


def link_outputs(requests: Sequence[TraceRequest], *, trace_block_tokens: int = 512) -> tuple[list[TraceRequest], int]:
    """The requests, with outputs that go on as the next turns do; and how many outputs that are.

    The next turn of a request is the first later one, of the same tenant, whose prompt begins with all whole blocks of
    this prompt (at least one) and a further whole block, and is long enough to hold the output as well. It is taken
    only if all prompts with a whole block after those go on with the same one: after a prompt that several chats
    share, nobody knows whose output it was. The tokens of a last, partial block become the first ones of the block that
    the next turn has at that place; so do those of every prompt that ends in the same partial block.

    Args:
        requests: earliest first. Outputs that are named already stay as they are.
        trace_block_tokens: of a hash id.
    """
    blocks: dict[object, int] = {}  # (what comes before, a run) -> a number for both together
    paths = [_path(request, trace_block_tokens, blocks) for request in requests]
    pairs = zip(requests, paths, strict=True)
    ends = [path[-1] if len(path) > 1 and is_private(request.output) else -1 for request, path in pairs]
    wanted = set(ends) - {-1}
    follow: dict[int, set[int]] = collections.defaultdict(set)
    later: dict[int, list[int]] = collections.defaultdict(list)
    for index, path in enumerate(paths):
        for before, after in itertools.pairwise(path):
            if before in wanted:
                follow[before].add(after)
                later[before].append(index)
    renamed: dict[TraceRun, TraceRun] = {}  # partial blocks -> what they are the beginning of
    outputs: dict[int, tuple[TraceRun, ...]] = {}
    for index, (request, end) in enumerate(zip(requests, ends, strict=True)):
        if end < 0 or len(follow[end]) != 1:
            continue
        tokens = request.prompt_tokens + request.output_tokens
        turn = next((i for i in later[end] if i > index and requests[i].prompt_tokens >= tokens), None)
        if turn is None:
            continue
        count = len(paths[index]) - 1
        partial, rest = request.prompt[count:], request.prompt_tokens % trace_block_tokens
        ahead = requests[turn].prompt[count:]
        if partial and renamed.setdefault(partial[0], ahead[0]._replace(tokens=rest)).hash != ahead[0].hash:
            continue
        outputs[index] = _cut(ahead, rest, request.output_tokens)
    linked = []
    for index, request in enumerate(requests):
        last = request.prompt[-1]
        prompt = (*request.prompt[:-1], renamed.get(last, last))
        linked.append(dataclasses.replace(request, prompt=prompt, output=outputs.get(index, request.output)))
    return linked, len(outputs)


def _path(request: TraceRequest, block: int, blocks: dict[object, int]) -> list[int]:
    """Numbers of the tenant, and of the prompt up to the end of each of its whole blocks.

    Of the tenant alone if something else than the last run is no whole block.
    """
    path = [blocks.setdefault(("tenant", request.tenant), len(blocks))]
    for i, run in enumerate(request.prompt):
        if run.tokens != block or run.start:
            return path if i == len(request.prompt) - 1 else path[:1]
        path.append(blocks.setdefault((path[-1], run), len(blocks)))
    return path


def _cut(runs: Sequence[TraceRun], first: int, count: int) -> tuple[TraceRun, ...]:
    """`count` tokens from token `first` on."""
    cut = []
    for run in runs:
        taken = min(run.tokens - first, count)
        if taken > 0:
            cut.append(TraceRun(run.hash, taken, run.start + first))
            count -= taken
        first = max(first - run.tokens, 0)
    return tuple(cut)
