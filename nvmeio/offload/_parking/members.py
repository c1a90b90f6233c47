"""The members that are parked: tensors of a module and its optimizer, and their storages.

Storages come in the order in which they are used: parameters as the module has them, its buffers,
gradients, state. One that several tensors share is parked once, with the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices, holds, mappings
from nvmeio._torch_private import is_wrapper_subclass, storage_use_count
from nvmeio.errors import an, counted
from nvmeio.offload._module.param_store import store_of
from nvmeio.offload._module.sharded import shards_of
from nvmeio.offload._swap_files.tensors import is_absent, is_nothing, is_sharded

PARAMETERS, BUFFERS, GRADIENTS, STATE = KINDS = ("parameters", "buffers", "gradients", "state")
# Below this a storage is written, and stays in memory too: it is less than what names it.
LEAST_BYTES = 64 << 10
SHARD = "a shard"  # the name of what FSDP2 keeps of a parameter, beside its own


class Member(NamedTuple):
    """A tensor that is parked.

    Attributes:
        kind: One of `KINDS`.
        name: "blocks.0.weight"; with the key in the state behind it, "blocks.0.weight.exp_avg".
        tensor: Plain: the local one of a DTensor, one of those that a wrapper has.
    """

    kind: str
    name: str
    tensor: torch.Tensor


@dataclass(eq=False)
class ParkedStorage:
    """Memory that is parked as a whole.

    Attributes:
        kind: The kind of the first of its members.
        members: All tensors that lie in it.
        nbytes: The bytes of all of it.
        place: Its first byte in the file.
        sums: The CRC-32 of each part of it, where it was in host memory.
        away: Whether its memory was given back.
    """

    kind: str
    storage: torch.UntypedStorage
    nbytes: int
    members: list[Member] = field(default_factory=list)
    place: int = 0
    sums: list[int] = field(default_factory=list)
    away: bool = False

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def name(self) -> str:
        return self.members[0].name

    @property
    def is_small(self) -> bool:
        return self.nbytes < LEAST_BYTES

    def memory(self) -> torch.Tensor:
        """Its bytes as a tensor."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            return empty.set_(self.storage)


