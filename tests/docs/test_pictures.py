"""The pictures are what their text draws, read as XML, and need nothing from elsewhere."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET

import pytest

from .pages import DOCS, ROOT

DRAWN = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["pictures"]()


@pytest.mark.parametrize("name", DRAWN)
def test_picture(name: str) -> None:
    svg = (DOCS / "pictures" / name).read_text()
    assert svg == DRAWN[name], "run docs/pictures/draw.py"
    root = ET.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert root.findtext("{*}title") and root.findtext("{*}desc")
    for shape in root.iterfind(".//{*}rect"):
        x, y = (float(shape.get(axis, 0)) for axis in "xy")
        assert x >= 0 and x + float(shape.get("width", 0)) <= width, shape.attrib
        assert y >= 0 and y + float(shape.get("height", 0)) <= height, shape.attrib
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert any(f"pictures/{name}" in page.read_text() for page in [ROOT / "README.md", *DOCS.glob("*.md")])
