"""Draws the pictures of the site from the text below: `python docs/pictures/draw.py` writes the SVG files beside it.

Sizes come from the layout of V4-Flash, so that no picture repeats a number. SVG is text: no font, no script and no
network is needed to look at it.
"""

from __future__ import annotations

import pathlib
import xml.sax.saxutils

from dsv4_jax import CacheLayout, DSV4Config

__all__ = ["block_id", "leaves", "pictures", "token"]

HOST, DEVICE, PLAN, STORE, PLAIN = "#e3ecf9", "#e2f2e6", "#fdf0d0", "#efe6f5", "#ffffff"
INK, LINE = "#1d2733", "#5b6b7d"
LINE_HEIGHT = 19


class Picture:
    """Shapes in the order drawn. Positions are in pixels of a picture `width` wide; text is centred unless said."""

    def __init__(self, title: str, description: str, width: int, height: int):
        self.size = width, height
        self.head = [f"<title>{_text(title)}</title>", f"<desc>{_text(description)}</desc>"]
        self.shapes: list[str] = []

    def text(self, x: float, y: float, text: str, *, size: int = 14, anchor: str = "middle", style: str = "") -> None:
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{style}'
        self.shapes.append(f"<text {place}>{_text(text)}</text>")

    def room(self, x: float, y: float, w: float, h: float, name: str, fill: str) -> None:
        """A large area with a name at its top left."""
        self.shapes.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="10" fill="{fill}"/>')
        self.text(x + 14, y + 24, name, size=15, anchor="start", style=' font-weight="bold"')

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = PLAIN) -> None:
        """Lines of text in a box; the first is bold."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        top = y + h / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 5
        for i, line in enumerate(lines):
            bold = ' font-weight="bold"' if i == 0 else ""
            self.text(x + w / 2, top + LINE_HEIGHT * i, line, size=14 if i == 0 else 13, style=bold)

    def arrow(self, *points: tuple[float, float], label: str = "", at: tuple[float, float] | None = None) -> None:
        """A line through points with a head at its end, and a label that begins at `at`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" marker-end="url(#head)"/>'
        )
        for i, line in enumerate(label.split("\n") if label else ()):
            x, y = at or points[0]
            self.text(x, y + 17 * i, line, size=13, anchor="start")

    def cells(self, x: float, y: float, w: float, h: float, labels: list[str], fills: list[str]) -> None:
        """A strip of units."""
        for i, (label, fill) in enumerate(zip(labels, fills, strict=True)):
            self.shapes.append(
                f'<rect x="{x + i * w:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{LINE}"/>'
            )
            self.text(x + (i + 0.5) * w, y + h / 2 + 5, label, size=13)

    def svg(self) -> str:
        width, height = self.size
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>'
        )
        body = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            *self.head,
            marker,
            f'<rect width="{width}" height="{height}" rx="12" fill="#fbfcfd"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(body) + "\n"


def _text(text: str) -> str:
    return xml.sax.saxutils.escape(text)


