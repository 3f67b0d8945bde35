"""A node of the prefix tree: one block, where its bytes are, and which moves between tiers are allowed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator

from ...events import Tier

__all__ = [
    "ABORTS",
    "COMPLETES",
    "MATCHABLE",
    "SETTLED",
    "TIERS",
    "TRANSITIONS",
    "Node",
    "NodeState",
    "Owner",
    "Pages",
    "S",
    "Snapshot",
    "T",
    "Tier",
    "Unit",
    "children_of",
    "copies",
    "count_child",
    "link",
    "subtree_of",
    "unlink",
]


class NodeState(enum.Enum):
    """Where a block's bytes are. Names in -ING are moves or copies under way: neither evicted nor moved again.

    A state counts as the lower tier of a move's two ends (`tier`): what a child may rely on.
    """

    WRITING = "writing", Tier.DEVICE  # a device block is reserved, its bytes are not there yet; never matched
    DEVICE = "device", Tier.DEVICE
    BACKING_UP = "backing_up", Tier.DEVICE  # copy to host, device bytes stay valid
    OFFLOADING = "offloading", Tier.HOST  # move to host
    HOST = "host", Tier.HOST
    LOADING = "loading", Tier.HOST  # copy to device
    PERSISTING = "persisting", Tier.HOST  # copy to storage, host bytes stay valid
    STORAGE = "storage", Tier.STORAGE
    FETCHING = "fetching", Tier.STORAGE  # copy to host
    REMOVED = "removed", Tier.NONE

    tier: Tier

    def __new__(cls, label: str, tier: Tier) -> NodeState:
        state = object.__new__(cls)
        state._value_ = label
        state.tier = tier
        return state

    __hash__ = object.__hash__  # members are singletons; the inherited one is written in Python and slow


class S:
    """The members of `NodeState`, found ten times as fast: an Enum class of Python 3.11 takes 0.2 us to look one up."""

    WRITING = NodeState.WRITING
    DEVICE = NodeState.DEVICE
    BACKING_UP = NodeState.BACKING_UP
    OFFLOADING = NodeState.OFFLOADING
    HOST = NodeState.HOST
    LOADING = NodeState.LOADING
    PERSISTING = NodeState.PERSISTING
    STORAGE = NodeState.STORAGE
    FETCHING = NodeState.FETCHING
    REMOVED = NodeState.REMOVED


class T:
    """Short names of the members of `Tier`."""

    NONE = Tier.NONE
    STORAGE = Tier.STORAGE
    HOST = Tier.HOST
    DEVICE = Tier.DEVICE


Pages = tuple[int, ...]
Unit = int | Pages

TIERS = (T.DEVICE, T.HOST, T.STORAGE)
_SHARED = (T.DEVICE, T.HOST)  # tiers of which namespaces may have shares

TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    S.WRITING: frozenset({S.DEVICE, S.REMOVED}),  # publish, abort
    # Down at once where a copy is below already; up at once (adoption) when a request has computed the block again.
    S.DEVICE: frozenset({S.BACKING_UP, S.OFFLOADING, S.HOST, S.STORAGE, S.REMOVED}),
    S.BACKING_UP: frozenset({S.DEVICE}),  # completed or aborted
    S.OFFLOADING: frozenset({S.HOST, S.DEVICE, S.REMOVED}),  # completed, aborted, lost
    S.HOST: frozenset({S.LOADING, S.PERSISTING, S.DEVICE, S.STORAGE, S.REMOVED}),
    S.LOADING: frozenset({S.DEVICE, S.HOST, S.REMOVED}),
    S.PERSISTING: frozenset({S.HOST}),
    S.STORAGE: frozenset({S.FETCHING, S.DEVICE, S.REMOVED}),
    S.FETCHING: frozenset({S.HOST, S.STORAGE, S.REMOVED}),
    S.REMOVED: frozenset(),
}

# Where a move ends when it succeeds, and where when it is called off.
COMPLETES = {
    S.BACKING_UP: S.DEVICE,
    S.OFFLOADING: S.HOST,
    S.LOADING: S.DEVICE,
    S.PERSISTING: S.HOST,
    S.FETCHING: S.HOST,
}
ABORTS = {
    S.WRITING: S.REMOVED,
    S.BACKING_UP: S.DEVICE,
    S.OFFLOADING: S.DEVICE,
    S.LOADING: S.HOST,
    S.PERSISTING: S.HOST,
    S.FETCHING: S.STORAGE,
}

# States with bytes that a request can use, and that stay until it has taken a reference.
MATCHABLE = frozenset({S.DEVICE, S.BACKING_UP, S.HOST, S.PERSISTING, S.STORAGE})
SETTLED = frozenset({S.DEVICE, S.HOST, S.STORAGE})


@dataclasses.dataclass(eq=False, slots=True)
class Snapshot:
    """The window and compressor state at the end of a node's block: where its copies are.

    Attributes:
        node: whose block ends there.
        above: the snapshot above it when it was taken; see `next_above`.
        device: id of its slot, 0 for none.
        host: its pages in order, none for no copy.
        stored: whether storage has a copy.
        pins: copies of it under way; it is not dropped meanwhile.
        held: who wants its host copy to stay (see holds.py).
        last_used: clock of the last hit that ended here, or of when it came to the device or the host.
        hits: those hits.
        kind, rate, level: what it is worth is counted from these (see worth.py).
    """

    node: Node
    above: Snapshot | None = None
    device: int = 0
    host: Pages = ()
    stored: bool = False
    pins: int = 0
    held: int = 0
    last_used: int = 0
    hits: int = 0
    kind: int = 0
    rate: float = 0
    level: int = 0

    @property
    def next_above(self) -> Snapshot | None:
        """The next one on the path from the root that is still there. (One taken between them later is not seen.)"""
        above = self.above
        while above is not None and not (above.device or above.host or above.stored):
            above = above.above
        self.above = above
        return above

    @property
    def reach(self) -> int:
        """Blocks that a hit has to compute again if it ends at the next one above instead of here."""
        above = self.next_above
        return self.node.depth - (above.node.depth if above is not None else -1)

    def copy(self, tier: Tier) -> Unit:
        """Where the copy in this tier is: slot, pages, or 1 in storage; 0 or no pages for none."""
        if tier is T.DEVICE:
            return self.device
        return self.host if tier is T.HOST else int(self.stored)

    def set_copy(self, tier: Tier, unit: Unit) -> Unit:
        """Sets where the copy in this tier is (see `copy`). Returns where it was."""
        old = self.copy(tier)
        if tier is T.HOST:
            self.host = unit if isinstance(unit, tuple) else ()
        elif tier is T.DEVICE:
            assert isinstance(unit, int)
            self.device = unit
        else:
            self.stored = bool(unit)
        return old

    @property
    def tier(self) -> Tier:
        """The nearest tier that has a copy."""
        return T.DEVICE if self.device else T.HOST if self.host else T.STORAGE if self.stored else T.NONE


@dataclasses.dataclass(eq=False, slots=True)
class Owner:
    """A namespace that has units.

    Attributes:
        name: of the namespace.
        share: of the units of a tier, in (0, 1].
        used: its units in each tier, in blocks.
        over: in which tiers it has more than its share.
        evicted: blocks and states of it that have left a tier because it had.
        roots: its first blocks.
    """

    name: Hashable
    share: float
    used: dict[Tier, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(_SHARED, 0))
    over: dict[Tier, bool] = dataclasses.field(default_factory=lambda: dict.fromkeys(_SHARED, False))
    evicted: dict[Tier, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(_SHARED, 0))
    roots: dict[Node, None] = dataclasses.field(default_factory=dict)


class Node:
    """One block of a prefix. Made and changed by `PrefixTree` only; read freely.

    Attributes:
        digest: chained digest: names the block and everything before it.
        parent: the node of the block before, None for a first block.
        depth: index of its block in its path.
        number: in order of creation, unique in its tree.
        state: see `NodeState`.
        block, host: the device block and the host page held, 0 for none.
        stored: whether storage has a copy.
        refs: live requests that list the node.
        held: who wants its host copy to stay (see holds.py).
        hits: requests that have matched it.
        last_access: clock when a path with it was last referenced or released; never later than its parent's.
        level: worth that counts as none when it was last referenced (see worth.py); never above its parent's.
        snapshot: state at the end of the block, or None.
        owner: whose it is, where namespaces have shares (see owners.py).
        children: how many nodes have this parent; `on_device`, `on_host`: those of them in that tier.
    """

    __slots__ = (
        "block",
        "children",
        "depth",
        "digest",
        "epoch",
        "first_child",
        "held",
        "hits",
        "host",
        "last_access",
        "level",
        "next",
        "number",
        "on_device",
        "on_host",
        "owner",
        "parent",
        "previous",
        "queued",
        "refs",
        "snapshot",
        "state",
        "stored",
    )

    def __init__(self, digest: bytes, parent: Node | None, number: int, epoch: object, state: NodeState):
        self.digest, self.parent, self.number, self.epoch, self.state = digest, parent, number, epoch, state
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.block = self.host = 0
        self.stored = False
        self.owner: Owner | None = None if parent is None else parent.owner
        self.refs = self.held = self.hits = self.last_access = self.level = 0
        self.snapshot: Snapshot | None = None
        self.children = self.on_device = self.on_host = 0
        self.queued = 0  # which lists name it: bits of `queues.Listed`
        self.first_child: Node | None = None
        self.next: Node | None = None
        self.previous: Node | None = None

    @property
    def has_near_state(self) -> bool:
        """Whether a hit can end here: a copy in storage alone has to be fetched first, which may never happen."""
        return self.snapshot is not None and self.snapshot.tier >= T.HOST

    def __repr__(self) -> str:
        where = f"block={self.block}, host={self.host}, refs={self.refs}"
        return f"Node({self.digest.hex()[:8]}, depth={self.depth}, {self.state.value}, {where})"


def copies(node: Node) -> list[Tier]:
    """The tiers that have the node's bytes now."""
    state, tiers = node.state, []
    if state is S.DEVICE or state is S.BACKING_UP or state is S.OFFLOADING:
        tiers.append(T.DEVICE)
    if node.host and state not in (S.BACKING_UP, S.OFFLOADING, S.FETCHING):
        tiers.append(T.HOST)
    if node.stored:
        tiers.append(T.STORAGE)
    return tiers


def count_child(parent: Node, tier: Tier, change: int) -> None:
    if tier is T.DEVICE:
        parent.on_device += change
    elif tier is T.HOST:
        parent.on_host += change


def link(node: Node) -> None:
    """Puts the node into its parent's list of children, first."""
    parent = node.parent
    if parent is None:
        return
    node.previous, node.next = None, parent.first_child
    if parent.first_child is not None:
        parent.first_child.previous = node
    parent.first_child = node
    parent.children += 1
    count_child(parent, node.state.tier, 1)


def unlink(node: Node) -> None:
    parent = node.parent
    if parent is None:
        return
    if node.previous is not None:
        node.previous.next = node.next
    else:
        parent.first_child = node.next
    if node.next is not None:
        node.next.previous = node.previous
    node.previous = node.next = None
    parent.children -= 1
    count_child(parent, node.state.tier, -1)


def children_of(node: Node) -> Iterator[Node]:
    child = node.first_child
    while child is not None:
        yield child
        child = child.next


def subtree_of(node: Node) -> list[Node]:
    """Returns the node and everything below it, parents first."""
    found = [node]
    for n in found:  # grows while it is walked
        found.extend(children_of(n))
    return found