def members_of(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[Member]:
    """Every tensor, in the order of use."""
    shards = shards_of(module)  # before anything is looked at: what was gathered goes
    names: dict[int, str] = {}
    gradients: list[Member] = []
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        yield from _plain(PARAMETERS, name, parameter)
        if parameter.grad is not None:
            gradients += _plain(GRADIENTS, name, parameter.grad)
    for shard in shards:  # FSDP2's own view of each, with room for padding
        yield from _plain(PARAMETERS, SHARD, shard._sharded_param_data)
    for name, buffer in module.named_buffers():
        yield from _plain(BUFFERS, name, buffer)
    groups = [] if optimizer is None else optimizer.param_groups
    others = [p for group in groups for p in group["params"] if id(p) not in names]
    for number, parameter in enumerate(others):
        names[id(parameter)] = name = f"param_groups.{number}"
        yield from _plain(PARAMETERS, name, parameter)
        if parameter.grad is not None:
            gradients += _plain(GRADIENTS, name, parameter.grad)
    yield from gradients
    if optimizer is not None:
        for parameter in (p for group in groups for p in group["params"]):
            yield from _in(names[id(parameter)], optimizer.state.get(parameter, {}))


def parameters_of(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Parameters by the names that `members_of` gives them."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    known = {id(p) for p in named.values()}
    groups = [] if optimizer is None else optimizer.param_groups
    others = [p for group in groups for p in group["params"] if id(p) not in known]
    return named | {f"param_groups.{number}": p for number, p in enumerate(others)}


def _in(name: str, value: Any) -> Iterator[Member]:
    """The tensors within a value of an optimizer's state."""
    if isinstance(value, torch.Tensor):
        yield from _plain(STATE, name, value)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _in(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _in(f"{name}.{number}", each)


def _plain(kind: str, name: str, tensor: torch.Tensor) -> Iterator[Member]:
    """The plain tensors that a tensor consists of."""
    if is_sharded(tensor):
        whole: Any = tensor
        yield from _plain(kind, name, whole._local_tensor)
    elif is_wrapper_subclass(tensor):
        wrapper: Any = tensor
        for attribute in wrapper.__tensor_flatten__()[0]:
            yield from _plain(kind, f"{name}.{attribute}", getattr(wrapper, attribute))
    else:
        _check(kind, name, tensor)
        yield Member(kind, name, tensor)


def _check(kind: str, name: str, tensor: torch.Tensor) -> None:
    what = f"{name} (of {kind})"
    if store_of(tensor) is not None:
        raise ValueError(
            f"{what} is swapped by a SwappedModule, and is on the drive already: call its evict() "
            "for the window, and park other modules"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{what} is {an(str(tensor.layout).removeprefix('torch.'))} tensor: only dense ones "
            "can be parked (an embedding wants sparse=False)"
        )
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values: load the module first")
    if tensor.numel() > 1 and is_absent(tensor) and is_nothing(tensor[(0,) * tensor.dim()]):
        raise ValueError(
            f"{what} has no values: it is parked already (call restore()), or was swapped by a "
            "SwappedModule that is closed"
        )


def storages_of(members: Iterator[Member]) -> list[ParkedStorage]:
    """The storages behind tensors, in their order; refuses memory that cannot be given back."""
    found: dict[int, ParkedStorage] = {}
    known: set[tuple[int, int]] = set()
    for member in members:
        storage = member.tensor.untyped_storage()
        if not storage.nbytes():
            continue
        key = storage._cdata
        if key not in found:
            found[key] = ParkedStorage(member.kind, storage, storage.nbytes())
        if (key, id(member.tensor)) not in known:
            known.add((key, id(member.tensor)))
            found[key].members.append(member)
    storages = list(found.values())
    large = [each for each in storages if not each.is_small]
    # torch's own memory is private. A storage that is not resizable came from elsewhere, or numpy
    # knows it.
    foreign = any(each.device.type == "cpu" and not each.storage.resizable() for each in large)
    unsuitable = mappings.shared_or_read_only() if foreign else []
    for each in large:
        _check_memory(each, unsuitable)
    check_unused(large)
    return storages


def check_unused(storages: Sequence[ParkedStorage]) -> None:
    """Raise ValueError if something is in flight in memory that is to be given back."""
    for parked in storages:
        user = None if parked.is_small else holds.user_of(parked.storage)
        if user is not None:
            raise ValueError(
                f"{parked.name} (of {parked.kind}) is in use by {user!r}, which would find zeros "
                "there: wait for it first (await the operation, call wait() of the Checkpointer)"
            )


def _check_memory(parked: ParkedStorage, unsuitable: Sequence[tuple[int, int]]) -> None:
    what = f"{parked.name} (of {parked.kind})"
    if not parked.storage.data_ptr():
        raise ValueError(
            f"{what} has no memory: its storage was freed (resize_(0)); restore it first"
        )
    if parked.device.type == "cpu":
        if parked.storage.is_shared():
            raise ValueError(
                f"{what} is in memory that is shared with other processes (share_memory_), which "
                "would find zeros there: park a module of your own"
            )
        if parked.members[0].tensor.is_pinned():
            raise ValueError(
                f"{what} is in page-locked memory, which is not given back: make it without "
                "pin_memory, with CPUOffloadPolicy(pin_memory=False) say"
            )
        start = parked.storage.data_ptr()
        if any(low < start + parked.nbytes and start < high for low, high in unsuitable):
            raise ValueError(
                f"{what} is in memory that is read-only or shared (numpy.memmap with mode 'r' or "
                "'r+', shared memory), which cannot be given back and filled again: clone() it"
            )
        if not mappings.can_be_given_back(start, parked.nbytes):
            raise ValueError(
                f"{what} is in locked memory (mlock), which is not given back: unlock it first, "
                "or clone() it"
            )
        return
    if not devices.is_device(parked.members[0].tensor):
        raise ValueError(f"{what} is on {parked.device}: only the CPU and CUDA devices are parked")
    if not parked.storage.resizable():
        raise ValueError(f"{what} is in memory that torch does not own: clone() it first")
    known = {id(each.tensor) for each in parked.members}
    known |= {id(each.tensor._base) for each in parked.members if each.tensor._base is not None}
    others = storage_use_count(parked.storage._cdata) - 1 - len(known)
    if others > 0:
        raise ValueError(
            f"{what} has its memory in common with {counted(others, 'further tensor')}, of neither "
            "module nor optimizer (a view, or what autograd saved for a loss): delete them first, "
            "for a device's memory is given back as a whole"
        )
