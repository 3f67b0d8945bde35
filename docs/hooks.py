"""Pages of the site that lie elsewhere in the repository: the results, how to contribute, what changed."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files"]

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {"results.md": "benchmarks/RESULTS.md", "contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, with links into `docs/` set right and links to other files of the repository as plain text."""
    for name, source in PAGES.items():
        text = re.sub(r"\]\((?:\.\./)*docs/", "](", (ROOT / source).read_text())
        text = re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]*?(?<!\.md)\)", r"`\1`", text)
        text = re.sub(r"\[([^\]]+)\]\(records/README\.md\)", r"`benchmarks/records`", text)
        files.append(File.generated(config, name, content=text))
    return files
