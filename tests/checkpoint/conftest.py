"""Checkpointers for the tests, closed after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint._snapshot_training import Training
from faults._support import MIB
from support import HeldEngine

import nvmeio
from nvmeio._formats.torch_archives import torch_writing


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def new(directory: Path) -> Iterator[Callable[..., nvmeio.Checkpointer]]:
    """Makes Checkpointers of `directory` that are closed after the test."""
    made: list[nvmeio.Checkpointer] = []

    def make(**options: Any) -> nvmeio.Checkpointer:
        made.append(nvmeio.Checkpointer(directory, **options))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def held(new: Any, engine_held: HeldEngine, new_handle: Any) -> nvmeio.Checkpointer:
    """One that writes nothing before the gate of `engine_held` is opened."""
    checkpointer: nvmeio.Checkpointer = new(handle=new_handle(engine_held, block_size=MIB))
    return checkpointer


@pytest.fixture
def little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a state is not read yet when somebody writes to it."""
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", MIB // 4)
    monkeypatch.setattr(torch_writing, "STAGINGS", 2)


@pytest.fixture
def training() -> Training:
    return Training()
