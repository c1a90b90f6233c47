"""Parking of what a device has: its memory goes back to the allocator, and comes back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator

from nvmeio.offload import park, resume_parked

SIZE = 40_000  # elements: 160 KB


@pytest.fixture(autouse=True)
def resizable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As storages of a device's are; those of the stand-in are of a mapping."""
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda storage: True)


def made(cuda: Accelerator) -> tuple[Any, Any, list[torch.Tensor]]:
    """A module with gradients and momenta on a device, and the values of all three."""
    torch.manual_seed(0)
    module, values = torch.nn.Module(), []

    def there() -> torch.Tensor:
        values.append(torch.randn(SIZE))
        return cuda.tensor(values[-1])

    module.weight = torch.nn.Parameter(there())
    module.tied = module.weight
    module.other = torch.nn.Parameter(there())
    module.weight.grad = there()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = there()
    return module, optimizer, values


def tensors_of(module: Any, optimizer: Any) -> list[torch.Tensor]:
    momenta = [optimizer.state[p]["momentum_buffer"] for p in module.parameters()]
    return [module.weight, module.other, module.weight.grad, *momenta]


# The ring polls its copies, so that they may not be lazy.
@pytest.mark.parametrize("pace", [Pace.EAGER, Pace.RANDOM])
def test_memory_goes_back_to_the_device(
    pace: Pace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emptied: list[bool] = []
    with accelerator(monkeypatch, pace, pace) as cuda:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        module, optimizer, values = made(cuda)
        tensors = tensors_of(module, optimizer)
        with park(module, optimizer, swap_dir=tmp_path) as parked:
            assert parked.freed_bytes == 4 * SIZE * 5
            assert len(cuda.emptied) == 5
            assert emptied
            assert all(bool(cuda.value(each).isnan().all()) for each in tensors)
        assert not cuda.emptied
        assert all(a is b for a, b in zip(tensors_of(module, optimizer), tensors, strict=True))
        for mine, wanted in zip(tensors, values, strict=True):
            equal = torch.equal(cuda.value(mine), wanted)
            assert equal
        assert module.tied is module.weight


def test_memory_that_somebody_else_sees_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A device's memory goes as a whole: a view would be over nothing."""
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        module, optimizer, _ = made(cuda)
        view = module.other.detach()
        with pytest.raises(
            ValueError, match=r"other .* has its memory in common with 1 further tensor, of"
        ):
            park(module, optimizer, swap_dir=tmp_path)
        del view
        park(module, optimizer, swap_dir=tmp_path).restore()


def test_it_is_parked_again_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is back was still kept by its Parked: the next park took that for somebody's view."""
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        module, optimizer, values = made(cuda)
        for _ in range(3):
            with park(module, optimizer, swap_dir=tmp_path) as parked:
                parked.restore("parameters")
                assert cuda.value(module.other).equal(values[1])
            assert parked.restored
        for mine, wanted in zip(tensors_of(module, optimizer), values, strict=True):
            equal = torch.equal(cuda.value(mine), wanted)
            assert equal


def test_state_comes_back_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step count on a device, as fused kernels want it, came back in host memory."""
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        module, optimizer, values = made(cuda)
        steps = {"fused": cuda.tensor(torch.tensor(3.0)), "plain": torch.tensor(4.0)}
        optimizer.state[module.other] |= {**steps, "offloaded": torch.ones(SIZE)}
        park(module, optimizer, swap_dir=tmp_path).close()
        fresh, stepping, _ = made(cuda)
        stepping.state.clear()
        resume_parked(fresh, stepping, swap_dir=tmp_path)
        state = stepping.state[fresh.other]
        assert state["fused"].device == state["momentum_buffer"].device == fresh.other.device
        assert state["plain"].device == state["offloaded"].device == torch.device("cpu")
        assert cuda.value(state["fused"]) == 3
        same = torch.equal(cuda.value(state["momentum_buffer"]), values[-1])
        assert same
