"""`dsv4-jax serve` as its users meet it, beside the `Engine` alone: tokens a second, first token, between tokens.

A checkpoint of some layers with random weights as released is drawn and written; a server of its own process reads it,
and clients send so many streams at once, prompts as ids that nobody sent before, answers of a fixed length that are
streamed. Then the same requests go to an `Engine` in a process that has nothing else. What each needs of a device it
gives back before the next begins. With `--aiperf`, NVIDIA's load generator (`pip install aiperf`) asks the same server
for as many tokens by a client that is not ours.

    python benchmarks/bench_serve.py --layers 12 --streams 1 16 64 --tokenizer tokenizer.json --json serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from harness import Recorder, parser

READY = 60  # seconds
# A stream: the times at which it had tokens, and how many it had by then.
Arrivals = list[tuple[float, int]]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def streamed(host: str, port: int, request: dict[str, Any]) -> AsyncIterator[int]:
    """Sends a completion; gives the number of tokens of each event with text, at the end that of all."""
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r}: {(await reader.read())[-500:]!r}")
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if usage := event.get("usage"):
                yield usage["completion_tokens"]
            elif event["choices"]:
                yield 0
    writer.close()


async def arrivals_of(tokens: AsyncIterator[int]) -> Arrivals:
    times = list[float]()
    count = 0
    async for told in tokens:
        times.append(time.perf_counter())
        count = told or count
    times = times[:-1]  # the last one tells how many there were
    return [*zip(times, np.linspace(1, count, len(times)).round().astype(int).tolist(), strict=True)]


async def round_of(begin: Callable[[int], AsyncIterator[int]], streams: int) -> tuple[float, list[Arrivals]]:
    """So many streams at once: when they began, and what each had when."""
    began = time.perf_counter()
    return began, await asyncio.gather(*(arrivals_of(begin(i)) for i in range(streams)))


async def measured(
    begin: Callable[[int, int], AsyncIterator[int]], streams: int, rounds: int, new: int
) -> dict[str, Any]:
    """Medians over rounds, after one that is not counted; times of first tokens and between tokens over all streams."""
    rates, first, between = list[float](), list[float](), list[float]()
    for number in range(rounds + 1):
        began, arrivals = await round_of(lambda i, number=number: begin(number, i), streams)  # type: ignore[misc]
        for each in arrivals:
            if each[-1][1] != new:
                raise SystemExit(f"a stream had {each[-1][1]} tokens, not {new}")
        if not number:
            continue
        rates.append(streams * new / (max(each[-1][0] for each in arrivals) - began))
        first += [each[0][0] - began for each in arrivals]
        between += [(each[-1][0] - each[0][0]) / (new - 1) for each in arrivals]
    return {
        "tokens_per_s": float(np.median(rates)),
        "first_ms": float(np.median(first)) * 1e3,
        "first_p99_ms": float(np.percentile(first, 99)) * 1e3,
        "between_ms": float(np.median(between)) * 1e3,
        "between_p99_ms": float(np.percentile(between, 99)) * 1e3,
    }


def prompt(args: argparse.Namespace, streams: int, number: int, i: int) -> list[int]:
    vocabulary = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    return np.random.default_rng([streams, number, i]).integers(16, vocabulary, size=args.prompt_tokens).tolist()


def rounds(streams: int) -> int:
    return 5 if streams == 1 else 3


def wait_for(address: str) -> None:
    """Until it answers with 200: processes of HTTP hear of the engine a moment after it is there."""
    until = time.monotonic() + READY
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:  # an HTTPError is one
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def by_aiperf(args: argparse.Namespace, host: str, port: int, streams: int) -> dict[str, Any]:
    """What AIPerf measures of the same server: as many tokens a request, as many streams, prompts of its own."""
    count = streams * (1 + rounds(streams))
    with tempfile.TemporaryDirectory() as artifacts:
        command = [*args.aiperf.split(), "profile", "--model", args.folder.name, "--url", f"http://{host}:{port}"]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count", "--ui", "none"]
        command += ["--tokenizer", args.folder, "--concurrency", streams, "--request-count", count]
        command += ["--num-dataset-entries", count, "--random-seed", 1000 + streams, "--artifact-dir", artifacts]
        command += ["--synthetic-input-tokens-mean", args.prompt_tokens, "--synthetic-input-tokens-stddev", 0]
        command += ["--output-tokens-mean", args.new_tokens, "--output-tokens-stddev", 0]
        command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", f"temperature:{args.temperature}"]
        command += ["--no-server-metrics", "--no-gpu-telemetry"]
        # As it was seen to run: on asyncio's own loop, and without this process's packages.
        environment = os.environ | {"AIPERF_SERVICE_DISABLE_UVLOOP": "true", "PYTHONPATH": args.aiperf_path or ""}
        run = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"aiperf has failed ({run.returncode}): {(run.stdout + run.stderr)[-4000:]}")
        found = json.loads((pathlib.Path(artifacts) / "profile_export_aiperf.json").read_text())
    if found.get("error_summary"):
        raise SystemExit(f"aiperf met errors: {found['error_summary']}")
    first, between = found["time_to_first_token"], found["inter_token_latency"]
    return {
        "tokens_per_s": found["output_token_throughput"]["avg"],
        "first_ms": first["p50"],
        "first_p99_ms": first["p99"],
        "between_ms": between["p50"],
        "between_p99_ms": between["p99"],
    }


def through_server(args: argparse.Namespace) -> dict[str, dict[int, dict[str, Any]]]:
    """What clients see of one server: ours, and AIPerf after them if it is asked for."""
    command = [sys.executable, "-m", "dsv4_jax", "serve", "--checkpoint", args.folder, "--port", 0, "--no-page"]
    command += ["--max-requests", max(args.streams), "--max-context", args.context, "--chunk", args.chunk]
    began = time.perf_counter()
    with subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if found := re.search(r"http://([\w.]+):(\d+)/ serves", line):
                    break
            else:
                raise SystemExit(f"the server has ended: {server.wait()}")
            say(f"a server after {time.perf_counter() - began:.1f} s")
            host, port = found[1], int(found[2])
            wait_for(f"http://{host}:{port}/ready")

            async def all_rounds() -> dict[int, dict[str, Any]]:
                out = {}
                for streams in args.streams:

                    def begin(number: int, i: int, streams: int = streams) -> AsyncIterator[int]:
                        request: dict[str, Any] = dict(model=args.folder.name, max_tokens=args.new_tokens, stream=True)
                        request |= dict(prompt=prompt(args, streams, number, i), temperature=args.temperature, seed=i)
                        request |= dict(ignore_eos=True, stream_options={"include_usage": True})
                        return streamed(host, port, request)

                    out[streams] = await measured(begin, streams, rounds(streams), args.new_tokens)
                    say(f"server, {streams} streams: {out[streams]}")
                return out

            out = {"server": asyncio.run(all_rounds())}
            if args.aiperf:
                out["aiperf"] = {}
                for streams in args.streams:
                    out["aiperf"][streams] = by_aiperf(args, host, port, streams)
                    say(f"aiperf, {streams} streams: {out['aiperf'][streams]}")
            return out
        finally:
            server.terminate()
            server.communicate()


def through_engine(args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """The same requests, in this process, whose loop reads the handles."""
    from dsv4_jax.engine import Engine, Prompt
    from dsv4_jax.model import Sampling

    options: dict[str, Any] = dict(max_requests=max(args.streams), max_context=args.context, chunk_tokens=args.chunk)
    with Engine.load(args.folder, freeze=True, **options) as engine:
        engine.warm_up()

        async def tokens(what: Prompt) -> AsyncIterator[int]:
            count = 0
            async for output in engine.add(what):
                if output.tokens:
                    count += len(output.tokens)
                    yield 0
            yield count

        async def all_rounds() -> dict[int, dict[str, Any]]:
            out = {}
            for streams in args.streams:

                def begin(number: int, i: int, streams: int = streams) -> AsyncIterator[int]:
                    how = Sampling(args.temperature, seed=i)
                    ids = prompt(args, streams, number, i)
                    return tokens(Prompt(tokens=ids, max_new_tokens=args.new_tokens, sampling=how))

                out[streams] = await measured(begin, streams, rounds(streams), args.new_tokens)
                say(f"engine, {streams} streams: {out[streams]}")
            return out

        return asyncio.run(all_rounds())


def draw(args: argparse.Namespace) -> dict[str, Any]:
    from bench_generate import checkpoint
    from harness import jax_device

    from dsv4_jax.bench.step import StepOptions

    checkpoint(StepOptions(model=args.model, layers=args.layers, context=args.context), args.folder)
    return jax_device()


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--model", choices=("flash", "pro", "tiny"), default="flash")
    command.add_argument("--layers", type=int, default=4)
    command.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    command.add_argument("--prompt-tokens", type=int, default=1024)
    command.add_argument("--new-tokens", type=int, default=256)
    command.add_argument("--chunk", type=int, default=2048)
    command.add_argument("--temperature", type=float, default=1.0)
    command.add_argument("--tokenizer", type=pathlib.Path, required=True, help="tokenizer.json of what is served")
    command.add_argument("--aiperf", metavar="COMMAND", help="how AIPerf is called: aiperf, python -m aiperf")
    command.add_argument("--aiperf-path", metavar="PYTHONPATH", help="where AIPerf finds its packages")
    command.add_argument("--part", choices=("draw", "engine"), help=argparse.SUPPRESS)
    command.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = command.parse_args()
    args.context = args.prompt_tokens + args.new_tokens + 1
    if args.part:
        found = {"draw": draw, "engine": through_engine}[args.part](args)
        print(json.dumps(found))
        return

    with tempfile.TemporaryDirectory() as name:
        args.folder = pathlib.Path(name) / "checkpoint"
        args.folder.mkdir()

        def part(what: str) -> dict[str, Any]:
            again = [sys.executable, __file__, *sys.argv[1:], "--part", what, "--folder", args.folder]
            run = subprocess.run([*map(str, again)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
            return json.loads(run.stdout.splitlines()[-1])

        how = part("draw")
        shutil.copy(args.tokenizer, args.folder / "tokenizer.json")
        vocabulary = json.loads((args.folder / "config.json").read_text())["vocab_size"]
        known = len(json.loads(args.tokenizer.read_text())["model"]["vocab"])
        if known < 0.9 * vocabulary:  # random weights draw all ids, and one without a text makes no event
            raise SystemExit(f"--tokenizer has {known} tokens of {vocabulary}: first tokens would be said late")
        flags = f"--model {args.model} --layers {args.layers}" + " --aiperf aiperf" * bool(args.aiperf)
        recorder = Recorder(args.json, command=f"python benchmarks/bench_serve.py {flags}", **how)
        clients, engine = through_server(args), part("engine")
        for streams in args.streams:
            alone, served = engine[str(streams)], clients["server"][streams]
            through = {"engine": alone} | {name: found[streams] for name, found in clients.items()}
            for row in ({"through": name} | each for name, each in through.items()):
                sizes = dict(prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, temperature=args.temperature)
                recorder.add("serve", model=args.model, layers=args.layers, streams=streams, **sizes, **row)
            share = alone["tokens_per_s"] / served["tokens_per_s"] - 1
            more = served["between_ms"] - alone["between_ms"]
            say(f"{streams} streams: over the engine {share:+.1%} of time a token, {more:+.3f} ms between tokens")


if __name__ == "__main__":
    main()
