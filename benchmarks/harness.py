"""What the benchmarks of this folder share: arguments, and the record of a run (`dsv4_jax.bench.records`)."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from targets import TARGETS, Target, elsewhere, verdict

from dsv4_jax.bench.records import dumps, new_record

__all__ = ["Recorder", "cpu_name", "jax_device", "parser"]


def parser(text: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help is the script's docstring, with `--json`."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record of the run")
    return made


class Recorder:
    """The rows of a run, written to a file after each of them: a run that is ended leaves what it measured.

    Args:
        path: of the file; None: nothing is written.
        device: what was measured.
        software: versions, by name.
        ceilings: of the same run, such as copy_gb_per_s.
        command: that was run; None: this process's.
        note: what else a reader must know.
        quick: the sizes say nothing of times.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        *,
        device: str,
        software: Mapping[str, str],
        quick: bool = False,
        ceilings: Mapping[str, float] | None = None,
        command: str | None = None,
        note: str | None = None,
    ) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self._how: dict[str, Any] = dict(device=device, software=software, quick=quick, ceilings=ceilings or {})
        self._how["command"] = command or shlex.join(["python", *sys.argv])
        self._note = {"note": note} if note else {}

    def add(self, table: str, **fields: Any) -> dict[str, Any]:
        """Adds a row of a table of `records.TABLES`, without fields that are None, and returns it."""
        row = {"table": table} | {name: value for name, value in fields.items() if value is not None}
        self.rows.append(row)
        if self.path is not None:
            rows = [elsewhere(row, self._how["device"]) for row in self.rows]
            self.path.write_text(dumps(new_record(rows, **self._how) | self._note), encoding="utf-8")
        return row

    def op(
        self, op: str, shape: str, batch: int, us: float, *, clock: str = "kernel_us", **more: Any
    ) -> dict[str, Any]:
        """Adds a time of an op, with what is required of it (`targets.TARGETS`) and whether it is met.

        Args:
            clock: the field of the time, "kernel_us" or "us".
            more: further fields of a `Measurement`, such as variant, peer_us or bytes.
        """
        target = TARGETS.get((op, shape, batch), Target()) if more.get("implementation") != "xla" else Target()
        judged: dict[str, Any] = dict(required_us=target.required, goal_us=target.goal, peer_us=target.peer)
        judged["verdict"] = verdict(us, target.required, target.goal)
        fields = dict(op=op, shape=shape, batch=batch, implementation="cuda") | {clock: us} | judged
        return self.add("ops", **fields | {name: value for name, value in more.items() if value is not None})

    def fact(
        self,
        subject: str,
        what: str,
        measured: float,
        unit: str | None = None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> dict[str, Any]:
        """Records and prints a single number, with what is required of it."""
        within = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
        met = None if at_least is None and at_most is None else "met" if within else "missed"
        row = self.add(
            "facts",
            subject=subject,
            what=what,
            measured=measured,
            unit=unit,
            at_least=at_least,
            at_most=at_most,
            verdict=met,
        )
        bounds = {">=": at_least, "<=": at_most}
        asked = "".join(f" (required {sign} {bound:g}: {met})" for sign, bound in bounds.items() if bound is not None)
        print(f"{what}: {measured:,.4g} {unit or ''}{asked}".rstrip(), flush=True)
        return row


def jax_device() -> dict[str, Any]:
    """Returns `device` and `software` of a `Recorder`: the first device and JAX."""
    import jax

    software = {"jax": jax.__version__, "backend": jax.default_backend()}
    return {"device": jax.devices()[0].device_kind, "software": software}


def cpu_name() -> str:
    """Returns the processor's name, as Linux calls it."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
