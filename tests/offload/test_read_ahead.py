"""The first reads of a step begin when the one before it is over; none of them is ever stale."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, model, train
from inside import swapper_of
from offload._swapping import swapped
from support import spin_until

import nvmeio
from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import TransferError
from nvmeio.files import File
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._swap_files.pipeline import Pipeline, SlotTurn
from nvmeio.testing import FakeEngine

NBYTES = 4096
TURNS = 6


class Watching(FakeEngine):
    """Notes at which offsets reads begin, and fails those in `broken`."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.broken: set[int] = set()
        super().__init__(fail=self._decide)

    def _decide(self, kind: str, offset: int, nbytes: int) -> int:
        if kind != "pread":
            return 0
        self.read.append(offset)
        return errno.EIO if offset in self.broken else 0


@pytest.fixture
def watching() -> Watching:
    return Watching()


@pytest.fixture
def handle(watching: Watching) -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(engine=watching) as made:
        yield made


@pytest.fixture
def pipeline(handle: nvmeio.AioHandle) -> Iterator[Pipeline]:
    helper = OwnerThread("helper")
    made = Pipeline(DriveHandles(handle, []), read_ahead=True, write_behind=True, helper=helper)
    made.make(NBYTES, 3)
    yield made
    made.close()
    helper.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    """Its page n has the byte n everywhere."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * NBYTES for number in range(TURNS)))
    with nvmeio.open(path) as opened:
        yield opened


def reads(file: File, number: int) -> list[FileSpan]:
    return [FileSpan(file, number * NBYTES, 0, NBYTES)]


def seen_by(pipeline: Pipeline, file: File, numbers: list[int]) -> list[int]:
    """The first byte of each slot as its turn computes."""
    seen: list[int] = []

    def compute(slot: torch.Tensor) -> list[FileSpan]:
        seen.append(int(slot[0]))
        return []

    pipeline.run([SlotTurn(reads(file, number), compute) for number in numbers])
    return seen


def test_the_next_read_begins_before_the_last_one_is_verified(
    pipeline: Pipeline, file: File, watching: Watching
) -> None:
    """The drive waited while checksums were compared."""
    looked: list[int] = []

    def verify(number: int, slot: torch.Tensor) -> None:
        looked.append(int(slot[0]))
        if number < 2:  # there is a slot for each
            spin_until(lambda: (number + 1) * NBYTES in watching.read)

    turns = [
        SlotTurn(reads(file, n), lambda _: [], functools.partial(verify, n)) for n in range(TURNS)
    ]
    pipeline.run(turns)
    assert looked == [*range(TURNS)]


def test_what_was_read_ahead_is_not_read_again(
    pipeline: Pipeline, file: File, watching: Watching
) -> None:
    pipeline.fill_ahead([reads(file, 0), reads(file, 1)])
    assert seen_by(pipeline, file, [0, 1, 2, 3]) == [0, 1, 2, 3]
    # A page of the third turn is read first, to try the drive.
    assert sorted(watching.read) == [0, NBYTES, 2 * NBYTES, 2 * NBYTES, 3 * NBYTES]
    assert pipeline.read_bytes == 4 * NBYTES


def test_a_run_that_reads_something_else_drops_it(
    pipeline: Pipeline, file: File, watching: Watching
) -> None:
    pipeline.fill_ahead([reads(file, 0), reads(file, 1), reads(file, 2)])
    assert seen_by(pipeline, file, [0, 4, 2, 3]) == [0, 4, 2, 3]
    assert seen_by(pipeline, file, [1, 2]) == [1, 2]


def test_what_cannot_be_read_ahead_is_read_again(
    pipeline: Pipeline, file: File, watching: Watching
) -> None:
    watching.broken.add(NBYTES)
    pipeline.fill_ahead([reads(file, 0), reads(file, 1), reads(file, 2)])
    pipeline._ahead[1].operations[0].exception()
    watching.broken.clear()
    assert seen_by(pipeline, file, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_a_read_that_goes_on_failing_is_raised(
    pipeline: Pipeline, file: File, watching: Watching
) -> None:
    watching.broken.add(NBYTES)
    pipeline.fill_ahead([reads(file, 0), reads(file, 1), reads(file, 2)])
    with pytest.raises(TransferError):
        seen_by(pipeline, file, [0, 1, 2, 3])
    watching.broken.clear()
    assert seen_by(pipeline, file, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_the_owner_of_a_handle_is_not_told_of_what_is_read_again(
    pipeline: Pipeline, file: File, watching: Watching, handle: nvmeio.AioHandle
) -> None:
    """`wait` and `close` raised what the next step makes good."""
    watching.broken.add(NBYTES)
    pipeline.fill_ahead([reads(file, 0), reads(file, 1), reads(file, 2)])
    assert handle.wait() == 3
    watching.broken.clear()
    assert seen_by(pipeline, file, [0, 1, 2]) == [0, 1, 2]
    watching.broken.add(NBYTES)
    pipeline.fill_ahead([reads(file, 0), reads(file, 1)])
    handle.close()


def test_more_is_read_than_was_known_ahead(pipeline: Pipeline, file: File) -> None:
    """As of a turn whose gradients are on the drive."""
    first = FileSpan(file, 0, 0, 512)
    second = FileSpan(file, 3 * NBYTES, 512, 512)
    found: list[list[int]] = []

    def compute(slot: torch.Tensor) -> list[FileSpan]:
        found.append([int(slot[0]), int(slot[512])])
        return []

    pipeline.fill_ahead([[first]])
    pipeline.run([SlotTurn([first, second], compute)])
    assert found == [[0, 3]]


def test_memory_is_given_back_once_nothing_is_in_flight(
    pipeline: Pipeline, file: File, handle: nvmeio.AioHandle
) -> None:
    pipeline.fill_ahead([reads(file, 0), reads(file, 1)])
    pipeline.free()
    assert handle.stats.in_flight == 0
    assert not pipeline.slots


# Of an optimizer


def ahead(optimizer: SwappedOptimizer) -> int:
    """How many slots are filled for the next step."""
    swapper: Any = swapper_of(optimizer)
    count: int = swapper._owner.call(lambda: len(swapper.pipeline._ahead))
    return count


def half(optimizer: Any) -> None:
    """Halve the moments, by a state dict that is loaded."""
    state = optimizer.state_dict()
    for entry in state["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = torch.as_tensor(entry[name]).clone() / 2
    optimizer.load_state_dict(state)


def doubled(optimizer: Any) -> None:
    """Other weights, which the drive has a copy of."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(2)
    if isinstance(optimizer, SwappedOptimizer):
        optimizer.reload_weights()


