"""The plan of a stream, made of the arguments of `stream_model`; no weights are read.

A plan is a model without weights: the source of each weight, and the division of memory.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._formats import model_directory, packed_index
from nvmeio._formats.safetensors.open_set import SafetensorsSet, StoredTensor
from nvmeio._memory import devices, system
from nvmeio.errors import an
from nvmeio.inference import hub
from nvmeio.inference._experts.on_device import level
from nvmeio.inference._experts.ranks import (
    EXPERTS_PLAN,
    ExpertParallel,
    can_be_shared_out,
    owned_nbytes,
)
from nvmeio.inference._experts.sets import ExpertSet, find_sets
from nvmeio.inference._parallel import tensor_parallel
from nvmeio.inference._parallel.stream_ranks import Ranks, check_part, digest_of, room_for_others
from nvmeio.inference._parallel.tensor_parallel import ParallelPasses, TensorParallel
from nvmeio.inference._plan import packed_format, transformers
from nvmeio.inference._plan.budget import (
    NO_EXPERTS,
    SHARE,
    ExpertNeeds,
    Shares,
    check_numbers,
    fit,
    share_out,
)
from nvmeio.inference._plan.matching import match
from nvmeio.inference._plan.packed_format import Packed
from nvmeio.inference._plan.quantization import Compute
from nvmeio.inference._plan.slot_layout import Weight
from nvmeio.inference._plan.units import Partition, partition
from nvmeio.inference._stream import stand_ins

logger = logging.getLogger("nvmeio")

_CGROUPS = Path("/sys/fs/cgroup")


class ModelPlan(NamedTuple):
    """The model with placeholders in the place of weights, and how it is streamed.

    `ranks` read together, None where this one reads for itself; `parallel` ranks compute together;
    `packed` is the index of a packed checkpoint, and `part` which part of one it is, if it is one.
    """

    model: Any
    parts: Partition
    experts: list[ExpertSet]
    shares: Shares
    ranks: Ranks | None
    parallel: ParallelPasses | None
    stored: dict[str, StoredTensor]
    packed: Packed | None
    part: str | None

    def differs(self, again: SafetensorsSet, checksum: bool) -> bool:
        """Whether files with the same tensors were packed from others than those of the plan."""
        if again.metadata.get(packed_index.PART) != self.part:
            return True
        return packed_format.parse(again, checksum) != self.packed


def plan_model(asked: Asked, opened: SafetensorsSet, ranks: Ranks | None) -> ModelPlan:
    """Make the model, if needed, and find the source of its weights.

    Raises as `stream_model` says.
    """
    model = _model(asked, opened)
    packed = packed_format.parse(opened, asked.checksum)
    matched = match(model, opened, asked.strict, packed)
    if asked.compute != "widened":
        matched = _left_packed(model, matched, asked.compute)
    parallel: ParallelPasses | None = None
    if asked.tp_plan == EXPERTS_PLAN and ranks is not None:
        parallel = ExpertParallel(asked.process_group, ranks, asked.label)
    elif asked.tp_plan is not None and ranks is not None:
        words = tensor_parallel.check(model, asked.tp_plan, ranks, matched, opened)
        cutting = parallel = TensorParallel(asked.process_group, ranks, asked.label)
        matched = cutting.cut(model, words, matched)
        ranks.drop()
        ranks = None  # each reads for itself
    own_alignment = not asked.is_transformers or isinstance(parallel, TensorParallel)
    experts = _expert_sets(asked, model, matched, opened, own_alignment)
    if isinstance(parallel, ExpertParallel) and not any(map(can_be_shared_out, experts)):
        raise ValueError(
            f"{asked.label} has no fused experts that ranks can compute with for each other: leave "
            'out tp_plan="experts" (process_group= alone shares the reading of all else)'
        )
    of_experts = {id(target.empty) for each in experts for target in each.unit.targets}
    others_of = {key: weight for key, weight in matched.items() if key not in of_experts}
    if asked.host_bytes is not None and not experts:
        raise ValueError(
            f"host_bytes keeps more experts of a mixture in host memory, but {asked.label} keeps "
            "no experts one by one: leave it out"
        )
    needs = _needs_of(experts, parallel.size if isinstance(parallel, ExpertParallel) else 1)
    if asked.device.type == "cuda":
        needs = needs._replace(most=needs.least + needs.most)  # the room of a call is beside them

    def cut_to(most: int | None = None) -> Partition:
        """The model in units of so many bytes at most, laid out."""
        parts = partition(model, others_of, asked.layers, most)
        for unit in (parts.fixed, *parts.units):
            unit.plan(opened, own_alignment=own_alignment)
        return parts

    parts = cut_to()
    planned = (parts.fixed, *parts.units, *(each.unit for each in experts))
    check_part(opened, planned, ranks)
    others = 0 if ranks is None else room_for_others(parts.units, ranks.size)
    budget, left, half = asked.resident_bytes, None, 0
    if budget is None:
        left = memory_left()
        half = int(left * SHARE)
        if asked.device.type == "cuda":
            left = min(left, devices.left_on(asked.device))
        budget = _default_budget(parts, asked.window, others, needs, left)
    if ranks is not None:
        how = (asked.window, asked.checksum, asked.device.type, asked.compute, asked.tp_plan)
        digest = digest_of(opened, planned, *how)
        budget = ranks.meet(digest, budget)
        shares = share_out(parts.fixed, parts.units, budget, asked.window, others, needs)
    else:
        parts, shares = fit(parts, cut_to, budget, asked.window, left, needs)
    for unit in (parts.fixed, *parts.units, *(each.unit for each in experts)):
        (stand_ins.freeze if asked.trainable else stand_ins.stand_in)(unit, asked.device)
    if experts and asked.device.type == "cuda":
        host_bytes = max(half, budget) if asked.host_bytes is None else asked.host_bytes
        shares = _with_host_memory(shares, host_bytes, budget, needs)
    part = opened.metadata.get(packed_index.PART)
    stored = dict(opened.tensors)
    return ModelPlan(model, parts, experts, shares, ranks, parallel, stored, packed, part)


def _expert_sets(
    asked: Asked,
    model: nn.Module,
    matched: dict[int, Weight],
    opened: SafetensorsSet,
    own_alignment: bool,
) -> list[ExpertSet]:
    """The experts that are kept one by one; none where they are read with their layers.

    Training on a GPU looks at whole layers in backward.
    """
    on_device = asked.device.type != "cpu"
    if on_device and asked.trainable:
        return []
    sets = find_sets(model, matched)
    for each in sets:
        each.plan(opened, own_alignment)
    if on_device:
        level(sets)
        return sets
    needed = sum(each.all_nbytes for each in sets)
    limits = [
        _left_under(resource.RLIMIT_AS, "VmSize"),
        _left_under(resource.RLIMIT_DATA, "VmData"),
    ]
    room = min((limit for limit in limits if limit is not None), default=None)
    if room is not None and needed > room // 2:  # the other half is for what has memory
        logger.info(
            "experts are read with their layers: one by one they need %d bytes of address space, "
            "and the limits of this process leave %d (ulimit -v, ulimit -d)",
            needed,
            room,
        )
        return []
    return sets


def _with_host_memory(shares: Shares, host_bytes: int, budget: int, needs: ExpertNeeds) -> Shares:
    """Give what `host_bytes` has beyond the budget of the device to experts, as many as there are.

    Raises ValueError if it has less.
    """
    if host_bytes < budget:
        raise ValueError(
            f"host_bytes={host_bytes} is less than the {budget} bytes of resident_bytes, which the "
            "host holds in any case: raise it, or leave it out"
        )
    return shares._replace(host_experts=min(shares.experts + host_bytes - budget, needs.most))


def _needs_of(sets: Sequence[ExpertSet], ranks: int = 1) -> ExpertNeeds:
    """The memory that the experts of one rank need.

    The cache sets the largest memory for conversions aside for good.
    """
    if not sets:
        return NO_EXPERTS
    stages = max(experts.least_nbytes - experts.all_nbytes for experts in sets)
    own = [owned_nbytes(each, ranks) for each in sets]
    return ExpertNeeds(
        max(own) + stages,
        sum(own) + stages,
        max(experts.unit.widened_bytes for experts in sets),
    )


def _left_packed(
    model: nn.Module, matched: dict[int, Weight], compute: Compute
) -> dict[int, Weight]:
    """Leave quantised weights packed that modules only multiply with."""
    others = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not _multiplies(module, name, parameter)
    }
    parameters = {id(parameter) for parameter in model.parameters()}
    left = {
        key: weight._replace(compute=compute)
        for key, weight in matched.items()
        if weight.quantised is not None and key in parameters - others
    }
    return matched | left


def _multiplies(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if type(parameter) is not nn.Parameter or parameter.dtype is torch.float64:
        return False
    if isinstance(module, nn.Linear):  # torch's attention reads the weight of its own past it
        return name == "weight" and type(module) is not NonDynamicallyQuantizableLinear
    if isinstance(module, nn.Embedding):
        return name == "weight" and module.max_norm is None
    if type(module).__name__ == "Conv1D":  # of transformers
        return name == "weight" and hasattr(module, "nf")
    experts = getattr(module, "num_experts", None)
    return parameter.dim() == 3 and isinstance(experts, int) and len(parameter) == experts


def _model(asked: Asked, opened: SafetensorsSet) -> Any:
    if asked.is_transformers:
        model = transformers.empty_model(asked.given, asked.dtype, opened)
    else:
        model = asked.given
        dtype = asked.dtype
        if dtype and any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
            model.to(dtype)
    if hasattr(model, "initialize_weights") and hasattr(model, "config"):
        transformers.compute_buffers(model, asked.device)
    return model


def _default_budget(
    parts: Partition, window: int | None, others: int, experts: ExpertNeeds, left: int
) -> int:
    """Half of the available memory, but never less than streaming needs."""
    layers = 1 if window is None else window
    least = share_out(parts.fixed, parts.units, None, layers, others, experts).total
    return max(least, int(left * SHARE))


class Asked(NamedTuple):
    """The arguments of `stream_model` that say what is planned.

    None is for `dtype` that of the files, for `window` as many layers as do, for `resident_bytes` a
    share of what is left, and for `layers` what is known of the model.

    Attributes:
        given: A module, or transformers' configuration of one that is to be made.
        directory: The directory of that configuration; None if it, or the module, was given.
        name: The model's `name_or_path`, as it was given.
        label: The model's name in errors of several ranks.
        sources: The paths of the weights.
    """

    given: Any
    directory: str | os.PathLike[str] | None
    name: str
    label: str
    sources: list[str | os.PathLike[str]]
    device: torch.device
    dtype: torch.dtype | None
    window: int | None
    resident_bytes: int | None
    host_bytes: int | None
    layers: Sequence[nn.Module | str] | None
    strict: bool
    checksum: bool
    trainable: bool
    compute: Compute
    process_group: Any
    tp_plan: str | Mapping[str, str] | None

    @property
    def is_transformers(self) -> bool:
        """Whether the model is made here, by transformers."""
        return not isinstance(self.given, nn.Module)

    @classmethod
    def checked(
        cls,
        given: Any,
        checkpoint: Paths | None,
        *,
        revision: str | None,
        rank: int | None,
        device: str | int | torch.device,
        dtype: str | torch.dtype | None,
        resident_bytes: int | str | None,
        host_bytes: int | str | None,
        generates: bool,
        **rest: Any,
    ) -> Asked:
        """From the arguments of `stream_model` as they were given (`given`: the first one).

        `rank` is None where this process reads alone; `generates`: a cache of keys and values goes
        to the drive; `rest` are the other attributes. Raises as `hub.directory_of`, and TypeError
        or ValueError that say which argument is wrong, and what it can be.
        """
        resident_bytes = _checks.size("resident_bytes", resident_bytes)
        host_bytes = _checks.size("host_bytes", host_bytes)
        dtype = _checks.dtype("dtype", dtype)
        where = _checks.device("device", device)
        if rest["compute"] not in get_args(Compute):
            raise ValueError(
                f'compute must be "auto", "packed" or "widened", not {rest["compute"]!r}'
            )
        if host_bytes is not None and where.type == "cpu":
            raise ValueError(
                "host_bytes is for a GPU: on the CPU resident_bytes is all memory for weights"
            )
        group, plan, trainable = rest["process_group"], rest["tp_plan"], rest["trainable"]
        if plan is not None:
            _check_parallel(plan, where, group, trainable)
        if trainable:
            _check_trainable(where, generates, rank)
            where = devices.usable("device", where)
        label = name_of(checkpoint, given)
        if isinstance(given, (list, tuple)) and len(given) == 1:
            given = given[0]
        if isinstance(given, (list, tuple)):
            checkpoint = given if checkpoint is None else checkpoint
            given = _checks.directory_paths("the model", given)[0]
        name, directory = "", None
        if isinstance(given, (str, os.PathLike)):
            name = os.fspath(given)
            directory = packed_format.of_rank(hub.directory_of(given, revision), rank)
        elif revision is not None:
            raise ValueError("revision is for a repository on the hub: give its name as the model")
        sources, given = _sources(given if directory is None else directory, checkpoint, rank)
        for source in sources:
            model_directory.refuse_adapter(source)
        check_numbers(rest["window"], resident_bytes, host_bytes)
        return cls(
            given,
            directory,
            name,
            label,
            sources,
            device=where,
            dtype=dtype,
            resident_bytes=resident_bytes,
            host_bytes=host_bytes,
            **rest,
        )


def _check_trainable(where: torch.device, generates: bool, rank: int | None) -> None:
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"trainable=True computes on the CPU or on a CUDA device, not on {where}")
    if generates:
        raise ValueError(
            "kv_offload is for generating, which has no backward: leave it out, or "
            "stream another model without trainable=True"
        )
    if rank is not None:
        raise ValueError(
            "trainable=True reads in one process: each rank has its own order in backward. Leave "
            "out process_group=, and give each rank a copy of the files"
        )


def _check_parallel(plan: Any, where: torch.device, process_group: Any, trainable: bool) -> None:
    if plan not in ("auto", EXPERTS_PLAN) and not isinstance(plan, Mapping):
        raise ValueError(
            f'tp_plan must be "auto", "experts" or a dictionary of words, not {plan!r}'
        )
    if process_group is None:
        raise ValueError("tp_plan is for several ranks: name them with process_group=")
    if trainable:
        raise ValueError("trainable=True reads in one process: leave out tp_plan=")
    if where.type != "cpu":
        raise ValueError(f"tp_plan computes on the CPU, through gloo, not on {where}")


def name_of(checkpoint: Paths | None, given: Any) -> str:
    """The name of a model in errors of several ranks."""
    named = given if checkpoint is None else checkpoint
    if isinstance(named, (list, tuple)) and named:
        named = named[0]
    return os.fspath(named) if isinstance(named, (str, os.PathLike)) else type(named).__name__


def _sources(
    given: Any, checkpoint: Paths | None, rank: int | None
) -> tuple[list[str | os.PathLike[str]], Any]:
    """The paths of the weights, and a module or a configuration."""
    if isinstance(given, (str, os.PathLike)):
        sources = [given] if checkpoint is None else _several(checkpoint, rank)
        return sources, transformers.config_of(given)
    if not isinstance(given, nn.Module) and not hasattr(given, "model_type"):
        raise TypeError(
            "expected a directory, a transformers configuration or a torch.nn.Module, not "
            f"{type(given).__name__}"
        )
    if checkpoint is None:
        raise ValueError(f"{an(type(given).__name__)} needs checkpoint=, the path of its weights")
    return _several(checkpoint, rank), given


def _several(checkpoint: Paths, rank: int | None) -> list[str | os.PathLike[str]]:
    paths = _checks.directory_paths("checkpoint", checkpoint)
    if len(paths) > 1 and rank is not None:
        raise ValueError(
            "with process_group each rank reads one directory: give it its own, with a part "
            "(nvmeio pack --ranks) or a copy, and put several drives of a rank together as RAID 0"
        )
    return [paths[0] if len(paths) > 1 else packed_format.of_rank(paths[0], rank), *paths[1:]]


def memory_left() -> int:
    """Bytes that could be taken now, by the strictest limit that is known.

    Source: proc(5), MemAvailable, VmSize and VmData; cgroups(7), memory.max; getrlimit(2),
    RLIMIT_AS and RLIMIT_DATA (private writable memory, since Linux 4.7).
    """
    known = [
        system.available_bytes(),
        _left_in_group(),
        _left_under(resource.RLIMIT_AS, "VmSize"),
        _left_under(resource.RLIMIT_DATA, "VmData"),
    ]
    return max(0, min((left for left in known if left is not None), default=1 << 30))


def _left_under(which: int, field: str) -> int | None:
    limit, _ = resource.getrlimit(which)
    used = system.proc_bytes("/proc/self/status", field)
    return None if limit == resource.RLIM_INFINITY or used is None else limit - used


def _left_in_group() -> int | None:
    """Bytes left in the control group that this process is in, or one above it."""
    lines = system.text_of("/proc/self/cgroup").splitlines()
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return None
    left: list[int] = []
    group = _CGROUPS / name.lstrip("/")
    for directory in (group, *group.parents):
        if directory.is_relative_to(_CGROUPS):
            most = system.text_of(directory / "memory.max").strip()  # or "max"
            used = system.text_of(directory / "memory.current").strip()
            if most.isdecimal() and used.isdecimal():
                left.append(int(most) - int(used))
    return min(left, default=None)
