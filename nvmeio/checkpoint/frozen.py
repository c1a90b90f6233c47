"""`snapshot`: a state as it is now, for readers while the original goes on."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
import weakref
from collections.abc import Generator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch

from nvmeio import _checks
from nvmeio._formats.torch_archives.torch_layout import StorageRecord
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage.replace import check_writable
from nvmeio._threads.interruptible import begun, run_interruptible
from nvmeio._torch_private import pytree
from nvmeio.checkpoint._snapshot.copies import RecordSpan, tensor_of
from nvmeio.checkpoint._snapshot.protected import AsideMemory, Protected, ProtectedBytes
from nvmeio.checkpoint._snapshot.state_snapshot import Snapshots, checked_way

State = TypeVar("State")

_COPY_BYTES = 16 << 20


def snapshot(
    state: State, how: str = "auto", *, directory: str | os.PathLike[str] | None = None
) -> FrozenState[State]:
    """Keep a state as it is now, while the original goes on.

        frozen = nvmeio.snapshot(model.state_dict())  # some milliseconds
        optimizer.step()  # at once, and whatever else
        with frozen as before:
            evaluate(before)  # as it was before the step

    If the kernel allows it (see `Checkpointer`), large tensors in host memory are write-protected
    and a thread copies them while the program goes on; a part that is written to before that is
    copied first. The same holds for the shards of DTensors. Everything else is copied before this
    returns: small tensors, Parameters (take a ``state_dict``), other subclasses, nested tensors,
    objects.

    Args:
        state: Tensors in dicts, lists and tuples, or anything else that `copy.deepcopy` takes.
        how: "auto" protects if the kernel shows every write, and copies if not, or if others have
            pinned memory of this process (io_uring's registered buffers, RDMA): they write past the
            protection. "protect" protects anyway. "copy" copies all of it.
        directory: The place of a nameless file for bytes that the program writes to before they
            were copied, if memory is full. None: the system's directory for temporary files, which
            is small or in memory on many machines. Name one on a drive for a state of more than
            half of the memory that the machine has available.

    Returns:
        The copy to come: ``await`` it, use it in a ``with`` statement, or call its `result`.

    Raises:
        Exception: `copy.deepcopy` refuses something, such as a tensor that autograd has computed.
        TypeError: A nested tensor of the strided layout has a gradient.
        ValueError: `how` is another word.
        BackendUnavailableError: ``how="protect"`` is not possible here.
        TransferError: `directory` is not there, or cannot be written in.
        MemoryError: There is no room for the copy.

    Cost: memory of the size of the state, until the copy is dropped; protecting takes 40 ms a GiB
    on small pages and less than 10 on huge ones.
    """
    checked = HowToFreeze.checked(how, directory)
    return run_interruptible(lambda: FrozenState(state, None, checked))


class HowToFreeze(NamedTuple):
    """Checked settings of a snapshot: its way, and the directory of its overflow."""

    way: str
    directory: str

    @classmethod
    def checked(
        cls, how: str, directory: str | os.PathLike[str] | None, name: str = "how"
    ) -> HowToFreeze:
        """Raises as `snapshot`, which calls the first argument `name`."""
        way = checked_way(how, name)
        if directory is None:
            return cls(way, tempfile.gettempdir())
        where = os.path.abspath(_checks.directory_path("directory", directory))
        check_writable(where, "name another directory=")
        return cls(way, where)


class _Lent(NamedTuple):
    mapping: Mapping
    nbytes: int  # that it was made for
    used: weakref.ref[memoryview]


class CopyMemory:
    """The memory of copies of protected tensors, kept for the next snapshot of the same sizes."""

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}  # by the id of what tells of its end
        self._unused: SimpleQueue[weakref.ref[memoryview]] = SimpleQueue()  # of `_lent`
        self._free: list[_Lent] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory for one snapshot, which comes back when nobody has its storage any more.

        Free memory beyond that is given back to the machine.
        """
        while not self._unused.empty():
            with contextlib.suppress(KeyError):  # released meanwhile
                self._free.append(self._lent.pop(id(self._unused.get())))
        free: dict[int, list[Mapping]] = {}
        for lent in self._free:
            free.setdefault(lent.nbytes, []).append(lent.mapping)
        self._free = []
        taken = []
        for nbytes in sizes:
            fitting = free.get(nbytes)
            mapping = fitting.pop() if fitting else Mapping(nbytes)
            tensor, used = mapping.lend(0, nbytes, self._unused.put)
            self._lent[id(used)] = _Lent(mapping, nbytes, used)
            taken.append(tensor)
        return taken

    def release(self) -> None:
        """Give it back; memory in use follows with its last user."""
        self._free.clear()
        self._lent.clear()


class FrozenState(Generic[State]):
    """A state as it was when `snapshot` was called.

    Args:
        state: The state.
        memory: The memory for copies of protected tensors; None for memory of their own.
        how: As for `snapshot`; None stands for its default.

    Attributes:
        protected_bytes: Bytes that were not copied before `snapshot` returned.
    """

    def __init__(
        self,
        state: State,
        memory: CopyMemory | None = None,
        how: HowToFreeze | None = None,
    ) -> None:
        known: dict[Any, Any] = {}  # deepcopy's memo of copies
        way, directory = how or HowToFreeze.checked("auto", None)
        protects = Snapshots(None, way, directory).why_copied is None
        protected, spans, shards = _protectable(state, known, protects, directory)
        self.protected_bytes = 0
        try:
            copies = (memory or CopyMemory()).take([tensor_of(span[0]).nbytes for span in spans])
            # deepcopy is told of these as if it had copied them; they are filled below.
            known.setdefault("torch", {}).update(
                (_storage_of(span)._cdata, each.untyped_storage())
                for span, each in zip(spans, copies, strict=True)
            )
            for shard in shards:
                if id(shard) not in known:
                    known[id(shard)] = _with_local(shard, copy.deepcopy(_local_of(shard), known))
            self._state = copy.deepcopy(state, known)
            if spans and protected.begin(AsideMemory(), None):
                self.protected_bytes = protected.nbytes
            else:
                for (record, _, _), each in zip(spans, copies, strict=True):
                    each.copy_(tensor_of(record))
                spans = []
            self._copying = begun(lambda: fill(protected, spans, copies), "nvmeio-snapshot")
        except BaseException:
            protected.end()
            raise

    def done(self) -> bool:
        """Whether the copy is complete."""
        return self._copying.done

    def peek(self) -> State:
        """The copy, of which the large tensors may not be there yet."""
        return self._state

    def result(self) -> State:
        """Wait until the copy is complete, and return it.

        Raises:
            TransferError: The program wrote to the state, and there was no room for the copy.
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

    def __reduce__(self) -> NoReturn:
        raise TypeError("a snapshot is not the state: save what `await`, or its result(), gives")

    def __repr__(self) -> str:
        doing = "there" if self.done() else "being copied"
        return f"<nvmeio.FrozenState {doing}, {self.protected_bytes} bytes were protected>"


def _protectable(
    state: object, known: dict[Any, Any], protects: bool, directory: str
) -> tuple[Protected, list[RecordSpan], list[torch.Tensor]]:
    """A state's storages that can be protected, as a file's spans; none is before `begin`.

    And the shards whose local tensors are among these. Everything else is copied here, and noted in
    `known`: what says itself how it is copied (`__deepcopy__`) may look at the bytes of its copies,
    which have to be there.
    """
    leaves = pytree.tree_leaves(state)
    known.update((id(leaf), _nested_copy(leaf)) for leaf in leaves if _is_nested(leaf))
    if not protects:
        leaves = []
    shards = [leaf for leaf in leaves if _is_plain_shard(leaf)]
    plain = [*filter(_is_plain, leaves), *map(_local_of, shards)]
    others = [leaf for leaf in leaves if not (_is_plain(leaf) or _is_plain_shard(leaf))]
    copy.deepcopy(others, known)
    copied = known.get("torch", {})
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()
        for tensor in plain
        if tensor.untyped_storage()._cdata not in copied
    }
    spans: list[RecordSpan] = []
    end = 0
    for number, storage in enumerate(storages.values()):
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = StorageRecord(f"storage {number}", end, data.nbytes, data, ())
        spans.append((record, record.offset, record.end))
        end = round_up(record.end, PAGE_BYTES)
    protected = Protected(spans, directory)
    return protected, [spans[index] for index in protected.taken], shards


def _is_plain(leaf: Any) -> bool:
    """Whether deepcopy copies the storage of a tensor, and looks at no byte of it."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and not (leaf.is_nested or leaf.is_conj() or leaf.is_neg() or vars(leaf))
    )


