"""States that DCP saves and loads, by torch's classes and by ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import bytes_tensor, random_bytes, raw
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

State = dict[str, Any]


def blank(value: Any) -> Any:
    """The same with other bytes."""
    if isinstance(value, torch.Tensor):
        made = torch.empty(value.shape, dtype=value.dtype)
        made.view(torch.uint8).fill_(1) if made.dim() and made.numel() else None
        return made
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    return "other"


def save(state: State, path: Path, **options: Any) -> Metadata:
    return dcp.save(state, storage_writer=NvmeStorageWriter(path, **options))


def load(state: State, path: Path, **options: Any) -> State:
    """What the checkpoint has for the keys of a state."""
    found: State = blank(state)
    dcp.load(found, storage_reader=NvmeStorageReader(path, **options))
    return found


@contextmanager
def refused(kind: type[BaseException], match: str = "") -> Iterator[list[Any]]:
    """Expects torch's CheckpointException around an error of a kind; the list gets the error."""
    found: list[Any] = []
    with pytest.raises(dcp.CheckpointException) as told:
        yield found
    found.append(told.value.failures[0][0])
    assert type(found[0]).__name__ == kind.__name__ or isinstance(found[0], kind), found
    assert re.search(match, str(found[0])), found


def every_form() -> State:
    base = torch.randn(400, 300)
    dtypes = {
        str(dtype): bytes_tensor(random_bytes(96, 1)).view(dtype)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.int64,
            torch.uint16,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    }
    return {
        **dtypes,
        "bool": torch.tensor([True, False, True]),
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "odd": torch.arange(70_001, dtype=torch.int32).to(torch.uint8),
        "large": torch.randn(1100, 1001),
        "transposed": torch.randn(700, 900).t(),
        "columns": base[:, 100:250],
        "rows": base[100:],
        "conjugate": torch.randn(100, 90, dtype=torch.complex64).conj(),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(8, 8)),
        "nested": {"list": [torch.randn(3), 4, "five"], "text": "s" * 5000, "none": None},
        "object": {1, 2, 3},
    }


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        dense = wanted.detach().resolve_conj().contiguous()
        assert raw(found.detach().contiguous()) == raw(dense), where
    elif isinstance(wanted, dict):
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == wanted, where


def files_of(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


class Failing(DefaultSavePlanner):
    """Resolves the first items only."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "w2":
            raise ArithmeticError("not this one")
        return super().resolve_data(write_item)