def more(optimizer: Any) -> None:
    torch.manual_seed(4)
    parameter = torch.nn.Parameter(torch.randn(70_000))
    parameter.grad = torch.randn(70_000)
    optimizer.add_param_group({"params": [parameter], "lr": 0.1})


def fewer(optimizer: Any) -> None:
    """A step without the first parameter's gradient."""
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = torch.full_like(parameter, 0.1) if number else None
    optimizer.step()
    optimizer.zero_grad()


def slower(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] /= 3


@pytest.mark.parametrize("between", [half, doubled, more, fewer, slower])
@pytest.mark.parametrize("options", [{}, {"recoverable": False}, {"ratio": 0.6}])
def test_whatever_comes_between_two_steps(
    between: Callable[[Any], None], options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = model(), model()
    memory = torch.optim.Adam(theirs.parameters())
    with swapped(ours, tmp_path, **options) as optimizer:
        for count in (1, 2):
            assert train(ours, optimizer, 2, 4 * count) == train(theirs, memory, 2, 4 * count)
            assert ahead(optimizer)
            between(optimizer)
            between(memory)
            assert train(ours, optimizer, 2, 4 * count + 2) == train(
                theirs, memory, 2, 4 * count + 2
            )
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), memory.state_dict())


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_masters_and_gradients_on_the_drive(gradients: str, tmp_path: Path) -> None:
    ours, plain = model(torch.bfloat16), model(torch.bfloat16)
    options: dict[str, Any] = {"master_dtype": torch.float32, "gradients": gradients}
    with (
        swapped(ours, tmp_path / "ours", **options) as optimizer,
        swapped(plain, tmp_path / "plain", pipeline_read=False, **options) as other,
    ):
        assert train(ours, optimizer, 5) == train(plain, other, 5)
        assert ahead(optimizer)
        assert not ahead(other)
        assert_same_weights(ours, plain)


def test_weights_that_a_module_may_change_are_not_read_ahead(tmp_path: Path) -> None:
    made = SwappedModule(model(), swap_dir=tmp_path / "module", resident_bytes=1 << 20)
    with made, swapped(made, tmp_path / "state") as optimizer:
        train(made, optimizer, 2)
        assert not ahead(optimizer)


def test_an_optimizer_is_closed_over_reads_ahead(tmp_path: Path) -> None:
    made = model()
    with nvmeio.AioHandle() as handle:
        optimizer = swapped(made, tmp_path, handle=handle)
        train(made, optimizer, 2)
        optimizer.close()
        assert handle.stats.in_flight == 0
    assert not list(tmp_path.iterdir())


def test_a_handle_that_was_closed_between_two_steps(tmp_path: Path) -> None:
    made = model()
    with nvmeio.AioHandle() as handle:
        optimizer = swapped(made, tmp_path, handle=handle)
        train(made, optimizer, 2)
    with pytest.raises(nvmeio.ClosedError):
        train(made, optimizer, 1)
    optimizer.close()


def test_a_drive_that_fails_between_two_steps_leaves_the_step_to_be_made(tmp_path: Path) -> None:
    """The first turns were computed from what was read before, and could not be undone then."""
    drive_is_gone = [False]

    def failure(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pread" and drive_is_gone[0] else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=failure)) as handle:
        weights = [torch.nn.Parameter(torch.randn(60_000)) for _ in range(6)]
        theirs = [torch.nn.Parameter(w.detach().clone()) for w in weights]
        reference = torch.optim.Adam(theirs)
        with SwappedOptimizer(
            torch.optim.Adam, weights, swap_dir=tmp_path, handle=handle, subgroup_bytes=1 << 18
        ) as optimizer:

            def step(wanted: bool) -> None:
                for ours, other in zip(weights, theirs, strict=True):
                    ours.grad, other.grad = torch.ones(60_000), torch.ones(60_000)
                if wanted:
                    reference.step()
                optimizer.step()

            step(True)
            step(True)
            optimizer._transactions.owner.drain()  # the reads ahead have begun
            drive_is_gone[0] = True
            with pytest.raises(nvmeio.TransferError):
                step(False)
            assert not optimizer.broken
            drive_is_gone[0] = False
            step(True)
            for ours, other in zip(weights, theirs, strict=True):
                assert torch.equal(ours, other)
