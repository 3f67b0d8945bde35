"""Strict JAX for every test, eight CPU devices, programs compiled quickly and once, a reason for GPU tests not run.

What `make test` runs: on Python 3.12 every test that is not marked slow, and of one with several parameters as many
cases as show each value of each of them; on the others, of the rooms in `VERSION_ROOMS`, which may differ with Python
or jax, the first case of each test. A test marked every_case has all of its cases wherever it runs. RUN_SLOW=1
(`make test-all`) runs everything on every Python.
Tests run on the CPU unless JAX_PLATFORMS says otherwise: `JAX_PLATFORMS=cuda,cpu pytest -m gpu`. Of several GPUs each
of xdist's processes sees the one that stands at its place in DSV4_TEST_GPUS, such as "0,0,1,1".
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "DSV4_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    own = os.environ["DSV4_TEST_GPUS"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = own[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(own)]
# Most of a test's time is compiling, and most of that LLVM's optimisations and MLIR's fusion emitters, a pass manager
# for each fusion: the CPU does without the former, except in `harness.optimised_write_step` or if XLA_FLAGS asks for
# them, and without the latter but where bits are looked at (`_users_emitters`). jax 0.12 has no other emitters.
# A program is one module of LLVM's, not 32. Eight devices for the sharding tests. One thread each: tests run in several
# processes already.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        if os.environ["JAX_PLATFORMS"] == "cpu"
        else "",
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_multi_thread_eigen=false",
    ]
).strip()

import hypothesis
import jax
import pytest
from jax._src import compiler
from jax._src.lru_cache import LRUCache

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.disable()  # until the tests are imported (pytest_collection_finish)

# What one test compiled the next ones load, also those of other processes, which find this folder in the environment.
# A key holds the program, its options and jaxlib's version.
if os.environ["JAX_PLATFORMS"] == "cpu" and not jax.config.jax_compilation_cache_dir:
    compiled = tempfile.mkdtemp(prefix="dsv4-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    for option, value in (
        ("jax_compilation_cache_dir", compiled),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(option, value)
        os.environ[option.upper()] = str(value)


def put_whole(cache: LRUCache, key: str, value: bytes, put: Callable[..., None] = LRUCache.put) -> None:
    """As jax's, which writes in place: no other process or thread may find half an entry."""
    own, wanted = f"{key}.{os.getpid()}.{threading.get_ident()}", cache.path / f"{key}-cache"
    if not wanted.exists():
        put(cache, own, value)
        (cache.path / f"{own}-cache").replace(wanted)


LRUCache.put = put_whole

users_emitters = True


def compile_options(*args, env_options_overrides=None, make=compiler.get_compile_options, **options):
    """As jax's; in the rooms of which `_users_emitters` says so with the fusion emitters of users' programs."""
    if users_emitters:
        env_options_overrides = {"xla_backend_extra_options": ""} | (env_options_overrides or {})
    return make(*args, env_options_overrides=env_options_overrides, **options)


if os.environ["JAX_PLATFORMS"] == "cpu":
    compiler.get_compile_options = compile_options

# Each new shape is a compile, so an example may take seconds; the same examples every time.
hypothesis.settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("explore", parent=hypothesis.settings.get_profile("project"), derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))


