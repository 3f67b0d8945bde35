"""Dynamo workers for tests, without a model: `python -m tests.integrations.workers shadow --checkpoint DIR ...`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config
from dsv4_jax.engine import Core, Engine, Limits, ShadowExecutor, shapes_of
from dsv4_jax.integrations.dynamo import DynamoWorker, main
from dsv4_jax.manager import CachePolicy, EventLog, KVCacheManager

VOCAB = 129_280  # V4's


class SleepyExecutor(ShadowExecutor):
    """It has no memory to give up."""

    def sleep(self, leave: Callable[[], object]) -> None:
        leave()

    def wakeup(self) -> None:
        pass


class ShadowWorker(DynamoWorker):
    """Real managers; draws ids that say whether it was fed the right ones."""

    def build(self):
        cfg = DSV4Config.tiny(layer_types=tuple(AttentionType), vocab_size=VOCAB)
        layout = CacheLayout(cfg, "f32", "f32", block_tokens=16)
        size = CacheSize(600, 4, 128, num_snapshots=60)
        manager = KVCacheManager(layout, size, policy=CachePolicy(), events=EventLog(details=True))
        shapes = shapes_of([manager], 128)
        executor = SleepyExecutor(shapes, VOCAB, on_get=lambda: time.sleep(0.02))  # a step: streams take a while
        return Engine(Core(manager, shapes), executor), None


class ByteWorker(DynamoWorker):
    """Real managers, host pages and hand-offs: one wrong byte is a wrong answer. Ids are modulo its vocabulary."""

    def build(self):
        from tests.engine.test_handoffs import ByteExecutor

        executor = ByteExecutor(0, 120, 240, seed=0)
        core = Core(
            executor.bytes.manager,
            executor.shapes,
            limits=Limits(patience=60.0, lease=60.0),
            remote=executor.driver,
        )
        return Engine(core, executor), executor.transport

    def prompt(self, request):
        from tests.remote.byte_engine import VOCAB

        request["token_ids"] = [token % VOCAB for token in request["token_ids"]]
        return super().prompt(request)


if __name__ == "__main__":
    main(sys.argv[2:], {"shadow": ShadowWorker, "bytes": ByteWorker}[sys.argv[1]])