def _is_plain_shard(leaf: Any) -> bool:
    """Whether it is a DTensor around a plain tensor, of which there is nothing else to copy."""
    return (
        type(leaf) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        and leaf.is_leaf
        and leaf.grad is None
        and not vars(leaf)  # of a Parameter, say
        and _is_plain(_local_of(leaf))
    )


def _local_of(shard: Any) -> torch.Tensor:
    local: torch.Tensor = shard._local_tensor
    return local


def _with_local(shard: Any, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around another local tensor; deepcopy would copy that twice, and the mesh."""
    names, kind = shard.__tensor_flatten__()
    inner = {name: getattr(shard, name) for name in names} | {"_local_tensor": local}
    rebuilt: torch.Tensor = type(shard).__tensor_unflatten__(
        inner, kind, shard.size(), shard.stride()
    )
    return rebuilt


def _is_nested(leaf: Any) -> bool:
    """Whether it is a nested tensor of the strided layout, which deepcopy cannot copy."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_nested
        and leaf.layout is torch.strided
        and leaf.is_leaf  # else deepcopy says what to do
    )


def _nested_copy(nested: torch.Tensor) -> torch.Tensor:
    if nested.grad is not None:
        raise TypeError(
            "torch gives a copy of a nested tensor of the strided layout no gradient: put its "
            "detach() into the state, and its gradient beside it, or use layout=torch.jagged"
        )
    return nested.detach().clone().requires_grad_(nested.requires_grad)


def fill(protected: Protected, spans: list[RecordSpan], copies: list[torch.Tensor]) -> None:
    """Copy protected tensors, and give their memory back."""
    try:
        for span, to in zip(spans, copies, strict=False):
            data = ProtectedBytes(protected, span[0], ())
            for offset in range(0, to.nbytes, _COPY_BYTES):
                nbytes = min(_COPY_BYTES, to.nbytes - offset)
                data.read(offset, nbytes, to.data_ptr() + offset, None)
    finally:
        protected.end()


def _storage_of(span: RecordSpan) -> torch.UntypedStorage:
    return tensor_of(span[0]).untyped_storage()