# What Pythons other than 3.12 run, and why; paths under tests/. What has no line here depends on neither: numbers,
# decisions of the host, bytes that are compared on 3.12 (`test_invariance.py` compares some on every jax).
VERSION_ROOMS = {
    "bench/test_measure.py": "the profiler's traces; torch is there on 3.11 alone",
    "cli/test_cli.py": "every command starts",
    "cli/test_generate.py": "tokenizers is there on 3.11 alone",
    "cuda": "FFI calls, their attributes and layouts",
    "formats": "casts to fp8 and bf16",
    "manager/prefix/test_hashing_keys.py": "enums, huge integers",
    "manager/test_interrupted.py": "exceptions at any line of the interpreter",
    "manager/test_pickling.py": "what pickle does with classes",
    "manager/test_odd_types.py": "conversions of NumPy's and Python's types",
    "model/test_decode_loop.py": "loops with a donated cache",
    "model/test_hf_config.py": "transformers is there on 3.11 alone",
    "model/test_hf_equivalence.py": "torch and transformers are there on 3.11 alone",
    "pallas/test_append.py": "lowering and interpret mode",
    "pallas/test_compress.py": "lowering and interpret mode",
    "test_invariance.py": "the bits of compiled steps",
    "test_jax_tools.py": "export, checkify, shardings, pickled arrays",
    "test_no_copies.py": "donation, aliasing, the text of compiled programs",
    "test_packaging.py": "imports, the pinned environment",
    "test_promises.py": "strict promotion, what public calls return",
    "test_public_names.py": "imports",
    "test_sharding.py": "meshes and shard_map",
    "text": "tokenizers is there on 3.11 alone",
    "tiers/test_async_swap.py": "transfers",
    "tiers/test_swap.py": "FFI, memory kinds",
    "transports": "jax's transfers; NIXL is there on 3.11 alone",
    "triton": "the optional package",
}
# Files of half a minute and more: begun first, so that no process is left alone with one at the end. The order is
# theirs only with --no-loadscope-reorder, as in the Makefile.
LONG = (
    "docs/test_blocks.py",
    "model",
    "pallas",
    "serving",
    "test_jax_tools.py",
    "test_no_copies.py",
    "test_own_model.py",
    "test_state_machine.py",
    "test_toy_format.py",
    "test_wheel.py",
)
# What compares bits of programs that XLA compiled in different ways: with the fusion emitters of users' programs also
# on a push. They cost a third of a test's time, and what the other rooms compare does not depend on them.
BITS = (
    "cuda",
    "formats",
    "ops",
    "pallas",
    "test_invariance.py",
    "test_promises.py",
    "test_sharding.py",
    "triton",
)
# Models and what runs them: the largest programs, without users' emitters in `make test-all` too.
WHOLE_PROGRAMS = (
    "bench",
    "cli",
    "docs/test_blocks.py",
    "model",
    "serving",
    "test_jax_tools.py",
    "test_no_copies.py",
    "test_own_model.py",
    "test_train_small.py",
)
TESTS = pathlib.Path(__file__).parent
MAX_MAPS = 20_000  # of 65,530; a large file's programs take 5,000
ALL = bool(os.environ.get("RUN_SLOW"))
WHOLE = ALL or sys.version_info[:2] == (3, 12)


def pytest_configure() -> None:
    if missing := [room for room in (*VERSION_ROOMS, *LONG, *BITS, *WHOLE_PROGRAMS) if not (TESTS / room).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names rooms that do not exist: {', '.join(missing)}")


@pytest.fixture(scope="module", autouse=True)
def emitters(request: pytest.FixtureRequest) -> None:
    """Those of the room: programs that the others made are forgotten."""
    global users_emitters
    if os.environ["JAX_PLATFORMS"] == "cpu" and users_emitters != _users_emitters(request.path):
        users_emitters = not users_emitters
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forgets compiled programs before a process has more of their pages mapped than Linux allows, and crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Files of which nothing would be kept are not even imported."""
    if not WHOLE and collection_path.name.startswith("test_") and not _in(collection_path, tuple(VERSION_ROOMS)):
        return True
    return None


@functools.cache
def _in(path: pathlib.Path, rooms: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(TESTS / room) for room in rooms)


def _users_emitters(path: pathlib.Path) -> bool:
    return _in(path, BITS) or (ALL and not _in(path, WHOLE_PROGRAMS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Of the long ones and of the others those first that are compiled alike: see `emitters`.
    items.sort(key=lambda item: (not _in(item.path, LONG), _users_emitters(item.path)))
    if not ALL:
        shown: dict[str, set[tuple[str, str]]] = {}
        kept = [item for item in items if _on_push(item, shown)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    _skip_without_gpu(items)


def pytest_collection_finish() -> None:
    """What is imported stays: garbage is looked for in what tests make, and not after every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def _on_push(item: pytest.Item, shown: dict[str, set[tuple[str, str]]]) -> bool:
    """Whether `make test` runs this case; `shown` has the values of parameters that earlier cases of each test have."""
    if item.get_closest_marker("gpu"):
        return WHOLE  # they are asked for by name, and skipped with a reason where there is no GPU
    if item.get_closest_marker("slow") or not (WHOLE or _in(item.path, tuple(VERSION_ROOMS))):
        return False
    if not hasattr(item, "callspec") or item.get_closest_marker("every_case"):
        return True
    if not WHOLE:
        return not any(item.callspec.indices.values())
    values = {(name, _text(value)) for name, value in item.callspec.params.items()}
    seen = shown.setdefault(item.nodeid.partition("[")[0], set())
    fresh = not values <= seen
    seen |= values
    return fresh


def _text(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # some parameters are objects that refuse
        return f"{type(value)} {id(value)}"


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if "cuda" not in os.environ["JAX_PLATFORMS"] and "gpu" not in os.environ["JAX_PLATFORMS"]:
        reason = "needs a GPU: set JAX_PLATFORMS=cuda,cpu to run it"
    elif jax.default_backend() != "gpu":
        reason = f"needs a GPU: JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} has none"
    else:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
