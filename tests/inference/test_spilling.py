"""Modules that are in memory, written to disk and streamed from there."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python, spin_until_collected
from torch import nn

import nvmeio
from nvmeio.errors import ClosedError, TransferError
from nvmeio.inference import spilling
from nvmeio.inference.spilling import Spiller, park, put_out, spill


def layers(count: int = 5, width: int = 96) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


def run(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for module in modules:
            x = module(x)
    return x


@pytest.mark.parametrize("resident", [None, 120_000, 1 << 30])
def test_spilled_layers_compute_the_same(resident: int | None, tmp_path: Path) -> None:
    modules: Any = layers()
    whole = layers()
    modules[0][0].weight.weight_loader = "what a server puts there"
    with nvmeio.AioHandle(engine="threads") as handle:
        stream = spill(modules, tmp_path, resident_bytes=resident, handle=handle)
        assert list(tmp_path.iterdir()) == []  # the files have no names
        assert all(p.is_meta for module in modules for p in module.parameters())
        assert modules[0][0].weight.weight_loader == "what a server puts there"
        for seed in range(3):
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))
            assert run(modules, x).equal(run(whole, x))
        assert (stream.stats.streamed_bytes == 0) == (resident == 1 << 30)
        stream.close()
        with pytest.raises(ClosedError):
            run(modules, x)


def test_spilled_layers_may_share_modules_without_parameters(tmp_path: Path) -> None:
    """SGLang caches its rotary embedding: one object for all layers, which has buffers only."""
    modules, whole, shared = layers(), layers(), nn.BatchNorm1d(96, affine=False).eval()
    assert shared.running_mean is not None
    shared.running_mean.uniform_(generator=torch.Generator().manual_seed(0))
    for module in (*modules, *whole):
        module.append(shared)  # type: ignore[operator]
    with nvmeio.AioHandle(engine="threads") as handle, spill(modules, tmp_path, handle=handle):
        x = torch.randn(4, 96)
        for _ in range(3):
            assert run(modules, x).equal(run(whole, x))


class Weight(nn.Parameter):
    """A class of a server's own."""


class Quantised(nn.Module):
    """Asks its weight how it is to be used, as kernels' callers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.randn(8, 8), requires_grad=False)
        self.weight.scale = 3.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Weight)
        return x @ self.weight * self.weight.scale  # type: ignore[attr-defined]


def test_weights_keep_class_and_attributes_while_they_are_used(tmp_path: Path) -> None:
    """They were plain parameters: SGLang notes on a weight in which format its scales are."""
    torch.manual_seed(0)
    module, x = Quantised(), torch.randn(2, 8)
    expected = module(x)
    with spill([module], tmp_path):
        assert module.weight.is_meta
        assert isinstance(module.weight, Weight)
        for _ in range(2):
            assert module(x).equal(expected)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_transposed_weights_come_back_transposed(order: tuple[int, ...], tmp_path: Path) -> None:
    """Quantised weights lie column by column, as kernels want them; they were refused."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            data = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
            self.weight = nn.Parameter(data.permute(order), requires_grad=False)

        def forward(self) -> tuple[torch.Tensor, tuple[int, ...]]:
            return self.weight.clone(), self.weight.stride()

    module, whole = Layer(), Layer()
    assert not whole.weight.is_contiguous()
    with spill([module, nn.Linear(2, 2)], tmp_path):
        weight, strides = module()
        assert weight.equal(whole.weight)
        assert strides == module.weight.stride() == whole.weight.stride()


