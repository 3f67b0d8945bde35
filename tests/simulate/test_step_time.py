"""The constants are those of the measured steps, and what is printed here is how far off they are."""

from __future__ import annotations

import dataclasses

import pytest

from dsv4_jax.errors import TraceError
from dsv4_jax.simulate import StepTime
from dsv4_jax.simulate.step_time import MEASURED, MeasuredStep, fitted


def test_the_defaults_are_the_fit(capsys) -> None:
    model, fit = StepTime(), fitted()
    for name, value in dataclasses.asdict(fit).items():
        assert getattr(model, name) == pytest.approx(value, rel=0.01), name
    errors = {step: model.of(step) / step.seconds - 1 for step in MEASURED}
    with capsys.disabled():
        for step, error in errors.items():
            shape = f"{step.requests:>3} x {step.tokens:>4} tokens behind {step.context:>7}"
            times = f"{1e3 * step.seconds:6.2f} ms measured, {1e3 * model.of(step):6.2f} modelled"
            print(f"\n  {shape}: {times} ({error:+.2%})", end="")
    assert max(map(abs, errors.values())) < 0.01


def test_the_fit_finds_what_steps_were_made_of() -> None:
    made = StepTime(1e-3, 2e-3, 20e-6, 0.1e-9, 10e-6, 5e-12)
    steps = [
        MeasuredStep(n, t, c, 0.0)
        for n, t, c in (
            (8, 1, 1000),
            (64, 1, 9000),
            (9, 1, 99000),
            (200, 1, 50000),
            (1, 1024, 0),
            (1, 4096, 9000),
            (2, 2048, 99000),
        )
    ]
    steps = [step._replace(seconds=made.of(step)) for step in steps]
    found = fitted(tuple(steps), weights=2e-3)
    for name, value in dataclasses.asdict(made).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_transfers() -> None:
    """What comes in is waited for; what goes out only as far as it outlasts the step."""
    time = StepTime(bandwidth=100.0)
    assert time.seconds(2.0, 0, 0) == 2.0
    assert time.seconds(2.0, 50, 200) == 2.5
    assert time.seconds(2.0, 0, 300) == 3.0


def test_more_takes_longer() -> None:
    time = StepTime()
    base = time.computing(10, 1e4, 1000, 1e6)
    assert base < min(time.computing(11, 1e4, 1000, 1e6), time.computing(10, 1e5, 1000, 1e6))
    assert base < min(time.computing(10, 1e4, 1100, 1e6), time.computing(10, 1e4, 1000, 1e7))
    assert time.computing(1, 0, 10, 0) == time.computing(1, 0, 0, 0), "ten tokens hide behind the weights"
    two_chunks = 2 * time.computing(0, 0, 512, 0)
    assert two_chunks > time.computing(0, 0, 1024, 0) + 0.99 * time.fixed, "a chunk's end costs"


def test_constants_by_name() -> None:
    assert StepTime.parse("fixed=0.5,bandwidth=1e9") == StepTime(fixed=0.5, bandwidth=1e9)
    for bad in ("fixed=x", "speed=1", "fixed=-1", "bandwidth=0", "weights=nan", "weights=inf"):
        with pytest.raises(TraceError, match=bad.partition("=")[0]):
            StepTime.parse(bad)
