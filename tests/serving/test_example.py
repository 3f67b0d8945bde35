"""examples/serve.py and disaggregated.py: everything is answered, under pressure, as it would be without any cache."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

from dsv4_jax.engine import Core, Engine, ShadowExecutor, shapes_of
from dsv4_jax.manager import KVCacheManager

from ..clock import PATIENCE
from ..examples import load_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("serve")


@pytest.mark.slow
def test_it_serves_under_pressure_what_cold_runs_answer(example: ModuleType, capsys) -> None:
    assert example.main(["--requests", "16", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["done"], numbers["checked"], numbers["wrong"]) == (16, 4, 0)
    assert numbers["queued"] == numbers["live"] == numbers["preempted"] == 0
    assert numbers["preemptions"] and numbers["evictions"]["device"] and numbers["evictions"]["host"]
    assert all(rate > 0 for rate in numbers["hit_rate_by_tier"].values())
    assert numbers["sampled_tokens"] == sum(job.count for job in example.conversations(16, 0))

    assert example.main(["--requests", "5", "--no-check", "--copy-at", "1", "--prometheus"]) == 0
    text = capsys.readouterr().out
    assert "# TYPE dsv4_cache_hit_tokens_total counter" in text and "dsv4_cache_lookups_total " in text


def test_a_wrong_answer_is_told(example: ModuleType, capsys, monkeypatch) -> None:
    """Without a model: what a shadow of a device samples, and cold runs of another shadow that say otherwise."""
    engines = 0

    class Shadow(ShadowExecutor):
        def _draw(self, seed, place, fed, mask):
            return super()._draw(wrong and self.number, place, fed, mask)

    def engine(params, layout, size, *, policy, host=0, chunk_tokens):
        nonlocal engines
        manager = KVCacheManager(layout, size, policy=policy, host=host or None)
        executor = Shadow(shapes_of([manager], chunk_tokens), layout.cfg.vocab_size)
        executor.number = engines = engines + 1
        return Engine(Core(manager, executor.shapes), executor)

    monkeypatch.setattr(example.Engine, "of", engine)
    for wrong in (0, 1):
        assert example.main(["--requests", "6", "--host-blocks", "0" if wrong else "24"]) == wrong
        out = capsys.readouterr()
        assert "checked" in out.out and out.err.count("differs from its cold run: [") == 4 * wrong


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--requests", "0"], "--requests: at least 1"),
        (["--requests", "many"], "invalid int"),
        (["--blocks", "3"], "--blocks: at least 12"),
        (["--copy-at", "-1"], "--copy-at: at least 0"),
    ],
)
def test_impossible_arguments_are_refused(example: ModuleType, capsys, argv: list[str], problem: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(argv)
    assert problem in capsys.readouterr().err


def test_help_has_examples(example: ModuleType, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--no-cache " in (text := capsys.readouterr().out) and "examples:" in text


@pytest.mark.slow
def test_two_hosts_answer_as_one_alone() -> None:
    """Two processes, and records that are not what their checksums were made of."""
    program = load_example("disaggregated").__file__
    argv = [sys.executable, str(program), "--requests", "6", "--fault", "torn-record"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["answered"], numbers["wrong"], numbers["held"]) == (6, 0, 0)
    assert numbers["parts of hand-offs"] and numbers["sent to the prefill host"]
