"""Compiles a whole decode step for an H200 on a machine without a GPU, and lists its kernels.

    pip install --no-deps --target DIR jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION     # of the jax in use
    PYTHONPATH=.:DIR JAX_PLATFORMS=cpu python benchmarks/compile_step.py [--layers 6] [--json] [--whole]
    PYTHONPATH=.:DIR JAX_PLATFORMS=cpu python benchmarks/compile_step.py --xla xla_gpu_enable_triton_gemm=true

Shows what XLA makes of a step before any device time is spent on it: kernels of each kind, whether the cache is
updated in place, temporaries. The step is the attention stack that `bench step` times; with --whole it is
`model.decode_step` with weights as released, and launches are also counted by layer (what a step does once is counted
with the layer it stands in). With `csrc/` built the CUDA kernels are in it; XLA cannot know here that they may go into
a command buffer, and searches no tilings, so neither shows.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dsv4_jax import ffi, model
from dsv4_jax.bench.model import jitted_over, mesh_of
from dsv4_jax.bench.step import StepOptions, neutral_layers, set_up
from dsv4_jax.cache import init_cache
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS
from dsv4_jax.model.weights.packing import PackedLayers
from dsv4_jax.model.weights.placement import device_specs
from dsv4_jax.model.weights.split import RowShare
from dsv4_jax.ops.exchange import Peers

# What XLA wants to know of a device, as a text proto of its GpuTargetConfigProto.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  device_memory_size: 149000000000
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9  minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
NO_KERNEL = {"parameter", "get-tuple-element", "bitcast", "constant", "tuple"}
LAUNCHES = {"dsv4_moe": 4, "dsv4_moe_e4m3": 5}  # of a custom call, if not one; of the experts of a single token three
OF_BLOCK = "dsv4_hyper_connection"  # what a block begins with


def compile_step(options: StepOptions, whole: bool = False) -> tuple[Any, int]:
    """Compiles a step; returns the executable, and the bytes that must be aliased."""
    topology = f"1x1x{options.devices}"
    devices = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology=topology).devices
    mesh = mesh_of(options, devices)
    sharding = SingleDeviceSharding(devices[0]) if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    jax.default_backend = lambda: "gpu"  # ops pick their kernels by these two
    ffi._capabilities = lambda: {"9.0"}
    if ffi.cuda_problem() is not None:
        print("without the CUDA kernels:", ffi.cuda_problem())

    def abstract(tree: Any, where: Any = sharding, parts: int = 1) -> Any:
        """Returns the shapes of all devices' arrays from those of one device."""

        def whole(x: Any) -> jax.ShapeDtypeStruct:
            shape = (parts * x.shape[0], *x.shape[1:]) if parts > 1 else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)

        return jax.tree.map(whole, tree)

    def of_all(node: Any) -> Any:
        """Returns a part of all devices' parameters from that of one device."""
        assert mesh is not None
        if isinstance(node, RowShare):
            where = NamedSharding(mesh, node.partition)
            return dataclasses.replace(node, rows=abstract(node.rows, where, options.split.tensor))
        if not isinstance(node, PackedLayers):
            return abstract(node, NamedSharding(mesh, PartitionSpec()))
        axes = tuple((axis, mesh.shape[axis]) for axis in ("tensor", "data"))
        where = NamedSharding(mesh, PartitionSpec(("tensor", "data")))
        return dataclasses.replace(node, arrays=abstract(node.arrays, where, options.devices), axes=axes)

    layout, size, plan, step = set_up(options)
    call: Any = step
    cache = abstract(jax.eval_shape(lambda: init_cache(layout, size)), parts=options.split.data)
    if whole:
        params = device_specs(
            options.config(), split=options.split, drafts=options.drafts > 0, numerics=options.numerics
        )
        params = abstract(params) if mesh is None else {name: of_all(node) for name, node in params.items()}
        call, known = model.prefill if options.chunk > 1 else model.decode_step, options.batch * options.fed
        if options.drafts:
            how: Any = dict(drafts=np.full(size.num_slots, options.drafts, np.int32), width=options.drafts)
            call = functools.partial(model.draft_step, **how)
            if options.loop > 1:
                call, known = functools.partial(model.draft_loop, num_steps=options.loop, **how), options.batch
        tokens = jax.ShapeDtypeStruct((known,), jnp.int32)
        operands, donated = (params, cache, *abstract((plan, tokens))), (1,)
        bytes_in_place = layout.total_bytes(size)
    else:
        x = jax.ShapeDtypeStruct((options.batch * options.chunk, options.config().hidden_size), jnp.float32)
        layers = jax.eval_shape(lambda: neutral_layers(options.config()))
        operands, donated = (cache, *abstract((layers, plan, x))), (0, 3)
        bytes_in_place = layout.total_bytes(size) + 4 * x.size
    sizes = {"data": options.split.data, "tensor": options.split.tensor}
    peers = [Peers(i, (axis,), size, 8 << 20, 4) for i, (axis, size) in enumerate(sizes.items()) if size > 1]
    # Pallas asks for the device, too.
    seen = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"))
    with jax.sharding.use_abstract_mesh(seen) if mesh is None else contextlib.nullcontext():
        jitted = jax.jit(call, donate_argnums=donated) if mesh is None else jitted_over(mesh, call, {}, peers)
        lowered = jitted.trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=GPU_DECODE_OPTIONS | dict(options.xla)), bytes_in_place


