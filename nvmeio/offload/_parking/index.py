"""The index of parked state: which tensor is where, so that another process can bring it back.

It is a manifest as a swapped optimizer has it, of one generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._torch_private import is_wrapper_subclass
from nvmeio.errors import IntegrityError
from nvmeio.offload._parking.files import number_of_parts
from nvmeio.offload._parking.members import ParkedStorage, parameters_of
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.manifests import Manifest
from nvmeio.offload._swap_files.tensors import is_sharded

_SIGNATURE = "parked 1"
# The first one of an optimizer counts as nothing yet, and whoever comes next removes it.
_GENERATION = 2


class Place(NamedTuple):
    """The place of a tensor's elements: in which storage, and how they lie there.

    `on_host` says whether that storage was in host memory.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor over the bytes of its storage."""
        usable = memory[: memory.nbytes // self.dtype.itemsize * self.dtype.itemsize]
        return usable.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class Index(NamedTuple):
    """The contents of a directory.

    Attributes:
        sizes: The bytes of each storage.
        small: Which of them lie within the last one, and where: by number.
        sums: The checksums of each part of each storage that is not small, and of the last one.
        members: By kind and name.
        parameters: The names of the optimizer's parameters, in order.
        state: For each of them its state by `coded`.
        groups: The optimizer's groups, without parameters.
    """

    sizes: list[int]
    small: dict[int, int]
    sums: list[list[int]]
    members: dict[tuple[str, str], Place]
    parameters: list[str]
    state: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def manifest_of(
    storages: Sequence[ParkedStorage],
    together: ParkedStorage,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Manifest:
    """The manifest of the written parts.

    Args:
        storages: All, the small ones too.
        together: The storage that the small ones lie in.
        module: The module of the tensors.
        optimizer: The optimizer of the state.
    """
    number_of = {each.storage._cdata: number for number, each in enumerate(storages)}

    def place(tensor: torch.Tensor) -> list[Any]:
        number = number_of.get(tensor.untyped_storage()._cdata, -1)  # none has no bytes
        lies = [tuple(tensor.shape), tuple(tensor.stride())]
        on_host = tensor.device.type == "cpu"
        return [number, int(tensor.storage_offset()), *lies, str(tensor.dtype)[6:], on_host]

    large = [each for each in storages if not each.is_small]
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    states: Any = {} if optimizer is None else optimizer.state
    rows = [coded(states.get(parameter, {}), place) for parameter in parameters]
    members = [(m, place(m.tensor)) for each in storages for m in each.members]
    made_of = {
        "sizes": json.dumps([each.nbytes for each in storages] + [together.nbytes]),
        "small": json.dumps({n: each.place for n, each in enumerate(storages) if each.is_small}),
        "members": json.dumps([[m.kind, m.name, where] for m, where in members]),
        "parameters": json.dumps(names_in_order(module, optimizer)),
    }
    return Manifest(
        generation=_GENERATION,
        signature=_SIGNATURE,
        current=[0] * len(rows),
        begun=[1] * len(rows),
        small=rows,
        groups=[{k: v for k, v in group.items() if k != "params"} for group in groups],
        sums=[each for parked in (*large, together) for each in parked.sums],
        made_of=made_of,
    )


def names_in_order(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names = {id(p): name for name, p in parameters_of(module, optimizer).items()}
    groups = [] if optimizer is None else optimizer.param_groups
    return [names[id(p)] for group in groups for p in group["params"]]


def read(directory: str) -> Index | None:
    """The contents of a directory; None where nothing was parked to its end.

    Raises:
        IntegrityError: It is damaged, or something else.
    """
    manifest = manifests.newest(directory)
    if manifest is None:
        return None
    try:
        if manifest.signature != _SIGNATURE:
            raise _damaged(directory, f"it is {manifest.signature!r:.40}")
        sizes = [int(each) for each in json.loads(manifest.made_of["sizes"])]
        small = {int(k): int(v) for k, v in json.loads(manifest.made_of["small"]).items()}
        listed = json.loads(manifest.made_of["members"])
        members = {(kind, name): placed(where) for kind, name, where in listed}
        left, sums = list(manifest.sums), []
        for number, nbytes in enumerate(sizes):
            count = 0 if number in small else number_of_parts(nbytes)
            sums.append(left[:count])
            del left[:count]
            if len(sums[-1]) != count:
                raise _damaged(directory, "there are fewer sums than parts")
        parameters = [str(name) for name in json.loads(manifest.made_of["parameters"])]
        return Index(sizes, small, sums, members, parameters, manifest.small, manifest.groups)
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise _damaged(directory, repr(wrong)) from wrong


def _damaged(directory: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"the manifest in {directory} is not one of park() ({why}): go on from a checkpoint",
        expected="what this version of nvmeio has parked",
        found="something else",
    )


def placed(where: Sequence[Any]) -> Place:
    """A place as it was before it was coded."""
    number, offset, shape, strides, dtype, on_host = where
    lies = tuple(shape), tuple(strides)
    return Place(number, offset, *lies, getattr(torch, dtype), bool(on_host))


def coded(value: Any, place: Callable[[torch.Tensor], list[Any]]) -> Any:
    """A value of an optimizer's state as plain ones, which say where its tensors are."""
    if isinstance(value, torch.Tensor):
        local: Any = value
        if is_sharded(value):
            return {"sharded": place(local._local_tensor)}
        if is_wrapper_subclass(value):
            return {"other": type(value).__name__}
        return {"tensor": place(value)}
    if type(value) is dict:
        return {key: coded(each, place) for key, each in value.items()}
    if type(value) in (list, tuple):
        return {type(value).__name__: [coded(each, place) for each in value]}
    plain = manifests.pythons(value)
    if type(plain) in manifests.PLAIN_TYPES:
        return {"plain": plain}
    return {"other": type(value).__name__}
