"""docs/manager.md: its examples run and find what the text says; its sizes are the layout's."""

from __future__ import annotations

import pathlib
import re

from dsv4_jax import CacheLayout, DSV4Config
from dsv4_jax.capacity import SNAPSHOT_FRACTION
from dsv4_jax.manager import SnapshotPlacement
from dsv4_jax.records import snapshot_record

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "manager.md").read_text()


def test_example() -> None:
    engine, router = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    scope: dict = {}
    exec(engine, scope)
    scope["manager"].check_integrity()
    exec(router, scope)
    said = {name: int(value) for name, value in re.findall(r"`(\w+) == (\d+)`", TEXT)}
    assert {name: scope[name] for name in said} == said
    assert said == {"first": 0, "second": 384, "other": 0, "known": 3, "strange": 0}
    scope["manager"].check_integrity()
    # The router of the example also learns what goes.
    replica, manager, log = scope["replica"], scope["manager"], scope["log"]
    digests = manager.digests(scope["prompt"], namespace=scope["Namespace"]("a"))
    manager.reset()
    replica.follow(log)
    assert replica.cached_blocks(digests) == 0 and replica.seen == log.last


def test_numbers() -> None:
    cfg = DSV4Config.flash()
    layout = CacheLayout(cfg)
    on_device, elsewhere = layout.bytes_per_slot / 1e6, snapshot_record(layout).bytes / 1e6
    assert f"a snapshot is {on_device:.1f} MB on the device and {elsewhere:.1f} MB elsewhere" in " ".join(TEXT.split())
    assert f"a block {layout.bytes_per_block / 1e6:.1f} MB" in " ".join(TEXT.split())
    assert f"({len(layout.schedule) * cfg.sliding_window / 1e3:.1f} K for V4-Flash)" in TEXT
    assert f"`doubling={SnapshotPlacement().doubling}`" in TEXT and f"`every={SnapshotPlacement().every}`" in TEXT
    assert f"gives snapshots {SNAPSHOT_FRACTION:.0%}".replace("%", " %") in TEXT