def test_what_cannot_be_spilled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="modules to spill is empty"):
        spill([], tmp_path)
    with pytest.raises(TransferError):
        spill(layers(), tmp_path / "nowhere" / "below")
    odd: Any = layers()
    odd[1][0].weight.data = torch.zeros(96, 192)[:, :96]
    with pytest.raises(ValueError, match=r"'1\.0\.weight' .* has holes"):
        spill(odd, tmp_path)
    assert odd[0][0].weight.equal(layers()[0][0].weight)  # type: ignore[index]
    odd[1][0].weight = nn.Parameter(torch.empty(96, 96, device="meta"))
    with pytest.raises(ValueError, match="has no memory"):
        spill(odd, tmp_path)
    for options, error in (({"window": 0}, ValueError), ({"resident_bytes": 1.5}, TypeError)):
        with pytest.raises(error):
            spill(layers(), tmp_path, **options)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.mul_(2),
    "other data": lambda weight: setattr(weight, "data", weight * 2),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("early", [False, True])
def test_a_change_after_the_write_is_refused(change: str, early: bool, tmp_path: Path) -> None:
    """It was lost, without a word; another module's write of a tied weight did not help."""
    modules: Any = layers(2)
    modules[1][0].weight = modules[0][0].weight
    with Spiller(tmp_path) as spiller:
        spiller.write(modules[0])
        CHANGES[change](modules[0][0].weight)
        with pytest.raises(RuntimeError, match=r"'0\.0\.weight' .* changed after it was written"):
            if early:
                spiller.release(modules[0])
            spiller.write(modules[1])
            spiller.stream()


def test_a_change_of_what_was_released_is_refused(tmp_path: Path) -> None:
    modules: Any = layers(1)
    with Spiller(tmp_path) as spiller:
        spiller.write(modules[0])
        spiller.release(modules[0])
        with torch.no_grad():
            modules[0][0].weight.zero_()
        with pytest.raises(RuntimeError, match="was changed after it was written"):
            spiller.stream()


@torch.no_grad()
@pytest.mark.parametrize("early", [False, True])
def test_a_weight_on_disk_is_computed_with_as_it_is(early: bool, tmp_path: Path) -> None:
    """It was a bare meta tensor: torch multiplies memory with that, and gave what lay there."""
    modules: Any = layers(2)
    x, whole = torch.randn(4, 96), modules[0][0].weight.clone()
    with Spiller(tmp_path) as spiller:
        for module in modules:
            spiller.write(module)
            if early:
                spiller.release(module)
                with pytest.raises(RuntimeError, match="on disk"):
                    x @ modules[0][0].weight
        before = modules[0][0].weight
        stream = spiller.stream()
    for weight in (before, modules[0][0].weight):
        assert weight.device == x.device
        assert (x @ weight).equal(x @ whole)
        assert weight.sum() == whole.sum()
    stream.close()


def test_a_layer_gives_up_its_memory_as_soon_as_it_is_released(tmp_path: Path) -> None:
    modules, whole = layers(), layers()
    with nvmeio.AioHandle(engine="threads") as handle:
        with Spiller(tmp_path, handle) as spiller:
            for module in modules:
                data = weakref.ref(module[0].weight)  # type: ignore[index]
                spiller.write(module)
                spiller.release(module)
                spin_until_collected(lambda data=data: data() is None)  # type: ignore[misc]
                assert all(p.is_meta for p in module.parameters())
            stream = spiller.stream(window=2)
        assert list(tmp_path.iterdir()) == []
        x = torch.randn(3, 96)
        for _ in range(2):
            assert run(modules, x).equal(run(whole, x))
        stream.close()


def test_tied_weights_of_released_layers_are_one(tmp_path: Path) -> None:
    def tied() -> list[nn.Module]:
        made: Any = layers(3)
        made[2][0].weight = made[0][0].weight
        return made

    modules, whole = tied(), tied()
    with Spiller(tmp_path) as spiller:
        for module in modules:
            spiller.write(module)
            spiller.release(module)
        assert modules[0][0].weight is modules[2][0].weight  # type: ignore[index]
        stream = spiller.stream(window=1)
    x = torch.randn(3, 96)
    assert run(modules, x).equal(run(whole, x))
    stream.close()


