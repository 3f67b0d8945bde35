"""A checkpoint from local disk to several GPUs, and `generate` over them: the tokens of one GPU.

    python benchmarks/generate_mesh.py --layers 6 --folder DIR --json generate.json

The first layers of a model and the MTP layer, drawn on one device and written in the released formats. It is loaded to
one device and over meshes: heads split, experts split. Prompts are continued one step a call, eight steps a call, and
with two drafts in loops of eight; every token must be that of one device, of the same kind of call.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from dsv4_jax import CacheLayout, CacheSize, KVCacheManager, cache_sharding, init_cache, model
from dsv4_jax.bench.model import model_config
from dsv4_jax.bench.step import StepOptions
from dsv4_jax.ops.exchange_buffers import open_exchanges

KINDS: dict[str, dict[str, Any]] = {
    "steps": {},
    "eight a call": {"decode_steps": 8},
    "drafts, eight a call": {"drafts": 2, "decode_steps": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flash")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--times", action="store_true", help="a second time, for tokens a second")
    parser.add_argument("--folder", type=pathlib.Path, help="for the checkpoint (default: a temporary one)")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"model": args.model, "layers": args.layers, "devices": args.devices}
    cfg = model_config(StepOptions(args.model, layers=args.layers, context=256, drafts=1))
    rng, lengths = np.random.default_rng(0), range(3, 3 + 17 * args.prompts, 17)
    prompts = [rng.integers(cfg.vocab_size, size=n).tolist() for n in lengths]
    wrong = 0

    def note(what: str, value: float) -> None:
        report[what] = round(value, 3)
        print(f"{what}: {value:.3f}", flush=True)

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, start = pathlib.Path(name), time.perf_counter()
        params: Any = jax.block_until_ready(model.init_params(cfg, 0, "released", drafts=True))
        note("drawn, s", time.perf_counter() - start)
        start = time.perf_counter()
        model.save_hf(cfg, params, folder)
        params, size = None, sum(file.stat().st_size for file in folder.iterdir())
        note("checkpoint, GB", size / 1e9)
        note("written, GB/s", size / 1e9 / (time.perf_counter() - start))
        expected: dict[str, Any] = {}
        for split in (None, model.Split(1, args.devices), model.Split(args.devices, 1)):
            mesh = None if split is None else split.mesh()
            where = "one device" if split is None else f"data {split.data}, tensor {split.tensor}"
            start = time.perf_counter()
            _, params = model.load_hf(folder, weights="released", packed=mesh is None, drafts=True, mesh=mesh)
            jax.block_until_ready(params)
            note(f"loaded to {where}, GB/s", size / 1e9 / (time.perf_counter() - start))
            layout = CacheLayout(cfg, include_drafts=True, draft_tokens=2)
            shards = 1 if split is None else split.data
            size_of = CacheSize(32, args.prompts // shards, 2)
            with open_exchanges(mesh) as opened:
                for kind, how in KINDS.items():
                    drawn: list[list[int]] = []
                    for timed in (False, True)[: 1 + args.times]:  # the first compiles
                        managers = [KVCacheManager(layout, size_of) for _ in range(shards)]
                        sharding = None if mesh is None else cache_sharding(layout, mesh)
                        cache = init_cache(layout, size_of, sharding=sharding)
                        start = time.perf_counter()
                        drawn, cache = model.generate(
                            params, cache, managers, prompts, max_new_tokens=args.new_tokens, exchanges=opened, **how
                        )
                        if timed:
                            note(f"{where}, {kind}, tokens/s", sum(map(len, drawn)) / (time.perf_counter() - start))
                    expected.setdefault(kind, drawn)
                    differ = [i for i, tokens in enumerate(drawn) if tokens != expected[kind][i]]
                    wrong += bool(differ)
                    print(f"{where}, {kind}: {f'WRONG, prompts {differ}' if differ else 'equal'}", flush=True)
            report[f"{where}, exchange"] = "cuda" if opened else "xla"
            params = cache = None
        report["kinds of calls that differ"] = wrong
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("every token is one device's" if not wrong else f"{wrong} kinds of calls differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
