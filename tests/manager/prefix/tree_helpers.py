"""Paths of a prefix tree, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dsv4_jax.manager.prefix.node import Node
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree


def digests(name: str, count: int) -> list[bytes]:
    """Of the first `count` blocks of a path. Names with a common start share as many blocks."""
    return [hashlib.md5(f"{name[: i + 1]}:{i}".encode()).digest() for i in range(count)]


def publish_path(tree: PrefixTree, name: str, count: int, blocks: Sequence[int] = ()) -> list[Node]:
    """Writes the blocks of a path; the nodes are referenced once. Blocks that exist are only referenced."""
    names = digests(name, count)
    nodes = tree.acquire(tree.match(names, 10**6).path)
    ids = iter(blocks or range(1 + 1000 * len(tree), 1 + 1000 * len(tree) + count))
    for i in range(len(nodes), count):
        nodes.append(tree.publish(tree.reserve(nodes[-1] if nodes else None, names[i], next(ids))).node)
    return nodes