def test_kept_parameters_stay_as_they_are(tmp_path: Path) -> None:
    modules: Any = layers(2)
    bias = modules[0][0].bias
    with Spiller(tmp_path) as spiller:
        for module in modules:
            spiller.write(module, {"0.bias"})
            spiller.release(module)
        stream = spiller.stream()
    assert modules[0][0].bias is bias
    x = torch.randn(3, 96)
    assert run(modules, x).equal(run(layers(2), x))
    stream.close()


def test_a_spiller_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    spiller = Spiller(tmp_path)
    spiller.write(layers(1)[0])
    assert list(tmp_path.iterdir()) == [spiller.path]
    spiller.close()
    spiller.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    killed = run_python(
        f"""
        import os, torch
        from nvmeio.inference.spilling import Spiller
        spiller = Spiller({str(tmp_path)!r})
        spiller.write(torch.nn.Linear(8, 8))
        print(spiller.path, flush=True)
        os._exit(9)
        """
    )
    left = Path(killed.stdout.strip())
    assert list(tmp_path.iterdir()) == [left]
    with Spiller(tmp_path) as first:
        assert not left.exists()
        first.write(layers(1)[0])
        with Spiller(tmp_path) as second:
            assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
        assert len(list(first.path.iterdir())) == 1


def test_what_an_interrupt_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed locked by this process, and nobody removed it before its end."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spilling, "remove_directory", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spill(layers(), tmp_path)
    assert list(tmp_path.iterdir())
    spill(layers(), tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_a_fork_leaves_the_files_of_its_parent(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, sys, torch
        from nvmeio.inference.spilling import Spiller
        spiller = Spiller({str(tmp_path)!r}, None)
        spiller.write(torch.nn.Linear(8, 8))
        child = os.fork()
        if child == 0:
            import weakref
            weakref.finalize._exitfunc()
            os._exit(0)
        os.waitpid(child, 0)
        print(len(list(spiller.path.iterdir())))
        """
    )
    assert (done.stdout.split(), list(tmp_path.iterdir())) == (["1"], [])


# Parameters in a mapped file


def test_parked_parameters_keep_their_values_and_strides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(5, 7)),
        nn.Parameter(torch.randn(4, 6).t()),
        nn.Parameter(torch.randn(3).to(torch.bfloat16)),
        nn.Parameter(torch.empty(0, 4)),
        nn.Parameter(torch.tensor(True), requires_grad=False),
    ]
    before = [(p.detach().clone(), p.stride(), p.dtype) for p in parameters]
    mapping = park(parameters, tmp_path)
    assert mapping is not None
    assert list(tmp_path.iterdir()) == []  # the file has no name
    put_out(mapping)
    for parameter, (values, strides, dtype) in zip(parameters, before, strict=True):
        assert (parameter.stride(), parameter.dtype) == (strides, dtype)
        assert parameter.equal(values)
    with torch.no_grad():
        parameters[0].zero_()
    put_out(mapping)
    assert parameters[0].equal(torch.zeros(5, 7))


def test_a_parked_mapping_ends_with_its_tensors(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))]
    mapping = weakref.ref(park(parameters, tmp_path))  # type: ignore[arg-type]
    parameters[0].data = torch.empty(0)
    assert mapping() is not None
    parameters[1].data = torch.empty(0)
    spin_until_collected(lambda: mapping() is None)


def test_room_that_is_not_there_is_told_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int, path: str) -> None:
        raise TransferError(28, operation="fallocate", path=path, nbytes=nbytes)

    monkeypatch.setattr("nvmeio.inference.spilling.reserve", full)
    parameter = nn.Parameter(torch.ones(4))
    address = parameter.data_ptr()
    with pytest.raises(TransferError, match=os.strerror(28)):
        park([parameter], tmp_path)
    assert (parameter.data_ptr(), parameter.tolist()) == (address, [1.0] * 4)


def test_nothing_to_park_makes_no_file(tmp_path: Path) -> None:
    assert park([], tmp_path / "nowhere") is None
