"""`snapshot`: a state as it is now, for whoever reads it while the original goes on."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._formats.torch_layout import StorageRecord
from nvmeio._memory.copy_on_write import support
from nvmeio._memory.mappings import Mapping
from nvmeio._threads.jobs import begun, run_interruptible
from nvmeio.checkpoint._snapshot.copies import RecordSpan, tensor_of
from nvmeio.checkpoint._snapshot.protected import AsideMemory, Protected

State = TypeVar("State")

_COPY_BYTES = 16 << 20


def snapshot(state: State) -> FrozenState[State]:
    """Keep a state as it is now, while the original goes on.

    ::

        frozen = nvmeio.snapshot(model.state_dict())  # some milliseconds
        optimizer.step()  # at once, and whatever else
        with frozen as before:
            evaluate(before)  # as it was before the step

    Large tensors in host memory are write-protected, not copied, where the kernel allows that
    (see `Checkpointer`); a thread copies them beside what the program does next, and what
    somebody writes to before that is copied first. Everything else is copied before this returns:
    small tensors, Parameters (take a ``state_dict``), subclasses, objects.

    Args:
        state: Tensors in dicts, lists and tuples, or anything else that `copy.deepcopy` takes.

    Returns:
        What gives the copy: as a context manager, awaited, or by `FrozenState.result`.

    Raises:
        Exception: What `copy.deepcopy` raises, of a tensor that is a result of autograd, say.
        MemoryError: There is no room for the copy.

    Cost: memory of the size of the state, until the copy is dropped; protecting takes 40 ms a GiB
    on small pages and less than 10 on huge ones.
    """
    return run_interruptible(lambda: FrozenState(state))


class FrozenState(Generic[State]):
    """A state as it was when `snapshot` was called.

    Attributes:
        protected_bytes: What was not copied before `snapshot` returned.
    """

    def __init__(self, state: State) -> None:
        known: dict[Any, Any] = {}  # to deepcopy: what it has copied
        protected, spans = _protectable(state, known)
        self.protected_bytes = 0
        try:
            copies = [_empty_like(span) for span in spans]
            # deepcopy is told of these as if it had copied them; they are filled below.
            known.setdefault("torch", {}).update(
                (_storage_of(span)._cdata, each.untyped_storage())
                for span, each in zip(spans, copies, strict=True)
            )
            self._state = copy.deepcopy(state, known)
            if spans and protected.begin(AsideMemory(), None):
                self.protected_bytes = protected.nbytes
            else:
                for (record, _, _), each in zip(spans, copies, strict=True):
                    each.copy_(tensor_of(record))
                spans = []
            self._copying = begun(lambda: _fill(protected, spans, copies), "nvmeio-snapshot")
        except BaseException:
            protected.end()
            raise

    def done(self) -> bool:
        """Whether all of it is there."""
        return self._copying.done

    def peek(self) -> State:
        """The copy, of which the large tensors may not be there yet."""
        return self._state

    def result(self) -> State:
        """The copy; waits until all of it is there.

        Raises:
            TransferError: A write came first, and there was no room to copy what it changed.
        """
        self._copying.wait()
        self._copying.result()
        return self._state

    async def _result(self) -> State:
        await self._copying
        return self._state

    def __await__(self) -> Generator[Any, Any, State]:
        return self._result().__await__()

    def __enter__(self) -> State:
        return self.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def __repr__(self) -> str:
        doing = "there" if self.done() else "being copied"
        return f"<nvmeio.FrozenState {doing}, {self.protected_bytes} bytes were protected>"


def _protectable(state: object, known: dict[Any, Any]) -> tuple[Protected, list[RecordSpan]]:
    """What of a state's storages can be protected, as a file's spans; none is before `begin`.

    Everything else is copied here, and noted in `known`: what says itself how it is copied
    (`__deepcopy__`) may look at the bytes of its copies, which have to be there.
    """
    leaves = _pytree.tree_leaves(state) if support().kind == "any" else []
    copy.deepcopy([leaf for leaf in leaves if not _is_plain(leaf)], known)
    copied = known.get("torch", {})
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage()
        for leaf in leaves
        if _is_plain(leaf) and leaf.untyped_storage()._cdata not in copied
    }
    spans: list[RecordSpan] = []
    end = 0
    for number, storage in enumerate(storages.values()):
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = StorageRecord(f"storage {number}", end, data.nbytes, data, ())
        spans.append((record, record.offset, record.end))
        end = round_up(record.end, PAGE_BYTES)
    protected = Protected(spans, tempfile.gettempdir())
    return protected, [spans[index] for index in protected.taken]


def _is_plain(leaf: Any) -> bool:
    """Whether deepcopy copies the storage of a tensor, and looks at no byte of it."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.is_nested or leaf.is_conj() or leaf.is_neg() or vars(leaf))
    )


def _fill(protected: Protected, spans: list[RecordSpan], copies: list[torch.Tensor]) -> None:
    try:
        for span, to in zip(spans, copies, strict=False):
            data = protected.data(span, ())
            for offset in range(0, to.nbytes, _COPY_BYTES):
                nbytes = min(_COPY_BYTES, to.nbytes - offset)
                data.read(offset, nbytes, to.data_ptr() + offset, None)
    finally:
        protected.end()


def _storage_of(span: RecordSpan) -> torch.UntypedStorage:
    return tensor_of(span[0]).untyped_storage()


def _empty_like(span: RecordSpan) -> torch.Tensor:
    nbytes = tensor_of(span[0]).nbytes
    return Mapping(nbytes).tensor(0, (nbytes,), torch.uint8)
