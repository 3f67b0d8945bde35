"""examples/serve.py: everything is served, under pressure, and as it would be without any cache."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from ..examples import load_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("serve")


@pytest.mark.slow
def test_it_serves_under_pressure_what_cold_runs_answer(example: ModuleType, capsys) -> None:
    assert example.main(["--requests", "16", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["done"], numbers["checked"], numbers["wrong"]) == (16, 4, 0)
    assert numbers["waiting"] == numbers["live"] == numbers["preempted"] == 0
    assert numbers["preemptions"] and numbers["evictions"]["device"] and numbers["evictions"]["host"]
    assert all(rate > 0 for rate in numbers["hit_rate_by_tier"].values())
    assert numbers["sampled_tokens"] == sum(job.max_new_tokens for job in example.conversations(16, 0))
    assert example.step._cache_size() == 1, "the server and the cold runs share one executable"

    assert example.main(["--requests", "5", "--no-check", "--policy", "selective:1", "--prometheus"]) == 0
    text = capsys.readouterr().out
    assert "# TYPE dsv4_cache_hit_tokens_total counter" in text and "dsv4_cache_lookups_total " in text


def test_a_wrong_answer_is_told(example: ModuleType, capsys, monkeypatch) -> None:
    """Without a model: every step draws the token 7, and the cold runs are said to answer otherwise."""
    monkeypatch.setattr(example, "step", lambda params, cache, plan, tokens: ([7] * plan.unpack().num_seqs, cache))
    assert example.main(["--requests", "6", "--host-blocks", "0"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(example, "alone", lambda server, job: [8])
    assert example.main(["--requests", "6", "--host-blocks", "0"]) == 1
    out = capsys.readouterr()
    assert "0 of 4 answers" in out.out and out.err.count("differs from its cold run: [7, ") == 4


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--requests", "0"], "at least 1"),
        (["--blocks", "3"], "'3' is not an integer of at least 12"),
        (["--policy", "selective:x"], "is not write_back"),
        (["--policy", "never"], "is not write_back"),
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
