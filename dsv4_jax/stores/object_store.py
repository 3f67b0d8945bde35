"""`ObjectStore`: records as objects of any tensorstore KvStore: file, memory, S3, GCS, OCDBT.

For those who outgrow one disk: several machines may share one bucket. A record is one object, named by its key in
hexadecimal, holding a `RecordHeader` (generation 0) and the bytes; values are copied once each
way, because tensorstore's are `bytes`. There is no bound and no eviction here: buckets have lifecycle rules for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..checks import check_integer, check_seconds
from ..errors import StoreBusyError, StoreError, StoreFormatError
from .base import Buffers, Flags, StoreStats
from .checks import check_keys, check_process, check_records
from .checksum import checksum
from .record_header import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    VERSION,
    RecordHeader,
    fingerprint_digest,
    header_version,
    pack_header,
    unpack_header,
)

__all__ = ["ObjectStore"]

_MAX_SHUNNED = 4096
_LEFTOVER = re.compile(r"([0-9a-f]+|manifest\.ocdbt)\.__lock")  # of a record, or of OCDBT's own files


class ObjectStore:
    """A `RecordStore` over a tensorstore KvStore.

    Give each layout its own path: a record of another layout under the same key is refused and counted as `foreign`
    when it is read, and replaced when the key is written, so two layouts in one place work, but evict each other. So
    is one of another version of the format, of which the store warns once.

    A writer of files that is killed leaves what it has written beside the file's name (`.__lock`). Who opens the place
    removes what is older than the deadline of a call, by tensorstore's own locking: no writer that lives is disturbed.

    What is in the place is not trusted with more than misses: of an object no more is read than a record has, and one
    that cannot be read, or is no file where files are kept (a FIFO, say), is a miss. A call raises only if it could
    read nothing. An object that has not answered for `patience` seconds, while others have, is a miss as well, and is
    not asked for again for `deadline` seconds: it costs nobody else's record.

    Args:
        spec: a tensorstore KvStore spec, such as `{"driver": "s3", "bucket": "b", "path": "kv/"}` or `"file:///x/"`.
        record_bytes, fingerprint, key_bytes: as of `SlabStore`.
        in_flight: records on their way at once; the memory held is this many records.
        deadline: seconds that a call may take, opening too. What was asked may still happen after it.
        patience: see above.
        clock: what deadlines are measured with, in seconds.

    Attributes:
        kv: the tensorstore KvStore.

    Raises:
        StoreFormatError: a setting of a wrong type or size.
        StoreError: tensorstore is not installed, or cannot open the spec.
        StoreBusyError: the deadline has passed (every call).
    """

    def __init__(
        self,
        spec: Any,
        *,
        record_bytes: int,
        fingerprint: str | bytes,
        key_bytes: int = 32,
        in_flight: int = 64,
        deadline: float = 30.0,
        patience: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.record_bytes = check_integer("record_bytes", record_bytes, 1, error=StoreFormatError)
        self.key_bytes = check_integer("key_bytes", key_bytes, 1, MAX_KEY_BYTES, error=StoreFormatError)
        self._in_flight = check_integer("in_flight", in_flight, 1, error=StoreFormatError)
        self._fingerprint = fingerprint_digest(fingerprint)
        self._deadline, self._clock = check_seconds("deadline", deadline, error=StoreFormatError), clock
        self._patience = check_seconds("patience", patience, error=StoreFormatError)
        self._shunned: dict[bytes, float] = {}  # keys that have not answered, and until when they are not asked for
        self._answered = -math.inf  # when the store last did
        try:
            import tensorstore
        except ImportError as error:
            raise StoreError("ObjectStore needs tensorstore: pip install 'dsv4_jax[storage]'") from error
        try:
            self.kv: Any = tensorstore.KvStore.open(spec).result(timeout=self._deadline)
        except TimeoutError as error:
            raise StoreBusyError(f"cannot open the key-value store {spec!r} within {deadline} s") from error
        except Exception as error:  # tensorstore raises many kinds
            raise StoreError(f"cannot open the key-value store {spec!r}: {error}") from error
        kept = self.kv.spec().to_json() if hasattr(self.kv, "spec") else {}
        self._folder = kept["path"] if kept.get("driver") == "file" else None
        self._warned = False
        self._value_bytes = HEADER_BYTES + self.record_bytes
        self._stats, self._lock, self._closed, self._process = StoreStats(), threading.Lock(), False, os.getpid()
        with contextlib.suppress(StoreError):  # then it stays
            self._remove_leftovers()

    def contains(self, keys: Sequence[bytes]) -> Flags:
        """Reads the headers (128 bytes an object)."""
        until = self._start()
        keys = check_keys(keys, self.key_bytes)
        answers = [answer for batch in self._batches(keys) for answer in self._headers(keys[batch], until)]
        _check_some(answers)
        return np.array([self._is_ours(key, answer) for key, answer in zip(keys, answers, strict=True)], bool)

    def read_into(self, keys: Sequence[bytes], buffers: Buffers) -> Flags:
        until = self._start()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(buffers, len(keys), self.record_bytes, writable=True)
        verdicts: list[str | StoreError] = []
        for batch in self._batches(keys):
            # The last bytes of each: none if it is shorter, and no header if it is longer.
            answers = self._read(keys[batch], slice(-self._value_bytes, None), until)
            found = [self._judge(key, answer) for key, answer in zip(keys[batch], answers, strict=True)]
            for view, answer, verdict in zip(views[batch], answers, found, strict=True):
                if verdict == "good":
                    view[:] = np.frombuffer(answer.value, np.uint8, offset=HEADER_BYTES)
            damaged = {keys[i]: answers[i - batch.start] for i in self._damaged(keys, batch, found, until)}
            with contextlib.suppress(StoreError):  # it stays, and is refused again
                self._remove(damaged, until)
            verdicts += found
        _check_some(verdicts)
        good = np.array([verdict == "good" for verdict in verdicts], bool)
        corrupted, foreign = verdicts.count("corrupted"), verdicts.count("foreign")
        self._count(read=int(good.sum()), missed=int((~good).sum()), corrupted=corrupted, foreign=foreign)
        return good

    def write(self, keys: Sequence[bytes], records: Buffers) -> Flags:
        until = self._start()
        keys = check_keys(keys, self.key_bytes)
        views = check_records(records, len(keys), self.record_bytes, writable=False)
        added = np.zeros(len(keys), bool)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        for batch in self._batches(keys):
            there = self._present(keys[batch], until)
            new = [i for i in range(batch.start, batch.stop) if first[keys[i]] == i and not there[i - batch.start]]
            _check_all(
                self._wait("write", [self.kv.write(_name(keys[i]), self._value(keys[i], views[i])) for i in new], until)
            )
            added[new] = True
        self._count(written=int(added.sum()))
        return added

    def delete(self, keys: Sequence[bytes]) -> Flags:
        until = self._start()
        keys = check_keys(keys, self.key_bytes)
        gone = np.zeros(len(keys), bool)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        for batch in self._batches(keys):
            there = self._present(keys[batch], until)
            _check_all(self._wait("delete", [self.kv.write(_name(key), None) for key in keys[batch]], until))
            gone[batch] = [flag and first[keys[i]] == i for i, flag in enumerate(there, batch.start)]
        self._count(deleted=int(gone.sum()))
        return gone

    def stats(self) -> StoreStats:
        """`records` is -1: an object store does not know."""
        with self._lock:
            return dataclasses.replace(self._stats, records=-1)

    def flush(self) -> None:
        """Nothing to do: tensorstore's writes are durable when they return."""
        self._start()

    def close(self, timeout: float | None = None) -> None:
        """Waits for nothing: calls under way have deadlines of their own."""
        self._closed = True

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, keys: Sequence[Any]) -> list[slice]:
        return [slice(i, min(i + self._in_flight, len(keys))) for i in range(0, len(keys), self._in_flight)]

    def _start(self) -> float:
        """When a call that begins now must have ended. Raises `StoreError`, `StoreBusyError`."""
        check_process(self._process)
        if self._closed:
            raise StoreError("the store is closed")
        return self._clock() + self._deadline

    def _wait(self, what: str, futures: list[Any], until: float) -> list[Any]:
        """What each future gives, be it a `StoreError`. Raises `StoreBusyError`; then the others are called off."""
        answers: list[Any] = []
        try:
            for future in futures:
                try:
                    answers.append(future.result(timeout=max(0.0, until - self._clock())))
                except TimeoutError as error:
                    problem = f"key-value store: {what} did not answer within {self._deadline} s"
                    raise StoreBusyError(problem) from error
                except Exception as error:  # tensorstore raises many kinds
                    answers.append(StoreError(f"key-value store: {what} failed: {error}"))
                    answers[-1].__cause__ = error
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return answers

    def _headers(self, keys: list[bytes], until: float) -> list[Any]:
        return self._read(keys, slice(0, HEADER_BYTES), until)

    def _read(self, keys: list[bytes], part: slice, until: float) -> list[Any]:
        """What each object gives of its bytes, be it a `StoreError`; one that hangs gives one.

        Raises: as `_wait`, if none has answered, or the deadline has passed.
        """
        began = self._clock()
        answers: dict[bytes, Any] = {key: problem for key in keys if (problem := self._problem(key, began))}
        waiting = {key: self.kv.read(_name(key), byte_range=part) for key in keys if key not in answers}
        limit, heard = min(until, began + self._patience), False
        try:
            while waiting:
                before = len(waiting)
                for key, future in list(waiting.items()):
                    try:
                        answers[key] = future.result(timeout=max(0.0, limit - self._clock()))
                    except TimeoutError:
                        continue
                    except Exception as error:  # tensorstore raises many kinds
                        answers[key] = StoreError(f"key-value store: read failed: {error}")
                        answers[key].__cause__ = error
                    del waiting[key]
                now = self._clock()
                if len(waiting) < before:
                    self._answered, heard = now, True
                if not waiting:
                    break
                heard = heard or self._answered > began  # by somebody else
                late = StoreBusyError(f"key-value store: read did not answer within {self._deadline} s")
                if now >= until or (len(waiting) == before and heard):
                    if heard:  # else it is the store, and not these objects
                        self._shun(waiting, now)
                    if now >= until:
                        raise late
                    answers.update(dict.fromkeys(waiting, late))
                    break
                limit = until if len(waiting) == before else min(until, now + self._patience)
        finally:
            for future in waiting.values():
                future.cancel()
        return [answers[key] for key in keys]

    def _problem(self, key: bytes, now: float) -> StoreError | None:
        """Why an object is not asked for."""
        if (until := self._shunned.get(key)) is not None:
            if now < until:
                return StoreError(f"key-value store: {_name(key)} has not answered lately")
            self._shunned.pop(key, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):  # of whatever kind: the store says so
                if not stat.S_ISREG(os.stat(self._folder + _name(key)).st_mode):
                    return StoreError(f"key-value store: {_name(key)} is no file")
        return None

    def _shun(self, keys: Iterable[bytes], now: float) -> None:
        with self._lock:
            self._shunned.update(dict.fromkeys(keys, now + self._deadline))
            while len(self._shunned) > _MAX_SHUNNED:
                del self._shunned[next(iter(self._shunned))]

    def _present(self, keys: list[bytes], until: float) -> list[bool]:
        return [self._is_ours(key, answer) for key, answer in zip(keys, self._headers(keys, until), strict=True)]

    def _is_ours(self, key: bytes, answer: Any) -> bool:
        header = None if isinstance(answer, StoreError) else unpack_header(answer.value)
        return header is not None and (header.key, header.fingerprint) == (key, self._fingerprint)

    def _is_foreign(self, data: bytes) -> bool:
        """Whether an object that begins so is of another layout, or of another version, of which it warns once."""
        version = header_version(data)
        if version not in (None, VERSION):
            if not self._warned:
                self._warned = True
                what = f"has objects of version {version}, only version {VERSION} can be read: they count as foreign"
                warnings.warn(f"the key-value store {what} and are made anew", RuntimeWarning, stacklevel=2)
            return True
        header = unpack_header(data)
        return header is not None and header.fingerprint != self._fingerprint

    def _damaged(self, keys: list[bytes], batch: slice, verdicts: list[str | StoreError], until: float) -> list[int]:
        """Returns indices of the corrupted. Those that begin with the header of another layout, whose records are
        longer or shorter, are "foreign" after all."""
        suspects = [i for i, verdict in enumerate(verdicts, batch.start) if verdict == "corrupted"]
        headers = self._headers([keys[i] for i in suspects], until)
        for i, answer in zip(suspects, headers, strict=True):
            if not isinstance(answer, StoreError) and self._is_foreign(answer.value):
                verdicts[i - batch.start] = "foreign"
        return [i for i in suspects if verdicts[i - batch.start] == "corrupted"]

    def _remove(self, answers: dict[bytes, Any], until: float) -> None:
        """Deletes damaged objects, but only these very copies: somebody may have written good ones since."""
        stamps = {key: answer.stamp for key, answer in answers.items() if not isinstance(answer, StoreError)}
        if short := [key for key in answers if key not in stamps]:  # without a stamp: what was too short has none
            found = self._wait("read", [self.kv.read(_name(key), byte_range=slice(0, 0)) for key in short], until)
            end = slice(-self._value_bytes, None)
            again = self._wait("read", [self.kv.read(_name(key), byte_range=end) for key in short], until)
            for key, whole, answer in zip(short, found, again, strict=True):
                if not isinstance(whole, StoreError) and _is_short(answer):
                    stamps[key] = whole.stamp
        gone = [self.kv.write(_name(key), None, if_equal=stamp.generation) for key, stamp in stamps.items()]
        self._wait("delete", gone, until)

    def _remove_leftovers(self) -> None:
        """Deletes the files that killed writers left.

        Who deletes a key takes its lock, and removes that in any case: so these are deleted on the condition that there
        is no object.
        """
        kv, spec = self.kv, self.kv.spec().to_json()
        folders = [""]
        if spec["driver"] == "ocdbt":
            kv, spec, folders = self.kv.base, spec["base"], ["", "d/"]
        if spec["driver"] != "file":
            return
        names = [name for folder in folders for name in _leftovers(spec["path"], folder, self._deadline)]
        until = self._start()
        absent = self._wait("read", [kv.read(f"{name}.none") for name in names[:1]], until)
        _check_all(absent)
        for batch in self._batches(names):
            only = dict(if_equal=absent[0].stamp.generation)
            self._wait("delete", [kv.write(name, None, **only) for name in names[batch]], until)

    def _value(self, key: bytes, view: np.ndarray) -> bytes:
        digest = checksum(view, key, self._fingerprint, 0)
        return pack_header(RecordHeader(key, 0, self.record_bytes, self._fingerprint, digest)) + view.tobytes()

    def _judge(self, key: bytes, answer: Any) -> str | StoreError:
        """What a read has given: "good", "missing", "corrupted", "foreign", or the error."""
        if isinstance(answer, StoreError):
            return "corrupted" if _is_short(answer) else answer
        if answer.state != "value":
            return "missing"
        if self._is_foreign(answer.value):
            return "foreign"
        header = unpack_header(answer.value)
        if header is None or len(answer.value) != self._value_bytes:
            return "corrupted"
        if (header.key, header.record_bytes) != (key, self.record_bytes):
            return "corrupted"
        record = np.frombuffer(answer.value, np.uint8, offset=HEADER_BYTES)
        return "good" if checksum(record, key, self._fingerprint, 0) == header.digest else "corrupted"

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)


def _leftovers(path: str, folder: str, age: float) -> list[str]:
    """Keys under `path` + `folder` with a lock file that nobody has written to for `age` seconds."""
    where, prefix = os.path.split(path + folder)
    found = []
    with contextlib.suppress(OSError), os.scandir(where or ".") as files:
        for file in files:
            if (match := _LEFTOVER.fullmatch(file.name[len(prefix) :])) and file.name.startswith(prefix):
                with contextlib.suppress(OSError):  # it is gone
                    if time.time() - file.stat(follow_symlinks=False).st_mtime > age:
                        found.append(folder + match[1])
    return found


def _name(key: bytes) -> str:
    return key.hex()


def _is_short(answer: Any) -> bool:
    """Whether an object was shorter than what was asked of it."""
    return isinstance(answer, StoreError) and str(answer.__cause__).startswith("OUT_OF_RANGE")


def _check_all(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer


def _check_some(answers: list[Any]) -> None:
    """Raises if all are errors: it is not this object or that, but the store."""
    if answers and all(isinstance(answer, StoreError) and not _is_short(answer) for answer in answers):
        raise answers[0]
