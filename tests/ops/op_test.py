"""The base of the op test classes: a subclass names an implementation; its cases ask for results or for refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops.registry import Name

__all__ = ["OpTest"]


class OpTest:
    """Subclass the class of an op with another `implementation` to test a kernel.

    Attributes:
        op: as in the registry.
        implementation: under test.
    """

    op: ClassVar[str]
    implementation: ClassVar[Name]

    def takes(self, **case: Any) -> bool:
        """Whether the implementation is one for such a case."""
        return True

    @contextlib.contextmanager
    def asked(self, **case: Any) -> Iterator[None]:
        """The block's assertions hold; or, if the implementation does not take the case, its first call is refused."""
        if self.takes(**case):
            yield
            return
        refusal = f"{self.op}: implementation '{self.implementation}' cannot run: it "
        with pytest.raises(ImplementationError, match=refusal):
            yield
