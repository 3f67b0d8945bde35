"""docs/hosts.md: two processes of one `jax.distributed` world, each with a manager and a cache of its own."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import pytest

import dsv4_jax as dsv4

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "hosts.md").read_text()


@pytest.mark.slow
def test_two_processes_draw_what_one_without_a_world_draws(tmp_path: pathlib.Path) -> None:
    (code,) = re.findall(r'```py title="worker.py"\n(.*?)```', TEXT, re.S)
    (tmp_path / "worker.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if cached := jax.config.jax_compilation_cache_dir:
        environment |= {"JAX_COMPILATION_CACHE_DIR": cached, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    workers = [
        subprocess.Popen(
            [sys.executable, tmp_path / "worker.py", address, "2", str(i)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]
    try:
        said = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    for i, (out, _) in enumerate(said):
        index, processes, local, devices, drawn = map(int, out.split())
        assert (index, processes, devices) == (i, 2, 2 * local)
        assert drawn == lone(range(10 * i, 10 * i + 5))


def lone(tokens: range) -> int:
    cfg = dsv4.DSV4Config.tiny(layer_types=(dsv4.AttentionType.HCA,), num_hash_layers=0)
    layout, size = dsv4.CacheLayout(cfg), dsv4.CacheSize(num_blocks=4, num_slots=2, max_blocks_per_request=2)
    manager, cache = dsv4.KVCacheManager(layout, size), dsv4.init_cache(layout, size)
    plan = manager.plan_step([(manager.admit_request(tokens), len(tokens))])
    step = jax.jit(dsv4.model.prefill, donate_argnames="cache")
    return int(step(dsv4.model.init_params(cfg), cache, plan.pack(), manager.plan_tokens(plan))[0][0].argmax())
