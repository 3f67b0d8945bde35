"""`doctor`: versions, devices, and which implementation of every op is usable here and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from typing import Any

from rich.markup import escape
from rich.table import Table

from .. import libraries
from .options import add_command, add_json
from .printing import facts, present

__all__ = ["add_parser", "examine", "run"]

_EXAMPLES = """
  dsv4-jax doctor                      in one table
  dsv4-jax doctor --json               by op and implementation, for a program
  dsv4-jax doctor --json doctor.json   both: for a report of a bug
"""
_PACKAGES = (
    "dsv4_jax",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "numpy",
    "ml_dtypes",
    "rich",
    "matplotlib",
    "torch",
    "transformers",
    "nixl-cu12",
    "nixl-cu13",
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    summary = "what works on this machine and why not"
    parser = add_command(commands, "doctor", summary, __doc__, _EXAMPLES, fails="nothing can run here")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    present(report, args.json, lambda console: console.print(_table(report)))
    return 0 if report["problem"] is None else 1


def examine() -> dict[str, Any]:
    """Finds out all that `doctor` says, ready for JSON. `problem` is why nothing at all can run, or None."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "problem": None,
    }
    if report["packages"]["jax-cuda12-plugin"] and report["packages"]["jax-cuda13-plugin"]:
        report["problem"] = "jax's plugins for CUDA 12 and 13 are both installed and exclude each other: uninstall one"
        return report
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # whatever a broken installation raises is what the user needs to see
        report["problem"] = f"jax finds no device: {error}"
        return report
    report["backend"] = jax.default_backend()
    report["devices"] = [
        {
            "id": device.id,
            "kind": device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
            "memories": sorted(m.kind for m in device.addressable_memories()),
        }
        for device in devices
    ]
    report["implementations"] = _implementations(report["backend"])
    report["native"] = _native()
    report["transports"] = _transports()
    report["cuda_build"] = _cuda_build()
    report["cuda_code"] = _cuda_code()
    return report


def _implementations(backend: str) -> dict[str, dict[str, str]]:
    """op -> implementation -> "usable" (by what it takes: another question) or why not."""
    from ..ops.registry import NAMES, OPS, Name, Op, find

    def state(op: Op, name: Name) -> str:
        if name not in op.names:
            return "no kernel"
        if name == "xla" or backend == "gpu":
            return find(op.name, name).problem() or "usable"
        return f"the backend is {backend}" + (": only interpreted, by tests" if name == "pallas" else "")

    return {op.name: {name: state(op, name) for name in NAMES} for op in OPS.values()}


def _native() -> dict[str, str]:
    """Native library -> "usable" or why it cannot be loaded. Without the one of the backend, swaps are plain XLA."""
    from .. import ffi

    return {"cuda": ffi.cuda_problem() or "usable", "cpu": ffi.cpu_problem() or "usable"}


def _transports() -> dict[str, str]:
    """Engine that moves records between hosts -> "usable" or why not."""
    from ..transports import ENGINES, engine_problem

    return {name: engine_problem(name) or "usable" for name in ENGINES}


def _cuda_build() -> dict[str, str | None]:
    """The CUDA version the library was built with, the least driver for that, and the newest this driver runs."""
    toolkit, driver = libraries.library_cuda(), libraries.driver_cuda()
    return {
        "toolkit": toolkit,
        "least_driver": libraries.MIN_DRIVERS.get(int(toolkit.split(".")[0])) if toolkit else None,
        "driver_runs": libraries.spelled(driver) if driver else None,
    }


def _cuda_code() -> dict[str, dict[str, Any]]:
    """Op -> the compute capabilities the CUDA library holds its code for, and why it is no use here (None: it is)."""
    from .. import ffi
    from ..ops.registry import OPS

    if ffi.cuda_problem() is not None:
        return {}
    ops = [op.name for op in OPS.values() if "cuda" in op.names]
    sources = (*ops, "swap")  # which is of `tiers`, and no op of a model
    return {op: {"capabilities": ffi.built_for(op), "problem": ffi.code_problem(op)} for op in sources}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _table(report: dict[str, Any]) -> Table:
    """The table of a report, in which each thing is said once."""
    there = {name: version for name, version in report["packages"].items() if version}
    machine = {
        "python": f"{report['python']}, {report['machine']}",
        "packages": ", ".join(f"{name} {version}" for name, version in there.items()),
        "not installed": ", ".join(name for name in report["packages"] if name not in there),
    }
    if report["problem"]:
        return facts(None, machine, {"problem": f"[red]{escape(report['problem'])}[/]"})
    here = {"backend": report["backend"]}
    for about, ids in _grouped({str(device["id"]): _about(device) for device in report["devices"]}).items():
        here[f"device {', '.join(ids)}" if len(ids) < 3 else f"devices {ids[0]} to {ids[-1]}"] = escape(about)
    states = _grouped(report["transports"])
    here |= {
        "CPU library": _state(report["native"]["cpu"]),
        "CUDA library": _cuda_library(report),
        "transports": "\n".join(f"{_state(state)}: {', '.join(names)}" for state, names in states.items()),
    }
    ops = report["implementations"]
    return facts(None, machine, here, {name: _implementation(name, ops) for name in next(iter(ops.values()))})


def _about(device: dict[str, Any]) -> str:
    capability = f", compute capability {c}" if (c := device["compute_capability"]) else ""
    return f"{device['kind']}{capability}, memories {', '.join(device['memories'])}"


def _cuda_library(report: dict[str, Any]) -> str:
    lines, build = [_state(report["native"]["cuda"])], report["cuda_build"]
    if build["toolkit"]:
        needs = f" (needs a driver of {build['least_driver']} or later)" if build["least_driver"] else ""
        here = f"this driver runs CUDA {build['driver_runs']}" if build["driver_runs"] else "there is no driver here"
        lines.append(f"built with CUDA {build['toolkit']}{needs}; {here}")
    code = report["cuda_code"]
    groups = _grouped({op: ", ".join(each["capabilities"]) for op, each in code.items()})
    for capabilities, ops in groups.items():
        kind = f"code for compute capability {capabilities}" if capabilities else "no code"
        lines.append(kind + (f": {', '.join(ops)}" if len(groups) > 1 else ""))
    if code and (problem := code["swap"]["problem"]):  # those of ops are said with the implementation
        lines.append(f"[red]{escape(problem)}[/]")
    return "\n".join(lines)


def _implementation(name: str, implementations: dict[str, dict[str, str]]) -> str:
    """Says of which ops an implementation is usable, and why of the others it is not."""
    # Reasons that differ in nothing but the name of the op are one.
    states = {op: states[name].replace(f"the {op} kernel", "the kernel") for op, states in implementations.items()}
    groups = _grouped({op: state for op, state in states.items() if state != "no kernel"})
    lines = []
    for state, ops in groups.items():
        of = f": {', '.join(ops)}" if state == "usable" or len(groups) > 1 else ""
        lines.append(_state(state) + of)
    return "\n".join(lines) or "no kernel"


def _state(state: str) -> str:
    return "[green]usable[/]" if state == "usable" else escape(state)


def _grouped(values: dict[str, str]) -> dict[str, list[str]]:
    """Maps each value to the keys that have it."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found
