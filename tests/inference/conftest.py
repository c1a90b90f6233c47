"""What the tests of inference share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio.inference._plan import budget as budget_module
from nvmeio.inference._plan import units


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """transformers and what it imports warn of their own affairs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def everything_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are so small that they would be kept as the small parts of larger ones."""
    monkeypatch.setattr(units, "SMALL_BYTES", 1024)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of a few kilobytes gain nothing from threads, which spin beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_handle() -> Iterator[nvmeio.AioHandle]:
    """A handle for many tests: to give one back takes the kernel longer than most of them."""
    with nvmeio.AioHandle() as handle:
        yield handle


@pytest.fixture
def stream(one_handle: nvmeio.AioHandle) -> Iterator[Callable[..., Any]]:
    """`nvmeio.stream_model` of models that are closed after the test."""
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        options.setdefault("handle", one_handle)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.append(nvmeio.stream_model(*arguments, **options))
        return made[-1]

    yield make
    for model in made:
        model.weight_stream.close()


@pytest.fixture
def small_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tests are smaller than what is worth a read."""
    monkeypatch.setattr(budget_module, "LEAST_BYTES", 1 << 14)
