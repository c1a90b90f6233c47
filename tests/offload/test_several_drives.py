"""State, gradients and parameters over several directories: the same bits, each drive its share."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_weights, loss_of, model, train
from inside import swapper_of
from support import PATIENCE_S

import nvmeio
from nvmeio._io.drives import FileSpan
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines.base import Opcode
from nvmeio.engines.threads import Block, ThreadsEngine
from nvmeio.errors import ClosedError
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._swap_files import swap_dirs
from nvmeio.offload._swap_files.file_tensors import file_tensor
from nvmeio.offload._swap_files.swap_dirs import SwapDir

SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10, "lr": 1e-2}
WIDTH = 300  # 5.4 MB of weights, so that sections are dealt to all drives


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("one", "two", "three")]


def swapped(made: Any, folders: Any, **options: Any) -> SwappedOptimizer:
    given = {**SMALL, **options}
    return SwappedOptimizer(torch.optim.AdamW, made.parameters(), swap_dir=folders, **given)


class Counting(ThreadsEngine):
    """Counts the bytes that system calls move, by the user's directory."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[tuple[str, str]] = Counter()
        self._one = threading.Lock()

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        kind = "read" if block.request.transfer.opcode == Opcode.READ else "written"
        drive = Path(os.readlink(f"/proc/self/fd/{fd}")).parent.parent.name
        done = super()._move(block, fd, memory, offset)
        with self._one:
            self.moved[drive, kind] += done
        return done


# The same bits


