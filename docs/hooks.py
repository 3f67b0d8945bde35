"""Pages of the site that lie elsewhere in the repository, links that say what they lead to, and checks of the site."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from render import pages  # noqa: E402 (imports no jax)

__all__ = ["on_files", "on_page_markdown", "on_post_build"]

PAGES = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
RESULTS = "RESULTS.md"  # of what is made from the records


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, with links into `docs/` set right and links to other files of the repository as plain text."""
    made = pages(ROOT / "benchmarks")
    texts = {"results.md": made[RESULTS]} | {name: (ROOT / source).read_text() for name, source in PAGES.items()}
    for name, text in texts.items():
        text = re.sub(r"\]\((?:\.\./)*docs/", "](", text)
        text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*?(?<!\.md)\)", r"`\1`", text)
        text = re.sub(r"\[([^\]]+)\]\(records/README\.md\)", r"`benchmarks/records`", text)
        files.append(File.generated(config, name, content=text))
    for name, text in made.items():
        if name.endswith(".svg"):
            files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links whose text is the name of a page, as the repository shows them, say the page's title in the site."""

    def titled(match: re.Match[str]) -> str:
        target = files.get_file_from_path(str(pathlib.PurePosixPath(page.file.src_uri).parent / match["target"]))
        heading = re.search(r"^# (.+)$", target.content_string, re.M) if target else None
        return f"[{heading[1]}]({match['target']}{match['anchor'] or ''})" if heading else match[0]

    return re.sub(r"\[[\w/]+\.md\]\((?P<target>[\w/.]+\.md)(?P<anchor>#[\w-]+)?\)", titled, markdown)


@event_priority(-200)  # behind the offline plugin, which writes the index
def on_post_build(config: Any) -> None:
    """Refuses a site with files that are no pages, links named after files, or a search that a folder cannot have."""
    site = pathlib.Path(config.site_dir)
    if found := [path for path in site.rglob("*") if path.name == "__pycache__" or path.suffix == ".py"]:
        raise PluginError(f"{found[0].relative_to(site)} is no part of a site")
    if not (site / "search" / "search_index.js").is_file():
        raise PluginError("the search has no index that a page from a folder may read")
    for path in site.rglob("*.html"):
        if found := re.search(r"<a [^>]*>[\w/]+\.md</a>|<script[^>]* src=.?https?:[^>]*>", path.read_text()):
            raise PluginError(f"{path.relative_to(site)}: {found[0]}")
