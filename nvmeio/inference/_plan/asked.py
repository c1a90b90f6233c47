"""What `stream_model` was asked for, checked: which model, from which files, computed how."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._memory import devices
from nvmeio.inference import hub
from nvmeio.inference._packed import format
from nvmeio.inference._plan import transformers
from nvmeio.inference._plan.budget import check_numbers


class Asked(NamedTuple):
    """The arguments of `stream_model` that say what is planned.

    Attributes:
        given: A module, or transformers' configuration of one that is to be made.
        directory: Where that configuration came from; None where it, or the module, was given.
        name: What was given, for the model's `name_or_path`.
        label: What errors of several ranks name.
        sources: Where the weights are.
        device: Where the model computes.
        dtype: Of its weights; None for that of the files.
        window: Layers in the window; None for as many as do.
        resident_bytes: For all weights; None for a share of what is left.
        layers: What is streamed as one; None for what is known of the model.
        strict: Whether a tensor without a place is refused.
        checksum: Whether checksums are compared.
        trainable: Whether gradients go through it.
        process_group: Of several ranks.
        tp_plan: How these cut the model, if they do.
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
    layers: Sequence[nn.Module | str] | None
    strict: bool
    checksum: bool
    trainable: bool
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
        generates: bool,
        **rest: Any,
    ) -> Asked:
        """From the arguments as they were given.

        Args:
            given: `model_or_config_or_path`.
            checkpoint: Where the weights are, if not there.
            revision: Of a repository on the hub.
            rank: Of this process; None where it reads alone.
            device: Where the model computes.
            dtype: Of its weights.
            resident_bytes: For all weights.
            generates: Whether a cache of keys and values goes to the drive.
            rest: The other attributes.

        Raises:
            FileNotFoundError, OSError: As `hub.directory_of` says.
            TypeError, ValueError: An argument is not what it can be; says which, and what can.
        """
        resident_bytes = _checks.size("resident_bytes", resident_bytes)
        dtype = _checks.dtype("dtype", dtype)
        where = _checks.device("device", device)
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
            directory = format.of_rank(hub.directory_of(given, revision), rank)
        elif revision is not None:
            raise ValueError("revision is of a repository on the hub: give its name with it")
        sources, given = _sources(given if directory is None else directory, checkpoint, rank)
        check_numbers(rest["window"], resident_bytes)
        return cls(
            given,
            directory,
            name,
            label,
            sources,
            device=where,
            dtype=dtype,
            resident_bytes=resident_bytes,
            **rest,
        )


def _check_trainable(where: torch.device, generates: bool, rank: int | None) -> None:
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"trainable=True computes on the CPU or on a CUDA device, not on {where}")
    if generates:
        raise ValueError(
            "kv_offload is for generating, where backward does not come: leave it out, or "
            "stream another model without trainable=True"
        )
    if rank is not None:
        raise ValueError(
            "trainable=True reads in one process: backward's order is each rank's own. Leave out "
            "process_group=, and give each rank a copy of the files"
        )


def _check_parallel(plan: Any, where: torch.device, process_group: Any, trainable: bool) -> None:
    if plan != "auto" and not isinstance(plan, Mapping):
        raise ValueError(f'tp_plan must be "auto" or a dictionary of words, not {plan!r}')
    if process_group is None:
        raise ValueError("tp_plan is for several ranks: name them with process_group=")
    if trainable:
        raise ValueError("trainable=True reads in one process: leave out tp_plan=")
    if where.type != "cpu":
        raise ValueError(f"tp_plan computes on the CPU, through gloo, not on {where}")


def name_of(checkpoint: Paths | None, given: Any) -> str:
    """What errors of several ranks name."""
    named = given if checkpoint is None else checkpoint
    if isinstance(named, (list, tuple)) and named:
        named = named[0]
    return os.fspath(named) if isinstance(named, (str, os.PathLike)) else type(named).__name__


def _sources(
    given: Any, checkpoint: Paths | None, rank: int | None
) -> tuple[list[str | os.PathLike[str]], Any]:
    """Where the weights are, and a module or a configuration."""
    if isinstance(given, (str, os.PathLike)):
        sources = [given] if checkpoint is None else _several(checkpoint, rank)
        return sources, transformers.config_of(given)
    if not isinstance(given, nn.Module) and not hasattr(given, "model_type"):
        raise TypeError(
            "expected a directory, a transformers configuration or a torch.nn.Module, not "
            f"{type(given).__name__}"
        )
    if checkpoint is None:
        raise ValueError(
            f"checkpoint= is needed with a {type(given).__name__}: where the weights are"
        )
    return _several(checkpoint, rank), given


def _several(checkpoint: Paths, rank: int | None) -> list[str | os.PathLike[str]]:
    paths = _checks.directory_paths("checkpoint", checkpoint)
    if len(paths) > 1 and rank is not None:
        raise ValueError(
            "with process_group each rank reads one directory: give it its own, with a part "
            "(nvmeio pack --ranks) or a copy, and put several drives of a rank together as RAID 0"
        )
    return [paths[0] if len(paths) > 1 else format.of_rank(paths[0], rank), *paths[1:]]