def kernels(text: str) -> list[str]:
    """Lists what the entry computation launches, in order: a custom call's target, or the name of a fusion.

    Of a fusion around a custom call, which gives it the address of a part of an array: the call's target. Of calls
    that are joined (`ops.in_sequence`): each.
    """
    inside = dict(
        re.findall(r'^%([\w.\-]+) \((?:[^\n]*\n)(?:  [^\n]*\n)*?[^\n]*custom_call_target=("[^\n]*)', text, re.M)
    )
    found = []
    for line in text[text.rindex("\nENTRY ") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(", line)
        if match and match[2] not in NO_KERNEL:
            target, calls = re.search(r'custom_call_target="([^"]+)"', line), re.search(r"calls=%([\w.\-]+)", line)
            called = inside.get(calls[1] if calls else "")
            name = called.split('"')[1] if called else target[1] if target else re.sub(r"[._]\d+", "", match[1])
            joined = re.search(r'targets = "([^"]*)"', called or line)
            for each in joined[1].split(";") if joined else [name]:
                found += [each] * LAUNCHES.get(each, 1)
    return found


def by_layer(launched: list[str]) -> dict[str, list[int]]:
    """Counts launches of each layer, from one hyper-connection to that two on, by the kind of the layer."""
    starts = [i for i, name in enumerate(launched) if name == OF_BLOCK][::2]
    found: dict[str, list[int]] = {}
    for first, last in itertools.pairwise(starts):
        kinds = [kind for kind in ("csa", "hca") if f"dsv4_compress_{kind}" in launched[first:last]]
        found.setdefault((kinds or ["swa"])[0], []).append(last - first)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flash", "pro"), default="flash")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=128 * 1024)
    parser.add_argument("--chunk", type=int, default=1, help="tokens of each request")
    parser.add_argument("--layers", type=int, default=6, help="only the first N")
    parser.add_argument("--devices", type=int, default=1, help="with --whole")
    parser.add_argument("--tensor", type=int, default=1, help="devices with the same requests")
    parser.add_argument("--whole", action="store_true", help="the whole model, weights as released")
    parser.add_argument("--numerics", choices=("plain", "released"), default="plain", help="with --whole")
    parser.add_argument("--drafts", type=int, default=0, help="with --whole")
    parser.add_argument("--draft-head", choices=("mtp", "dspark"), default="mtp", help="what makes them")
    parser.add_argument("--loop", type=int, default=1, help="steps of a call with drafts")
    parser.add_argument("--xla", action="append", default=[], metavar="OPTION=VALUE", help="compiler option")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    words = {"true": True, "false": False}
    xla = tuple((name, words.get(value, value)) for name, _, value in (option.partition("=") for option in args.xla))
    executable, in_place = compile_step(
        StepOptions(
            args.model,
            args.batch,
            args.context,
            args.chunk,
            layers=args.layers,
            xla=xla,
            devices=args.devices,
            tensor=args.tensor,
            drafts=args.drafts,
            draft_head=args.draft_head,
            loop=args.loop,
            numerics=args.numerics,
        ),
        args.whole,
    )
    memory = executable.memory_analysis()
    launched = kernels(executable.as_text())
    report = {
        "layers": args.layers,
        "kernels": len(launched),
        "cache_in_place": memory.alias_size_in_bytes == in_place,
        "temp_bytes": memory.temp_size_in_bytes,
        "by_name": dict(collections.Counter(launched).most_common()),
        "by_layer": by_layer(launched) if args.whole else None,
        "order": launched,
    }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(
        f"{report['kernels']} kernels in {args.layers} layers, cache in place: {report['cache_in_place']}, "
        f"{report['temp_bytes'] / 1e6:.1f} MB of temporaries"
    )
    for kind, counts in (report["by_layer"] or {}).items():
        print(f"{kind} layers: {', '.join(map(str, counts))}")
    for name, count in report["by_name"].items():
        print(f"{count:5} {name}")


if __name__ == "__main__":
    main()
