"""One thread computes: on a busy machine torch's threads mostly wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload._saved_activations import small

import nvmeio
from nvmeio.offload import SwappedActivations


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of the processes that tests start
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def handle() -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle() as made:
        yield made


@pytest.fixture
def swapped(tmp_path: Path, handle: nvmeio.AioHandle) -> Iterator[SwappedActivations]:
    """With a window that holds next to nothing."""
    with small(tmp_path, handle) as made:
        yield made