def in_memory(steps: int) -> Any:
    made = model()
    train(made, torch.optim.AdamW(made.parameters(), lr=1e-2), steps)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradients": "disk"},
        {"recoverable": False},
        {"ratio": 0.5},
        {"master_dtype": torch.float32, "gradients": "disk"},
        {"pipeline_read": False, "pipeline_write": False, "checksum": False},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_the_bits_are_those_of_one_directory(
    options: dict[str, Any], drives: list[Path], tmp_path: Path
) -> None:
    found = []
    for folders in (tmp_path / "alone", drives):
        dtype = torch.bfloat16 if "master_dtype" in options else torch.float32
        made = model(dtype)
        with swapped(made, folders, **options) as optimizer:
            losses = train(made, optimizer, 4)
            state = optimizer.state_dict()["state"]
            copies = [
                {name: value.clone() for name, value in entry.items()} for entry in state.values()
            ]
        found.append((made, losses, copies))
    (one, losses, state), (several, their_losses, their_state) = found
    assert losses == their_losses
    assert_same_weights(several, one)
    for mine, theirs in zip(state, their_state, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(list(folder.iterdir()) == [] for folder in drives)  # nothing is left


@pytest.mark.parametrize("masters", [False, True])
def test_a_module_over_several_drives(masters: bool, drives: list[Path]) -> None:
    """Its parameters are in its own files with masters, in the state files without."""
    dtype = torch.bfloat16 if masters else torch.float32
    options = {"master_dtype": torch.float32} if masters else {}
    reference = model(dtype, WIDTH)
    with_state = SwappedOptimizer(
        torch.optim.AdamW, reference.parameters(), swap_dir=drives[0].parent / "other",
        lr=1e-2, **options,
    )  # fmt: skip
    made = SwappedModule(model(dtype, WIDTH), swap_dir=drives, resident_bytes="8M")
    optimizer = swapped(made, drives, subgroup_bytes="1M", gradients="disk", **options)
    with with_state, made, optimizer:
        wanted = loop(reference, with_state)
        assert loop(made, optimizer) == wanted
        found = made.state_dict()
        for name, parameter in reference.named_parameters():
            assert torch.equal(found[f"module.{name}" if f"module.{name}" in found else name],
                               parameter)  # fmt: skip


def loop(made: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        inner = made.module if isinstance(made, SwappedModule) else made
        x = x.to(next(inner.parameters()).dtype)
        loss = (made(x).float().squeeze() - x.float().sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Each its share


@pytest.mark.parametrize("weights", [[1, 1, 1], [500, 300, 200]])
def test_each_drive_moves_its_share(
    weights: list[int], drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of transfer: state, gradients, parameters. Counted below the handle."""
    monkeypatch.setattr(swap_dirs, "weights_of", lambda *_: weights)
    engine = Counting()
    with nvmeio.AioHandle(engine=engine) as handle:
        made = SwappedModule(
            model(torch.bfloat16, WIDTH), swap_dir=drives, resident_bytes="2M", handle=handle
        )
        optimizer = swapped(
            made,
            drives,
            subgroup_bytes="16M",
            gradients="disk",
            master_dtype=torch.float32,
            handle=handle,
        )
        with made, optimizer:
            loop(made, optimizer)
    for kind in ("read", "written"):
        moved = [engine.moved[folder.name, kind] for folder in drives]
        for share, weight in zip(moved, weights, strict=True):
            assert share / sum(moved) == pytest.approx(weight / sum(weights), rel=0.05)


def test_the_rates_of_tune_decide(drives: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def weights_of(paths: Any, reads: float, writes: float) -> list[int]:
        asked.append((paths, reads, writes))
        return [3, 2, 1]

    monkeypatch.setattr(swap_dirs, "weights_of", weights_of)
    with swapped(model(), drives) as optimizer:
        assert asked == [(optimizer.swap_dirs, 1.0, 1.0)]
        assert json.loads((drives[1] / "optimizer" / "drives").read_bytes())["weights"] == [3, 2, 1]


# Restarts


def stopped(drives: list[Path], steps: int = 2) -> None:
    made = model()
    with swapped(made, drives, resume=True) as optimizer:
        assert not optimizer.resumed
        train(made, optimizer, steps)


def resumed(folders: Any, steps: int = 2) -> None:
    made = model()
    with swapped(made, folders, resume=True) as optimizer:
        assert optimizer.resumed
        train(made, optimizer, 2, steps)
    assert_same_weights(made, in_memory(steps + 2))


def test_the_order_of_the_directories_does_not_matter(drives: list[Path]) -> None:
    stopped(drives)
    resumed([drives[2], drives[0], drives[1]])


def test_other_rates_after_a_restart_move_nothing(
    drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(drives)
    monkeypatch.setattr(swap_dirs, "weights_of", lambda *_: [9, 5, 1])
    resumed(drives)


def test_drives_that_are_mounted_elsewhere(drives: list[Path], tmp_path: Path) -> None:
    stopped(drives)
    moved = [folder.rename(tmp_path / f"other-{folder.name}") for folder in drives]
    resumed(moved)


def forgotten(drives: list[Path]) -> list[Path]:
    return [drives[0], drives[2]]


def first_forgotten(drives: list[Path]) -> list[Path]:
    return drives[1:]


def one_alone(drives: list[Path]) -> Any:
    return drives[1]


def not_mounted(drives: list[Path]) -> list[Path]:
    drives[2].rename(drives[2].with_name("away"))
    drives[2].mkdir()
    return drives


def another_besides(drives: list[Path]) -> list[Path]:
    return [*drives, drives[0].with_name("four")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (forgotten, ["two/optimizer is missing"]),
        (first_forgotten, ["one/optimizer is missing"]),
        (one_alone, ["one/optimizer, ", "three/optimizer is missing"]),
        (not_mounted, ["three/optimizer is missing", "is its drive mounted?"]),
        (another_besides, ["four/optimizer holds nothing of it"]),
    ],
)
def test_what_is_missing_is_named(
    given: Callable[[list[Path]], Any], named: list[str], drives: list[Path]
) -> None:
    """And nothing is touched: with all of them it goes on."""
    stopped(drives)
    with pytest.raises(nvmeio.IntegrityError) as told:
        swapped(model(), given(drives), resume=True)
    for words in named:
        assert words in str(told.value)
    if (away := drives[2].with_name("away")).exists():
        away.rename(drives[2].with_name("back"))
        drives[2] = drives[2].with_name("back")
    resumed(drives)


def test_a_state_of_one_directory_is_not_that_of_several(drives: list[Path]) -> None:
    stopped(drives[:1])
    with pytest.raises(nvmeio.IntegrityError, match="lies in that directory alone"):
        swapped(model(), drives, resume=True)
    resumed(drives[0])


def test_directories_of_two_sets_are_refused(drives: list[Path], tmp_path: Path) -> None:
    stopped(drives)
    others = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    stopped(others)
    with pytest.raises(nvmeio.IntegrityError, match="belongs to another one"):
        swapped(model(), [drives[0], others[1], drives[2]], resume=True)
    resumed(drives)
    resumed(others)


def test_a_damaged_record_is_told_of(drives: list[Path]) -> None:
    stopped(drives)
    (drives[1] / "optimizer" / "drives").write_bytes(b'{"set": ')
    with pytest.raises(nvmeio.IntegrityError, match=r"two/optimizer/drives is damaged"):
        swapped(model(), drives, resume=True)


def test_a_file_that_is_missing_on_one_of_them(drives: list[Path]) -> None:
    stopped(drives)
    (drives[2] / "optimizer" / "state.1").unlink()
    with pytest.raises(nvmeio.TransferError, match=r"three/optimizer/state.1"):
        swapped(model(), drives, resume=True)


def test_overwriting_removes_what_was_there(drives: list[Path]) -> None:
    stopped(drives)
    made = model()
    with swapped(made, drives[::-1], overwrite=True) as optimizer:
        assert not optimizer.resumed
        train(made, optimizer, 4)
    assert_same_weights(made, in_memory(4))
    assert all(list(folder.iterdir()) == [] for folder in drives)


# What goes wrong


@pytest.mark.parametrize(
    ("folders", "error"),
    [([], ValueError), (["a", "b/../a"], ValueError), (["a", 7], TypeError), (3, TypeError)],
)
def test_directories_that_are_none(
    folders: Any, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match="swap_dir"):
        swapped(model(), folders)
    assert list(tmp_path.iterdir()) == []


def test_one_in_use_leaves_the_others_free(drives: list[Path]) -> None:
    with swapped(model(), drives[1]):
        with pytest.raises(nvmeio.TransferError) as told:
            swapped(model(), drives)
        assert told.value.errno == errno.EBUSY
        swapped(model(), drives[0]).close()
    swapped(model(), drives).close()


def test_a_full_drive_leaves_nothing_on_the_others(
    drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = SwapDir.allocate

    def full(self: SwapDir, name: str, nbytes: int) -> Any:
        if "three" in self.path and name == "state.1":
            raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=self.path)
        return allocate(self, name, nbytes)

    monkeypatch.setattr(SwapDir, "allocate", full)
    with pytest.raises(nvmeio.TransferError, match="three"):
        swapped(model(), drives)
    assert all(list(folder.iterdir()) == [] for folder in drives)


def test_a_drive_that_fails_leaves_the_step_undone(drives: list[Path]) -> None:
    """A drive of three refuses a write: weights, state and generation are those of before."""
    failing = threading.Event()

    class Failing(Counting):
        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            writing = block.request.transfer.opcode == Opcode.WRITE
            if failing.is_set() and writing and "/two/" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super()._move(block, fd, memory, offset)

    made = model(width=WIDTH)
    with (
        nvmeio.AioHandle(engine=Failing()) as handle,
        swapped(made, drives, handle=handle, subgroup_bytes="4M") as optimizer,
    ):
        x = torch.randn(4, WIDTH)
        made(x).sum().backward()
        optimizer.step()
        before = [p.detach().clone() for p in made.parameters()]
        made(x).sum().backward()
        failing.set()
        with pytest.raises(nvmeio.TransferError, match="two/optimizer/state"):
            optimizer.step()
        assert all(map(torch.equal, made.parameters(), before))
        assert optimizer.generation == 2
        failing.clear()
        optimizer.step()
        assert optimizer.generation == 3


def test_a_flipped_bit_names_the_drive(drives: list[Path]) -> None:
    made = model(width=WIDTH)
    with swapped(made, drives, subgroup_bytes="16M") as optimizer:
        x = torch.randn(4, WIDTH)
        made(x).sum().backward()
        optimizer.step()
        engine: Any = swapper_of(optimizer)
        piece = engine.params[4].pieces[0]
        parts = engine.store.files.file_parts(piece, "exp_avg")
        assert len(parts) > 1
        places = [(part.file.path, part.file_offset) for part in parts]
        assert len({path for path, _ in places}) == len(parts)
        path, offset = places[1]
        engine._owner.call(engine.pipeline.forget_ahead)  # it was read before it is damaged
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        made(x).sum().backward()
        with pytest.raises(nvmeio.IntegrityError) as told:
            optimizer.step()
        for path, offset in places:
            assert f"{path} bytes [{offset}," in str(told.value)


def test_a_drive_that_loses_data_ends_the_stepping(
    drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    with swapped(made, drives) as optimizer:
        train(made, optimizer, 1)
        engine: Any = swapper_of(optimizer)
        engine.store.settle()
        sync = engine.handles.sync_fsync

        lost = threading.Event()

        def lose(file: Any, data_only: bool) -> None:
            if "/three/" in file.path:
                lost.set()
                raise nvmeio.TransferError(errno.EIO, operation="fsync", path=file.path)
            sync(file, data_only=data_only)

        with monkeypatch.context() as patch:
            patch.setattr(engine.handles, "sync_fsync", lose)
            train(made, optimizer, 1, 1)
            assert lost.wait(PATIENCE_S)
        loss_of(made, 2).backward()
        with pytest.raises(nvmeio.TransferError, match="generation 3 may be lost"):
            optimizer.step()
        with pytest.raises(nvmeio.TransferError):
            optimizer.close()


# Copies


def test_a_snapshot_of_several_goes_on(drives: list[Path], tmp_path: Path) -> None:
    made = model()
    copies = [tmp_path / "copy" / name for name in "abc"]
    (tmp_path / "copy").mkdir()  # one level is made, not those above
    with swapped(made, drives) as optimizer:
        train(made, optimizer, 2)
        with pytest.raises(ValueError, match="name as many"):
            optimizer.snapshot(tmp_path / "copy")
        optimizer.snapshot(copies)
        with pytest.raises(nvmeio.TransferError) as told:
            optimizer.snapshot([tmp_path / "more", *copies[1:]])
        assert told.value.errno == errno.EEXIST
        assert not (tmp_path / "more" / "optimizer").exists()
    with pytest.raises(nvmeio.IntegrityError, match=r"copy/b/optimizer is missing"):
        swapped(model(), copies[::2], resume=True)
    resumed(copies[::-1])


def test_a_group_that_is_added_follows(drives: list[Path]) -> None:
    found = []
    for folders in (drives[0].with_name("alone"), drives):
        made = model(width=200)
        first, *rest = made.parameters()
        optimizer: Any = SwappedOptimizer(
            torch.optim.Adam, [first], swap_dir=folders, gradients="disk", lr=1e-2
        )
        with optimizer:
            loss(made).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.add_param_group({"params": rest})
            for _ in range(2):
                loss(made).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(made)
    assert_same_weights(found[1], found[0])


def loss(made: Any) -> torch.Tensor:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = made(x).square().mean()
    return found


def test_a_tensor_over_files_that_are_closed_meanwhile_is_refused(tmp_path: Path) -> None:
    """Their descriptors' numbers may be another file's by then, which was mapped in their place."""
    nbytes = 3 * PAGE_BYTES
    for name in ("ours", "others"):
        (tmp_path / name).write_bytes(name[0].encode() * nbytes)
    for spans in ([(0, nbytes)], [(0, PAGE_BYTES + 4), (PAGE_BYTES + 4, PAGE_BYTES)]):
        file = nvmeio.open(tmp_path / "ours")
        parts = [FileSpan(file, at, 0, nbytes) for at, nbytes in spans]
        whole = sum(part.nbytes for part in parts)
        assert file_tensor(parts, torch.uint8, (whole,)).eq(ord("o")).all()
        file.close()
        with nvmeio.open(tmp_path / "others"), pytest.raises(ClosedError):
            file_tensor(parts, torch.uint8, (whole,))
