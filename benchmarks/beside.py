"""Which kernels of a compiled step may run beside its exchanges: those that neither data nor memory orders.

    PYTHONPATH=.:DIR JAX_PLATFORMS=cpu python benchmarks/beside.py --batch 64 --devices 2 --tensor 1

Compiles as `compile_step.py --whole` does (which says what DIR is). A captured step runs kernels side by side if none
reads or writes what the other writes; what XLA lets share memory is in its buffer assignment, dumped and read here.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import tempfile

Range = tuple[int, int, int]  # allocation, first byte, behind the last
NO_KERNEL = {"parameter", "get-tuple-element", "bitcast", "constant", "tuple"}


def buffers(text: str) -> dict[tuple[str, str], Range]:
    """Returns where each value lies, by instruction and index: "" of an array, "{0}" of a tuple's first."""
    found, allocation = {}, -1
    for line in text.partition("Used values")[0].splitlines():
        if match := re.match(r"allocation (\d+):", line):
            allocation = int(match[1])
        if match := re.match(r" value: <\d+ ([\w.\-]+)(\{[\d,]*\})? @0> \(size=(\d+),offset=(\d+)\)", line):
            found[match[1], match[2] or ""] = allocation, int(match[4]), int(match[4]) + int(match[3])
    return found


def steps(hlo: str, places: dict[tuple[str, str], Range]) -> list[tuple[str, list[Range], list[Range]]]:
    """Returns (name, what it reads, what it writes) of each kernel of the entry, in order."""
    inside = dict(
        re.findall(r'^%([\w.\-]+) \((?:[^\n]*\n)(?:  [^\n]*\n)*?[^\n]*custom_call_target="([^"]+)"', hlo, re.M)
    )
    lines: dict[str, tuple[str, list[tuple[str, str]], str]] = {}

    def ranges(name: str, index: str) -> list[Range]:
        kind, operands, line = lines[name]
        if kind == "bitcast":
            return ranges(*operands[0])
        if kind == "get-tuple-element":
            number = re.search(r"index=(\d+)", line)
            return ranges(operands[0][0], f"{{{number[1]}}}" if number else "")
        return [place for (owner, at), place in places.items() if owner == name and index in ("", at)]

    made = []
    for line in hlo[hlo.rindex("\nENTRY ") :].splitlines():
        if not (match := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\((.*)$", line)):
            continue
        given = re.findall(r"%([\w.\-]+)(?:#(\d+))?", match[3].split("), ")[0])
        operands = [(name, f"{{{number}}}" if number else "") for name, number in given if name in lines]
        lines[match[1]] = match[2], operands, line
        if match[2] not in NO_KERNEL:
            target, calls = re.search(r'custom_call_target="([^"]+)"', line), re.search(r"calls=%([\w.\-]+)", line)
            name = target[1] if target else inside.get(calls[1] if calls else "", match[1])
            made.append((name, [r for operand in operands for r in ranges(*operand)], ranges(match[1], "")))
    return made


def before(kernels: list[tuple[str, list[Range], list[Range]]]) -> list[set[int]]:
    """Returns for each kernel all that must have ended when it begins."""

    def meet(some: list[Range], others: list[Range]) -> bool:
        return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)

    found: list[set[int]] = []
    for j, (_, reads, writes) in enumerate(kernels):
        needed: set[int] = set()
        for i, (_, read, written) in enumerate(kernels[:j]):
            if meet(written, reads + writes) or meet(read, writes):
                needed |= {i} | found[i]
        found.append(needed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={name} --xla_dump_hlo_as_text"
        from compile_step import compile_step  # which starts jax

        from dsv4_jax.bench.step import StepOptions

        compile_step(StepOptions(**vars(args)), True)
        (assignment,) = pathlib.Path(name).glob("*after_optimizations-buffer-assignment.txt")
        (module,) = pathlib.Path(name).glob("*after_optimizations.txt")
        kernels = steps(module.read_text(), buffers(assignment.read_text()))
    needed = before(kernels)
    for j, (kernel, *_) in enumerate(kernels):
        if kernel == "dsv4_exchange":
            near = [i for i in range(max(j - 15, 0), min(j + 15, len(kernels))) if i != j]
            free = [i for i in near if i not in needed[j] and j not in needed[i]]
            print(f"exchange {j} beside", ", ".join(f"{i} {kernels[i][0]}" for i in free) or "nothing")


if __name__ == "__main__":
    main()
