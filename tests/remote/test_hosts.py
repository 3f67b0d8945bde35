"""docs/hosts.md: two processes of one `jax.distributed` world, each with a manager and a cache of its own."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

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


@pytest.mark.slow
def test_a_world_ends_soon_after_one_of_it_was_killed() -> None:
    """Within the time that was given, not within jax's 100 s."""
    code = "\n".join(
        (
            "import sys, time, jax",
            "jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), heartbeat_timeout_seconds=5)",
            "print(len(jax.devices()), flush=True)",
            "time.sleep(600)",
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i)], env=environment, text=True, stdout=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None and int(worker.stdout.readline()) >= 2
        workers[1].kill()
        began = time.monotonic()
        assert workers[0].wait(timeout=80), "it goes on as if nothing had happened"
        assert time.monotonic() - began < 60
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def lone(tokens: range) -> int:
    cfg = dsv4.DSV4Config.tiny(layer_types=(dsv4.AttentionType.HCA,), num_hash_layers=0)
    layout, size = dsv4.CacheLayout(cfg), dsv4.CacheSize(num_blocks=4, num_slots=2, max_blocks_per_request=2)
    manager, cache = dsv4.KVCacheManager(layout, size), dsv4.init_cache(layout, size)
    plan = manager.plan_step([(manager.admit_request(tokens), len(tokens))])
    step = jax.jit(dsv4.model.prefill, donate_argnames="cache")
    return int(step(dsv4.model.init_params(cfg), cache, plan.pack(), manager.plan_tokens(plan))[0][0].argmax())
