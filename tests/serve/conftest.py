"""The servers of these tests are packages of one Python's environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .serving import Stand


@pytest.fixture(scope="session", autouse=True)
def extra() -> None:
    for name in ("starlette", "uvicorn", "msgspec", "deepseek_recipe", "llguidance"):
        pytest.importorskip(name, reason="the extra serve is installed on Python 3.12 alone")


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server for all tests that leave it as it was."""
    with Stand(tmp_path_factory.mktemp("tokenizer"), admin=True) as made:
        yield made
        made.idle()
