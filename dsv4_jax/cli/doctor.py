"""`doctor`: versions, devices, and which implementation of every op is usable here and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import libraries
from .options import add_json, print_json, stdout

__all__ = ["add_parser", "examine", "run"]

_EXAMPLES = """
examples:
  dsv4_jax doctor
  dsv4_jax doctor --json
"""
_PACKAGES = (
    "dsv4_jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton", "numpy", "ml_dtypes",
    "rich", "matplotlib", "torch", "transformers",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor", help="what works on this machine and why not", description=__doc__, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        print_json(report)
    else:
        _print(stdout(), report)
    return 0 if report["problem"] is None else 1


def examine() -> dict[str, Any]:
    """Everything `doctor` says, ready for JSON. `problem` is why nothing at all can run, or None."""
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


def _cuda_build() -> dict[str, str | None]:
    """The CUDA version the library was built with, the least driver for that, and the newest this driver runs."""
    toolkit, driver = libraries.library_cuda(), libraries.driver_cuda()
    return {
        "toolkit": toolkit,
        "least_driver": libraries.LEAST_DRIVERS.get(int(toolkit.split(".")[0])) if toolkit else None,
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


def _print(console: Console, report: dict[str, Any]) -> None:
    table = Table("", "", show_header=False)
    table.add_row("python", f"{report['python']}, {report['machine']}")
    for name, version in report["packages"].items():
        table.add_row(name, version or "[dim]not installed[/]")
    console.print(table)
    if report["problem"]:
        console.print(report["problem"], style="red", markup=False)
        return
    for device in report["devices"]:
        capability = f", compute capability {c}" if (c := device["compute_capability"]) else ""
        about = f"{device['kind']}{capability}, memories {', '.join(device['memories'])}"
        console.print(f"{report['backend']} {device['id']}: {about}", highlight=False)
    ops = Table("op", *next(iter(report["implementations"].values())))
    for op, states in report["implementations"].items():
        ops.add_row(op, *(f"[green]{s}[/]" if s == "usable" else escape(s) for s in states.values()))
    console.print(ops)
    for name, state in report["native"].items():
        console.print(f"native {name} library: {state}", markup=False, highlight=False, soft_wrap=True)
    if (build := report["cuda_build"])["toolkit"]:
        needs = f", which needs a driver of {build['least_driver']} or later" if build["least_driver"] else ""
        here = f"this one runs CUDA {build['driver_runs']}" if build["driver_runs"] else "there is none here"
        console.print(f"  built with CUDA {build['toolkit']}{needs}; {here}", highlight=False, soft_wrap=True)
    for op, code in report["cuda_code"].items():
        text = f"  {op}: compute capability {', '.join(code['capabilities']) or 'none'}"
        console.print(
            text + (f" [red]{escape(code['problem'])}[/]" if code["problem"] else ""), highlight=False, soft_wrap=True
        )
