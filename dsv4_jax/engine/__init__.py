"""The engine: one serving loop for whoever has requests.

    engine = Engine.load(checkpoint)                    # or Engine.of(params, layout, memory)
    for output in engine.add(Prompt(tokens=ids)): ...   # or `async for`; Engine.run(prompts) for a list

`Core` decides (no clock, thread or jax), an `Executor` runs what it decides, and the `Engine`'s thread owns both.

Names load on first use: the core, and the executors without a device, import no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coarse import CoarseCore as CoarseCore
    from .core import Core as Core
    from .core import Limits as Limits
    from .core import shapes_of as shapes_of
    from .engine import Engine as Engine
    from .executor import Drawn as Drawn
    from .executor import Executor as Executor
    from .executor import Pending as Pending
    from .executor import Row as Row
    from .executor import Shapes as Shapes
    from .executor import Work as Work
    from .generate import StepOutput as StepOutput
    from .handle import Handle as Handle
    from .job import Job as Job
    from .loop import Turn as Turn
    from .loop import drive as drive
    from .metrics import EngineStats as EngineStats
    from .metrics import Health as Health
    from .prompt import Completion as Completion
    from .prompt import Output as Output
    from .prompt import Prompt as Prompt
    from .shadow import Recorded as Recorded
    from .shadow import ShadowExecutor as ShadowExecutor

_HOME = {
    "CoarseCore": "coarse",
    "Completion": "prompt",
    "Core": "core",
    "Drawn": "executor",
    "Engine": "engine",
    "EngineStats": "metrics",
    "Executor": "executor",
    "Handle": "handle",
    "Health": "metrics",
    "Job": "job",
    "Limits": "core",
    "Output": "prompt",
    "Pending": "executor",
    "Prompt": "prompt",
    "Recorded": "shadow",
    "Row": "executor",
    "ShadowExecutor": "shadow",
    "Shapes": "executor",
    "StepOutput": "generate",
    "Turn": "loop",
    "Work": "executor",
    "drive": "loop",
    "shapes_of": "core",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