def leaves() -> Picture:
    """Slots, blocks, plan, leaves."""
    layout = CacheLayout(DSV4Config.flash())
    p = Picture(
        "Slots, blocks, the plan and the leaves of a cache",
        "The manager on the host names slots and blocks in a plan; the cache on the device is flat arrays whose rows "
        "belong to slots or to blocks.",
        1000,
        640,
    )
    p.room(20, 20, 300, 600, "Host: KVCacheManager", HOST)
    p.box(40, 60, 260, 88, "request A", "slot 1, 300 tokens", "blocks 3, 5, 6")
    p.box(40, 162, 260, 88, "request B", "slot 2, 128 tokens", "blocks 3, 4: began with a hit")
    p.box(40, 264, 260, 70, "snapshot", "state at token 128, kept in slot 5")
    p.box(40, 348, 260, 70, "prefix tree", "digest of a prefix -> block, snapshot")
    p.box(40, 432, 260, 70, "block pool", "free: 1, 2, 7, 8")
    p.text(170, 540, "It imports no jax", size=13)
    p.text(170, 559, "and touches no cache byte.", size=13)
    p.room(350, 20, 230, 600, "Plan of one step", PLAN)
    p.box(366, 60, 198, 108, "sequences", "seq_slot   1, 2", "seq_start  300, 128", "seq_count  1, 1")
    p.box(366, 182, 198, 108, "tokens", "token_slot  1, 2", "token_position  300, 128", "flush_tokens, ...")
    p.box(366, 304, 198, 108, "block table entries", "table_slot  2", "table_index  1", "table_block  4")
    p.box(366, 426, 198, 76, "copies", "slots: snapshots, forks", "blocks: forks")
    p.text(465, 540, "Small int32 arrays,", size=13)
    p.text(465, 559, "packed into one.", size=13)
    p.arrow((322, 330), (346, 330))
    p.room(610, 20, 370, 600, "Device: KVCache (V4-Flash)", DEVICE)
    strip = ["0"] + [str(i) for i in range(1, 9)]
    null, mine, both, other, kept = "#d5d9de", "#bcd7ff", "#c9c2f0", "#ffd9b5", "#cfe8a9"
    p.text(626, 68, "rows of slots: window, compressor state", anchor="start")
    p.cells(626, 78, 38, 28, strip[:7], [null, mine, other, PLAIN, PLAIN, kept, PLAIN])
    y = 128
    for line in _leaf_lines(layout, "slot"):
        p.text(626, y, line, size=12, anchor="start", style=' font-family="monospace"')
        y += 17
    y += 14
    p.text(626, y, "rows of blocks: entries, index keys", anchor="start")
    fills = [null, PLAIN, PLAIN, both, other, mine, mine, PLAIN, PLAIN]
    p.cells(626, y + 10, 38, 28, strip, fills)
    y += 60
    for line in _leaf_lines(layout, "block"):
        p.text(626, y, line, size=12, anchor="start", style=' font-family="monospace"')
        y += 17
    y += 14
    p.text(626, y, "block table: a row for each slot", anchor="start")
    p.cells(626, y + 10, 38, 26, ["3", "5", "6"], [both, mine, mine])
    p.cells(626, y + 36, 38, 26, ["3", "4", "0"], [both, other, null])
    p.text(756, y + 28, "slot 1", size=13, anchor="start")
    p.text(756, y + 54, "slot 2", size=13, anchor="start")
    p.text(626, y + 92, "Unit 0 is null: padding means it.", size=13, anchor="start")
    p.text(
        626, y + 112, f"{len(layout.leaves)} arrays hold all {layout.cfg.num_layers} layers.", size=13, anchor="start"
    )
    p.arrow((582, 330), (606, 330))
    return p


def _leaf_lines(layout: CacheLayout, scope: str) -> list[str]:
    """Leaves as name [layers x units x rows, width] dtype."""
    found = [leaf for leaf in layout.leaves if leaf.scope == scope]
    return [f"{x.name:<17}[{x.layers}*{scope}s*{x.rows}, {x.width}] {x.dtype}" for x in found]


