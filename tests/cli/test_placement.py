"""Where snapshots are kept, in words."""

from __future__ import annotations

import pytest

from dsv4_jax.cli.placement import DEFAULT_PLACEMENT, placement
from dsv4_jax.manager import SnapshotPlacement


def test_the_default_is_that_of_the_class() -> None:
    assert placement(DEFAULT_PLACEMENT) == SnapshotPlacement()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", SnapshotPlacement.none()),
        ("prompt", SnapshotPlacement(None, True, False, False, None)),
        ("output,every:32", SnapshotPlacement(32, False, True, False, None)),
        ("doubling:4,junctions", SnapshotPlacement(None, False, False, True, 4)),
    ],
)
def test_names_add_up(text: str, wanted: SnapshotPlacement) -> None:
    assert placement(text) == wanted
