"""Whether a prefix tree's books agree with each other. For tests. Pure Python."""

from __future__ import annotations

import collections

from ...errors import IntegrityError
from .holds import Holds
from .node import SETTLED, TIERS, Node, NodeState, Owner, S, Tier, children_of
from .nodes import NodeTable
from .owners import units_of
from .queues import EvictionQueues

__all__ = ["check_tree"]

_HAS_BLOCK = {S.WRITING, S.DEVICE, S.BACKING_UP, S.OFFLOADING, S.LOADING}
_NEEDS_HOST = {S.BACKING_UP, S.OFFLOADING, S.HOST, S.LOADING, S.PERSISTING, S.FETCHING}
_NO_HOST = {S.WRITING, S.STORAGE}


def check_tree(table: NodeTable, queues: EvictionQueues, holds: Holds) -> None:
    """Recomputes from the nodes alone what the tree keeps. Raises `IntegrityError` naming what differs."""
    nodes = [*table.published.values(), *table.writing]
    known = set(nodes)
    below: dict[Node, list[Node]] = collections.defaultdict(list)
    for node in nodes:
        if node.parent is not None:
            _require(node.parent in known, node, "has a parent that is not in the tree")
            below[node.parent].append(node)
    for digest, node in table.published.items():
        _require(node.digest == digest and node.state is not S.WRITING, node, "is in the wrong dictionary")
    for node in table.writing:
        _require(node.state is S.WRITING and node.refs == 1, node, "is in the wrong dictionary")
    for node in nodes:
        _check_node(table, queues, node, below[node])
    for what, units in (
        ("device block", [n.block for n in nodes]),
        ("slot", [n.snapshot.device for n in nodes if n.snapshot]),
        ("host page", [n.host for n in nodes] + [page for n in nodes if n.snapshot for page in n.snapshot.host]),
    ):
        held = [unit for unit in units if unit]
        if len(set(held)) != len(held):
            raise IntegrityError(f"two nodes hold the same {what}: {sorted(held)}")
    held = collections.Counter(unit for hold in holds.active for unit in (*hold.blocks, *hold.states))
    for node in nodes:
        _require(node.held == held[node], node, f"is held {node.held} times, {held[node]} hold it")
        if (snapshot := node.snapshot) is not None:
            _require(snapshot.held == held[snapshot], node, "has a state that is held by nobody known")
        _require(not node.held or node.host > 0, node, "is held and has no host copy")
    units = [
        [*{unit: pages for hold in holds.active for unit, pages in each(hold).items()}.values()]
        for each in (lambda hold: hold.blocks, lambda hold: hold.states)
    ]
    if (holds.blocks, holds.pages) != (len(units[0]), sum(map(len, units[1]))):
        raise IntegrityError(f"{holds.blocks} blocks and {holds.pages} pages are said to be held, not {units}")
    snapshots = collections.Counter(t for n in nodes if n.snapshot for t in TIERS if n.snapshot.copy(t))
    if table.num_host != sum(n.host > 0 for n in nodes) or any(table.num_snapshots[t] != snapshots[t] for t in TIERS):
        raise IntegrityError(f"miscounted: {table.num_host} host blocks, {table.num_snapshots} snapshots")
    if table.pins != (pins := sum(n.snapshot.pins for n in nodes if n.snapshot is not None)):
        raise IntegrityError(f"miscounted: {table.pins} pins of {pins}")
    counts = collections.Counter(n.state for n in nodes)
    idle = collections.Counter(n.state.tier for n in nodes if not n.refs and n.state in SETTLED)
    for state in NodeState:
        if state is not S.REMOVED and table.counts[state] != counts[state]:
            raise IntegrityError(f"{table.counts[state]} nodes are said to be {state.value}, {counts[state]} are")
    _check_owners(table, nodes)
    for queue in (*queues.blocks.values(), *queues.snapshots.values()):
        if late := queue.late():
            raise IntegrityError(f"{late} are worth less than their queue knows")
    for tier in TIERS:
        if table.idle[tier] != idle[tier]:
            raise IntegrityError(f"{table.idle[tier]} nodes are said to be evictable in {tier.name}, {idle[tier]} are")
    if sum(table.idle_on) != table.idle[Tier.DEVICE] or min(table.idle_on) < 0:
        raise IntegrityError(f"evictable on each rank: {table.idle_on}, together {table.idle[Tier.DEVICE]}")


def _check_owners(table: NodeTable, nodes: list[Node]) -> None:
    used: collections.Counter[tuple[Owner, Tier]] = collections.Counter()
    owners = {}
    for node in nodes:
        if node.owner is not None:
            owners[node.owner] = None
            _require(node.parent is not None or node in node.owner.roots, node, "is no root that its owner knows")
            for tier, units in units_of(node, table.snapshot_blocks).items():
                used[node.owner, tier] += units
    for owner in owners:
        for tier, units in owner.used.items():
            if units != used[owner, tier]:
                raise IntegrityError(f"{owner.name} is said to have {units} units in {tier.name}: {used[owner, tier]}")


def _check_node(table: NodeTable, queues: EvictionQueues, node: Node, children: list[Node]) -> None:
    state, parent, snapshot = node.state, node.parent, node.snapshot
    _require(node.epoch is table.epoch and state is not S.REMOVED, node, "is stale")
    _require(set(children_of(node)) == set(children), node, "lists other children than those that name it")
    tiers = collections.Counter(child.state.tier for child in children)
    counted = (node.children, node.on_device, node.on_host)
    _require(counted == (len(children), tiers[Tier.DEVICE], tiers[Tier.HOST]), node, f"miscounts children: {counted}")
    _require(node.refs >= sum(child.refs for child in children), node, "has fewer references than its children")
    _require(node.depth == (parent.depth + 1 if parent else 0), node, "has the wrong depth")
    if parent is not None:
        _require(parent.state.tier >= state.tier, node, f"has a parent in a lower tier: {parent}")
        _require(parent.last_access >= node.last_access, node, "was accessed after its parent")
        _require(table.level >= parent.level >= node.level, node, "counts its worth from above its parent's level")
        _require(state is S.WRITING or parent.state is not S.WRITING, node, "is published, its parent is not")
    _require((node.block > 0) == (state in _HAS_BLOCK), node, "holds a device block that it should not, or none")
    _require(node.host > 0 or state not in _NEEDS_HOST, node, "has no host block")
    _require(not node.host or state not in _NO_HOST, node, "has a host block")
    _require(node.stored or state not in (S.STORAGE, S.FETCHING), node, "has no copy in storage")
    if snapshot is not None:
        _require(snapshot.tier is not Tier.NONE and state is not S.WRITING, node, "has an impossible snapshot")
        _require(snapshot.node is node and snapshot.reach > 0, node, "has a snapshot that stands elsewhere")
        _require(snapshot.level <= table.level and snapshot.rate > 0, node, "has a snapshot of impossible worth")
    for tier, queue in queues.blocks.items():
        _require(not queue.lacks(node), node, f"is missing from the {tier.name} queue")
    for tier, queue in queues.snapshots.items():
        _require(not queue.lacks(node), node, f"is missing from the {tier.name} snapshots")


def _require(condition: bool, node: Node, problem: str) -> None:
    if not condition:
        raise IntegrityError(f"{node} {problem}")