def token() -> Picture:
    """The way of one token."""
    p = Picture(
        "The way of one token",
        "A token id goes from the request through schedule and plan into the layers, whose writes and reads go "
        "through the step, and the next token comes back.",
        1000,
        560,
    )
    p.room(20, 20, 260, 520, "Host", HOST)
    p.box(40, 62, 220, 62, "request.tokens", "the token at position t")
    p.box(40, 160, 220, 62, "schedule", "decodes, then chunks")
    p.box(40, 258, 220, 80, "plan_step", "slot, position, blocks", "checked before it changes", fill=PLAN)
    p.box(40, 374, 220, 62, "plan_tokens", "ids in the plan's order", fill=PLAN)
    for y in (124, 222, 338):
        p.arrow((150, y), (150, y + 34))
    p.room(320, 20, 660, 520, "Device: one jitted step, the cache donated", DEVICE)
    p.box(340, 62, 180, 62, "cache.begin(plan)", "copies, table entries")
    p.arrow((260, 298), (300, 298), (300, 93), (336, 93))
    p.box(340, 160, 180, 62, "embed", "ids -> rows")
    p.arrow((260, 405), (310, 405), (310, 191), (336, 191))
    p.arrow((430, 124), (430, 156))
    p.shapes.append(
        f'<rect x="545" y="56" width="420" height="356" rx="8" fill="none" stroke="{LINE}" stroke-dasharray="6 4"/>'
    )
    p.text(755, 78, "for each layer i: step.layer(i)", size=14, style=' font-weight="bold"')
    p.arrow((520, 191), (541, 191))
    p.box(560, 92, 185, 80, "append", "window row t mod ring", "of the token's slot")
    p.box(765, 92, 185, 80, "compress", "into the state of the slot", "(CSA and HCA layers)")
    p.box(765, 206, 185, 80, "entry and index key", "when t ends a group:", "a row of the block of t")
    p.arrow((857, 172), (857, 202))
    p.box(560, 206, 185, 80, "index_scores, top_k", "which entries to read", "(CSA layers)")
    p.arrow((765, 246), (749, 246))
    p.box(
        560,
        320,
        390,
        76,
        "attend",
        "one softmax over window, entries and sink;",
        "reads through the slot's row of the block table",
    )
    p.arrow((652, 286), (652, 316))
    p.arrow((857, 286), (857, 316))
    p.box(560, 442, 185, 62, "step.finish()", "the cache, in place")
    p.box(765, 442, 185, 62, "head", "logits of t")
    p.arrow((652, 396), (652, 438))
    p.arrow((857, 396), (857, 438))
    p.arrow(
        (857, 504), (857, 524), (28, 524), (28, 93), (36, 93), label="the token drawn: position t + 1", at=(340, 518)
    )
    return p


def block_id() -> Picture:
    """The way of one block id."""
    p = Picture(
        "The way of one block id",
        "A block id is free, then taken by a request, filled, published, shared by hits, kept without a reader, and "
        "evicted; its bytes may go on to host and storage.",
        1000,
        520,
    )
    p.room(20, 20, 960, 240, "Device: block ids 1 .. num_blocks", DEVICE)
    p.box(40, 70, 150, 76, "free", "in the block pool")
    p.box(240, 70, 170, 76, "taken", "by plan_step, for the", "tokens of one request")
    p.box(460, 70, 210, 76, "published", "all its tokens are planned:", "found by its digest")
    p.box(720, 70, 240, 76, "shared", "hits add it to their block", "tables: nobody writes it")
    p.box(460, 174, 210, 64, "cached", "no request reads it")
    p.arrow((190, 108), (236, 108))
    p.arrow((410, 108), (456, 108))
    p.arrow((670, 108), (716, 108))
    p.arrow((520, 146), (520, 170))
    p.text(512, 163, "release", size=12, anchor="end")
    p.arrow((610, 174), (610, 150))
    p.text(618, 166, "hit", size=12, anchor="start")
    p.arrow((840, 146), (840, 206), (674, 206), label="last reader leaves", at=(690, 198))
    p.arrow((460, 206), (115, 206), (115, 150), label="evicted: its bytes go down, or are dropped", at=(126, 198))
    p.arrow((325, 146), (325, 162), (150, 162), (150, 150), label="released, not full", at=(336, 166))
    p.room(20, 280, 960, 104, "Host: pages of pinned memory", HOST)
    p.box(380, 306, 360, 62, "host copy", "one page, found by the same digest")
    p.arrow((500, 238), (500, 302), label="swap_out: backed up,\nmoved when evicted", at=(340, 258))
    p.arrow((630, 306), (630, 242), label="a hit loads it into any\nfree id: swap_in", at=(640, 258))
    p.room(20, 404, 960, 96, "Storage: records in a store", STORE)
    p.box(380, 426, 360, 58, "record", "under the same digest; may outlive the process")
    p.arrow((500, 368), (500, 422), label="write", at=(452, 400))
    p.arrow((630, 426), (630, 372), label="prefetch, before admission", at=(640, 400))
    return p


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        f"{name}.svg": draw().svg() for name, draw in (("leaves", leaves), ("token", token), ("block_id", block_id))
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (pathlib.Path(__file__).parent / name).write_text(svg)
