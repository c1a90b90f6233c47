"""The L2 adapter: tasks of LMCache's controllers, done by a block store."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._kv_blocks.catalog import Change
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, nearest
from nvmeio.integrations._serving.kv_identity import WeightOptions
from nvmeio.integrations.lmcache._keys import (
    NAME_BYTES,
    PREFIX_BYTES,
    ServedModels,
    fields_of,
    kind_of,
    name_of,
)

logger = logging.getLogger("nvmeio")

# The unit of room. Objects of LMCache are chunks of 256 tokens: of 64 KiB and more, in such steps.
UNIT_BYTES = 64 << 10
_PARAMETERS = ("directory", "capacity_bytes", "name", "settings", *WeightOptions._fields)


class _Tasks:
    """Results of one sort of task, and the eventfd that says that there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}
        self._closed = False

    def end(self, task: int, result: Any) -> None:
        with self._lock:
            if not self._closed:  # by then the descriptor may be another's
                self._results[task] = result
                os.eventfd_write(self.fd, 1)

    def pop(self, task: int) -> Any:
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                os.close(self.fd)
            self._closed = True


class Adapter:
    """Objects of LMCache on the drive; joined with LMCache's `L2AdapterInterface`.

    Args:
        params: LMCache's "adapter_params". "directory", on the drive; "capacity_bytes", a number or
            a text such as "200GB" (GiB: sizes are binary); "name" of the store, "lmcache" if it is
            left out; "weights", "weights_id", "adapters" and "fingerprint": which weights the
            objects are of (docs/serving.md); "settings", an object with all else that changes what
            their bytes mean, such as the attention backend.
        l1_memory_desc: LMCache's memory; not needed.

    Raises:
        ValueError: A parameter is missing, unknown, or makes no sense.
        TransferError: The store cannot be opened: see `nvmeio._kv_blocks.store.BlockStore`.

    Tasks are done in the background. Those of a model that was not seen before wait until its
    weights are identified. A task that fails says so; it never raises.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        for name in params:
            if name not in _PARAMETERS:
                raise ValueError(
                    f"adapter_params has an unknown field {name!r}{nearest(name, _PARAMETERS)}: "
                    f"known are {', '.join(_PARAMETERS)}"
                )
        directory = params.get("directory")
        if not isinstance(directory, str) or not directory:
            raise ValueError(f'"directory" must name a directory on the drive, not {directory!r}')
        if "capacity_bytes" not in params:
            raise ValueError(
                '"capacity_bytes" is missing: say how much the objects may take, such as "200GB"'
            )
        settings = params.get("settings") or {}
        if not isinstance(settings, Mapping):
            raise ValueError(f'"settings" must be an object, not {settings!r}')
        units = _checks.size("capacity_bytes", params["capacity_bytes"], 1) // UNIT_BYTES
        parent: Any = super()
        parent.__init__(max_capacity_bytes=units * UNIT_BYTES)
        api = importlib.import_module("lmcache.v1.distributed.api")
        self._object_key: Any = api.ObjectKey
        self._page: Any = api.KeyListPage
        self._entry: Any = api.KeyEntry
        internal = importlib.import_module("lmcache.v1.distributed.internal_api")
        self._store_result: Any = internal.L2StoreResult
        self._bitmap: Any = importlib.import_module("lmcache.lmcache_native").Bitmap
        self._models = ServedModels(directory, WeightOptions.of(params), settings)
        self._told: set[bytes] = set()  # prefixes of names that LMCache was told of
        self._numbers = itertools.count()
        self._closed = False
        self._store = BlockStore(
            directory,
            str(params.get("name", "lmcache")),
            UNIT_BYTES,
            units * UNIT_BYTES,
            largest_bytes=max(units, 1) * UNIT_BYTES,
            name_bytes=NAME_BYTES,
            on_change=self._tell,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._store.close)
            self._stores, self._lookups, self._loads = (_Tasks() for _ in range(3))
            for tasks in (self._stores, self._lookups, self._loads):
                undo.callback(tasks.close)
            self._owner = OwnerThread("nvmeio-lmcache", "the L2 adapter is closed")
            undo.callback(self._owner.close)
            if self._models.is_named:
                self._owner.call(self._recover)
            else:
                self._owner.post(self._recover)
            undo.pop_all()

    # Models

    def _recover(self) -> None:
        """Identify the models whose objects are there, so that LMCache knows of these."""
        try:
            at: int | None = 0
            models: set[str] = set()
            while at is not None:
                blocks, at = self._store.listed(at, 4096)
                models.update(fields_of(block.name).model_name for block in blocks)
            for model in sorted(models):
                self._identify(model)
        except ClosedError:
            pass
        except Exception:
            logger.exception("objects that were stored before cannot be listed")

    def _identify(self, model: str) -> None:
        """In the thread of the owner: nobody stores objects of a model before they are told of."""
        if self._models.known(model) is None:
            self._store.tell_of(self._models.identify(model))

    def _when_known(self, keys: Sequence[Any], work: Callable[[], object]) -> None:
        """Do `work` once the weights of these objects are identified: now, in general."""
        unknown = self._unknown(keys)
        if unknown:
            self._owner.post(self._identify_for, unknown, work)
        else:
            work()

    def _identify_for(self, models: Iterable[str], work: Callable[[], object]) -> None:
        try:
            for model in models:
                self._identify(model)
        except Exception:  # the work reports the error
            logger.exception("objects that were stored before cannot be told of")
        work()

    def _unknown(self, keys: Sequence[Any]) -> set[str]:
        return {key.model_name for key in keys if self._models.known(key.model_name) is None}

    def _names(self, keys: Sequence[Any]) -> list[bytes]:
        return [name_of(self._models.identify(key.model_name), key) for key in keys]

    # Tasks

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to write objects; those that are there are left, those of another kind replaced."""
        task = next(self._numbers)
        failed = self._store_result(False, 0)

        def work() -> None:
            blocks = [_bytes_of(each) for each in objects]
            nbytes = sum(block.nbytes for block in blocks)

            def done(there: list[bool]) -> None:
                result = self._store_result(True, nbytes) if all(there) else failed
                self._stores.end(task, result)

            kinds = [kind_of(each) for each in objects]
            self._store.begin_store(self._names(keys), blocks, done, kinds)

        self._begin(self._stores, task, keys, work, failed)
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Pin the objects that are there, and say which these are."""
        task = next(self._numbers)

        def work() -> None:
            self._lookups.end(task, self._map(self._store.pin(self._names(keys))))

        self._begin(self._lookups, task, keys, work, self._bitmap(len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """End a pin of each object; it is done when this returns."""
        known = [key for key in keys if self._models.known(key.model_name) is not None]
        self._store.unpin(self._names(known))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to read objects; one of another kind or length is not found."""
        task = next(self._numbers)

        def done(there: list[bool]) -> None:
            found = [key for key, is_there in zip(keys, there, strict=True) if is_there]
            if found:
                self._notify("accessed", found)
            self._loads.end(task, self._map(there))

        def work() -> None:
            blocks = [_bytes_of(each) for each in objects]
            kinds = [kind_of(each) for each in objects]
            self._store.begin_load(self._names(keys), blocks, done, kinds)

        self._begin(self._loads, task, keys, work, self._bitmap(len(keys)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    def _begin(
        self, tasks: _Tasks, task: int, keys: Sequence[Any], work: Callable[[], None], failed: Any
    ) -> None:
        """Do a task's work; one that cannot be begun ends at once, as failed."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                logger.warning("a task of LMCache's failed: %s", error)
                tasks.end(task, failed)

        self._when_known(keys, guarded)

    def _map(self, there: Sequence[bool]) -> Any:
        found = self._bitmap(len(there))
        for at, is_there in enumerate(there):
            if is_there:
                found.set(at)
        return found

    # Listing and removing

    def delete(self, keys: list[Any]) -> None:
        """Remove objects that are there and not pinned; listeners learn which these were."""
        for model in self._unknown(keys):
            self._owner.call(self._identify, model)
        self._store.remove(self._names(keys), spare_pinned=True)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Keys and lengths of objects, by pages.

        Those of a model that has not been asked for since a restart are listed once its weights are
        identified.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be 1 or more, not {page_size}")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(
                f"cursor {cursor!r} must be a number that this call returned as next_page_token: "
                "give that, or None to begin at the first page"
            )
        at: int | None = int(cursor or 0)
        entries: list[Any] = []
        while at is not None and len(entries) < page_size:
            blocks, at = self._store.listed(at, page_size - len(entries))
            for block in blocks:
                fields = fields_of(block.name)
                if block.name[:PREFIX_BYTES] == self._models.known(fields.model_name) and (
                    model_name in (None, fields.model_name)
                ):
                    key = self._object_key(*fields).to_encoded_object_key()
                    entries.append(self._entry(key=key, size_bytes=block.nbytes))
        token = None if at is None else str(at)
        return self._page(entries=tuple(entries), next_page_token=token)

    def register_listener(self, listener: Any) -> None:
        """Register a listener, and report the present objects to it."""
        parent: Any = super()
        parent.register_listener(listener)
        at: int | None = 0
        while at is not None:
            blocks, at = self._store.listed(at, 4096)
            told = [block for block in blocks if block.name[:PREFIX_BYTES] in self._told]
            keys = [self._object_key(*fields_of(block.name)) for block in told]
            if keys:
                with _logged("a listener failed"):
                    listener.on_l2_keys_stored(keys, [block.nbytes for block in told])

    def report_status(self) -> dict[str, Any]:
        """Health, and the store's counters since it was opened."""
        usage, stats = self._store.usage, self._store.stats
        return {
            "is_healthy": not self._closed,
            "type": "NvmeL2Adapter",
            "path": str(self._store.path),
            "stored_object_count": stats.blocks,
            "locked_key_count": usage.pinned,
            "current_size_bytes": usage.nbytes,
            "max_capacity_bytes": usage.capacity_bytes,
            **{name: getattr(stats, name) for name in stats._fields if name != "blocks"},
        }

    def _tell(self, changes: list[Change]) -> None:
        """Tell LMCache which objects came and went; called by the store, in that order."""
        for is_stored, group in itertools.groupby(changes, attrgetter("is_stored")):
            told = list(group)
            if is_stored:
                self._told.update(change.name[:PREFIX_BYTES] for change in told)
            else:  # objects of other weights were never announced
                told = [change for change in told if change.name[:PREFIX_BYTES] in self._told]
            if told:
                keys = [self._object_key(*fields_of(change.name)) for change in told]
                sizes = [change.nbytes for change in told]
                self._notify("stored" if is_stored else "deleted", keys, sizes)

    def _notify(self, what: str, *args: Any) -> None:
        with _logged("a listener failed"):
            getattr(self, f"_notify_keys_{what}")(*args)

    def close(self) -> None:
        """End begun work; objects stay on the drive. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ClosedError):
            self._owner.drain()
        self._owner.close()
        self._store.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()


@contextlib.contextmanager
def _logged(message: str) -> Iterator[None]:
    """Log an error of others; the accounts are right anyway."""
    try:
        yield
    except Exception:
        logger.exception(message)


def _bytes_of(memory_object: Any) -> torch.Tensor:
    """The bytes of a memory object that count, as a tensor over them."""
    raw = getattr(memory_object, "raw_data", None)
    if not isinstance(raw, torch.Tensor):
        return torch.frombuffer(memory_object.byte_array, dtype=torch.uint8)
    if raw.device.type != "cpu":
        raise ValueError(
            f"an object lies on {raw.device}, and L1 memory of the host is needed: start LMCache "
            "without its GDS tier"
        )
    return raw.reshape(-1).view(torch.uint8)[: memory_object.get_size()]
