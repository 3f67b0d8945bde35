"""Every engine that can run here, under `TransportConformance`."""

from __future__ import annotations

import pytest

from dsv4_jax.transports import ENGINES, engine_problem

from .conformance import TransportConformance
from .samples import TLS, certificates


def needs(engine: str) -> pytest.MarkDecorator:
    problem = engine_problem(engine)
    return pytest.mark.skipif(problem is not None, reason=f"{engine}: {problem}")


class TestLoopback(TransportConformance):
    engine = "loopback"


class TestSockets(TransportConformance):
    """With all that they can insist on."""

    engine = "sockets"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def strict(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("hosts") / "tls"
        certificates(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TLS, str(folder))
            yield


@needs("jax")
class TestJax(TransportConformance):
    engine = "jax"


@needs("nixl")
class TestNixl(TransportConformance):
    engine = "nixl"


def test_all_engines_are_tested():
    tested = {each.engine for each in TransportConformance.__subclasses__()}
    assert tested == set(ENGINES)
