"""Tensor parallelism: each rank streams the parts of matrices that it computes with.

transformers plans which matrix is cut how, and its hooks put together what the ranks compute; the
parts are read from the files, rows as one run of bytes, columns as one run for each row.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._residency import calls
from nvmeio.errors import TransferError, an
from nvmeio.inference._parallel.stream_ranks import Ranks, digest_of
from nvmeio.inference._plan import transformers
from nvmeio.inference._plan.quantization import Quantised
from nvmeio.inference._plan.slot_layout import (
    FileExtent,
    Weight,
    WeightPart,
    cut_rows,
    extents_within,
)

# Those of transformers' words whose hooks compute with the plain part of a matrix.
_CUT = frozenset({
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
})  # fmt: skip
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})


class ParallelPasses:
    """Ranks that make the same passes together; their group must be of all processes.

    `path` is what errors name.
    """

    def __init__(self, group: Any, ranks: Ranks, path: str) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._path = path
        self._timeout_s = ranks.timeout_s
        self._in_pass = threading.Lock()  # stays taken when a pass fails
        # One of its own: it ends with a pass that fails, and has the timeout that was asked for.
        self._group: list[Any] = []
        self._meshes: list[Any] = []
        self._ending = weakref.finalize(self, _leave, self._group, self._meshes)
        self._ending.atexit = False
        # Groups of some ranks torch names by how many there are now: ranks may differ in that.
        if dist.get_world_size(group) != dist.get_world_size():
            raise ValueError(
                "tp_plan takes a process_group of all processes, not of "
                f"{dist.get_world_size(group)} of {dist.get_world_size()}"
            )
        made = dist.new_group(timeout=timedelta(seconds=ranks.timeout_s), backend="gloo")
        self._group.append(made)

    def attach(self, model: nn.Module) -> None:
        """Let a pass that fails end the group; behind what streams the model."""
        calls.wrap(model, self._pass)

    def _pass(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Taken until a pass ends well, whatever interrupts it: collectives of the next one would
        # meet those that other ranks still wait in.
        if not self._in_pass.acquire(blocking=False):
            self.end()
            raise self._error(
                f"rank {self.rank} of {self.size} computes in another thread, or a pass of the "
                "group failed: its ranks are out of step. Call "
                "stream_model again on all of them"
            )
        try:
            found = call(*args, **kwargs)
        except BaseException as failed:
            self.end()
            # Torch's gloo raises RuntimeError if a rank is gone or does not come.
            if isinstance(failed, RuntimeError) and _is_of_gloo(failed):
                raise self._error(
                    f"another rank of {self.size} failed, died, or made no progress for "
                    f"{self._timeout_s:g} s: {failed}"
                ) from failed
            raise
        self._in_pass.release()
        return found

    def _error(self, detail: str) -> TransferError:
        return TransferError(errno.ECONNRESET, operation="stream", path=self._path, detail=detail)

    def end(self) -> None:
        """Leave the group: a rank that waits for this one raises. Errors of torch are dropped."""
        self._ending()


class TensorParallel(ParallelPasses):
    """The ranks that compute with parts of matrices."""

    def cut(
        self, model: nn.Module, plan: Mapping[str, str], matched: dict[int, Weight]
    ) -> dict[int, Weight]:
        """Have a model compute with parts, and find where these are read.

        Parameters are on the meta device; modules get transformers' hooks. `plan` is from `check`,
        `matched` has the whole weights.
        """
        meshes: Any = importlib.import_module("torch.distributed.device_mesh")
        mesh = meshes.DeviceMesh.from_group(self._group[0], "cpu")
        self._meshes.append(mesh)
        before = {
            (module, name): parameter
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        transformers.distribute(model, mesh, plan)
        by_tensor = dict(matched)
        for (module, name), whole in before.items():
            sharded: Any = module._parameters[name]
            if sharded is whole:
                continue
            (placement,) = sharded.placements
            module._parameters[name] = whole
            if not placement.is_shard():
                continue
            dim = placement.dim % whole.dim()
            here = self._range(whole.shape[dim])
            weight = by_tensor.pop(id(whole))
            shape = list(whole.shape)
            shape[dim] = here[1] - here[0]
            empty = nn.Parameter(
                torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad
            )
            module._parameters[name] = empty
            by_tensor[id(empty)] = _part_of(weight, dim, *here, self._each(whole.shape[dim]))
        return by_tensor

    def _range(self, count: int) -> tuple[int, int]:
        """This rank's share of so many rows or columns, as torch's `Shard` cuts them."""
        each = self._each(count)
        return min(self.rank * each, count), min((self.rank + 1) * each, count)

    def _each(self, count: int) -> int:
        return -(-count // self.size)


def _leave(groups: list[Any], meshes: list[Any]) -> None:
    """Give up a group; its connections close with the last reference, and others have an error."""
    while meshes:
        # transformers' hooks have the mesh, and that the group. If torch keeps it elsewhere,
        # those that wait for this rank do so until their timeout.
        kept = getattr(meshes.pop(), "_pg_registry", None)
        if isinstance(kept, dict):
            for name in [name for name, group in kept.items() if group in groups]:
                del kept[name]
    while groups:
        with contextlib.suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group(groups[-1])
        groups.pop()


def _is_of_gloo(failed: RuntimeError) -> bool:
    text = str(failed)
    return any(word in text for word in ("gloo", "Connection closed", "Timed out", "process group"))


def check(
    model: nn.Module,
    wanted: str | Mapping[str, str],
    ranks: Ranks,
    matched: dict[int, Weight],
    opened: SafetensorsSet,
) -> dict[str, str]:
    """How parts of a model are cut, by the names of its modules and parameters; all ranks agree.

    IntegrityError if another rank streams another model or plan, TransferError if one failed or did
    not come, ValueError if the model has no plan, or one that cannot be streamed.
    """
    schemes = [weight.quantised for weight in matched.values() if weight.quantised is not None]
    if not all(scheme.multiplies for scheme in schemes):
        raise ValueError(
            f"{opened.path} is quantised by another library, and tp_plan cuts plain matrices and "
            "those of nvmeio pack: give these, or leave tp_plan= out (process_group= alone shares "
            "the reading)"
        )
    if not hasattr(model, "tp_plan"):
        raise ValueError(
            f"tp_plan is for transformers' models, not for {an(type(model).__name__)}: leave it out"
        )
    modules = dict(model.named_modules())
    found = transformers.parallel_plan(model, wanted, ranks.size)
    plan = {name: word for name, word in found.items() if not _looked_up(modules, name, word)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    for name, word in plan.items():
        if word not in _CUT | _WHOLE:
            known = ", ".join(sorted(_CUT | _WHOLE))
            raise ValueError(
                f"tp_plan says {word!r} of {name!r}, which cannot be streamed: known are {known}"
            )
        if word in _WHOLE:
            continue
        owner = name.rpartition(".")[0] if name in parameters else name
        if not isinstance(modules[owner], nn.Linear) or plan.get(owner) != word:
            raise ValueError(
                f"tp_plan says {word!r} of {name!r}, which belongs to "
                f"{an(type(modules[owner]).__name__)}: only linear layers are cut while they stream"
            )
        if name in parameters and len(names[id(parameters[name])]) > 1:
            tied = " and ".join(map(repr, names[id(parameters[name])]))
            raise ValueError(
                f"tp_plan cuts {name!r}, and {tied} are one weight: a tied weight is not cut while "
                "it streams. Leave tp_plan= out (process_group= alone shares the reading)"
            )
    wholes = [(w.name, str(w.dtype), w.shape, w.parts) for w in matched.values()]
    ranks.meet(digest_of(opened, (), sorted(plan.items()), wholes), 0)
    return plan


def _looked_up(modules: dict[str, nn.Module], name: str, word: str) -> bool:
    """Whether it is an embedding cut by tokens, whose rows every rank looks up for itself.

    transformers adds the ranks' rows, all but one of them zeros: the same values.
    """
    owner = modules.get(name, modules.get(name.rpartition(".")[0]))
    return word == "embedding_rowwise" and isinstance(owner, nn.Embedding)


def _part_of(weight: Weight, dim: int, first: int, last: int, each: int) -> Weight:
    kind, width = "rows" if dim == 0 else "columns", weight.shape[-1]
    shape = tuple(last - first if at == dim else size for at, size in enumerate(weight.shape))
    scheme = weight.quantised
    size = scheme.group_size if isinstance(scheme, Quantised) and dim else 1
    if each % size:
        raise ValueError(
            f"{weight.name!r} was packed in groups of {size} columns, and each rank would have "
            f"{each}: pack it with quant_group_size={math.gcd(each, size)}, or leave tp_plan= out"
        )
    parts = tuple(
        cut_rows(part, first, last)
        if dim == 0
        else columns(part, part.shape[1] * first // width, part.shape[1] * last // width)
        for part in weight.parts
    )
    return weight._replace(
        name=f"{weight.name}, {kind} {first} to {last}", shape=shape, parts=parts
    )


def columns(part: WeightPart, first: int, last: int) -> WeightPart:
    rows, width = part.shape
    size = part.dtype.itemsize
    whole, run = width * size, (last - first) * size
    extents: list[FileExtent] = []
    for extent in part.extents:
        for row in range(extent.at // whole, -(-(extent.at + extent.nbytes) // whole)):
            begin = row * whole + first * size
            extents += (
                found._replace(at=row * run + found.at - begin)
                for found in extents_within([extent], begin, begin + run)
            )
    return WeightPart(part.dtype, (rows, last - first), tuple(extents))
