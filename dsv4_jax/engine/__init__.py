"""The engine: one serving loop for whoever has requests.

    engine = Engine.load(checkpoint)                    # or Engine.of(params, layout, memory)
    for output in engine.add(Prompt(tokens=ids)): ...   # or `async for`; Engine.run(prompts) for a list

`Core` decides (no clock, thread or jax), an `Executor` runs what it decides, and the `Engine`'s thread owns both.
"""

from __future__ import annotations

from .core import Core, Limits, shapes_of
from .engine import Engine, EngineStats
from .executor import Drawn, Executor, Pending, Row, Shapes, Work
from .generate import StepOutput, generate
from .handle import Handle
from .job import Job
from .loop import Turn, drive
from .prompt import Completion, Output, Prompt
from .shadow import Recorded, ShadowExecutor

__all__ = [
    "Completion",
    "Core",
    "Drawn",
    "Engine",
    "EngineStats",
    "Executor",
    "Handle",
    "Job",
    "Limits",
    "Output",
    "Pending",
    "Prompt",
    "Recorded",
    "Row",
    "ShadowExecutor",
    "Shapes",
    "StepOutput",
    "Turn",
    "Work",
    "drive",
    "generate",
    "shapes_of",
]
