"""A step is complete or has not happened: after faults of the drive, after kill -9, for others."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, loss_of, model, train
from inside import swapper_of
from support import die_at_birth, run_python, spin_until

import nvmeio
from nvmeio.offload import SwappedOptimizer
from nvmeio.offload._generations.generations import Change
from nvmeio.offload._swap_files import manifests
from nvmeio.testing import FakeEngine

SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10}


class Breaking(FakeEngine):
    """Fails the n-th block of a kind, counted from when it is armed; and all after it."""

    def __init__(self) -> None:
        self.kind = ""
        self.left = 0
        self.code = 0
        self.times = 0
        self.one = threading.Lock()
        super().__init__(fail=self._decide)

    def arm(self, kind: str, after: int, code: int, times: int = 1 << 30) -> None:
        self.kind, self.left, self.code, self.times = kind, after, code, times

    def _decide(self, kind: str, offset: int, nbytes: int) -> int:
        with self.one:  # of several threads
            if kind != self.kind or not self.times:
                return 0
            self.left -= 1
            if self.left >= 0:
                return 0
            self.times -= 1
            return self.code


@pytest.fixture
def breaking() -> Iterator[tuple[Breaking, nvmeio.AioHandle]]:
    engine = Breaking()
    with nvmeio.AioHandle(engine=engine) as handle:
        yield engine, handle
        engine.times = 0


def snapshot_of(made: Any, optimizer: Any) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    state = {
        key: {name: torch.as_tensor(value).clone() for name, value in entry.items()}
        for key, entry in optimizer.state_dict()["state"].items()
    }
    return [p.detach().clone() for p in made.parameters()], state


def same(a: Any, b: Any) -> bool:
    weights = all(map(torch.equal, a[0], b[0]))
    states = a[1].keys() == b[1].keys() and all(
        torch.equal(value, b[1][key][name]) for key, e in a[1].items() for name, value in e.items()
    )
    return weights and states


# The first reads of a step are made before it is asked for.
@pytest.mark.parametrize(
    ("kind", "after"),
    [("pread", 0), ("pread", 1), ("pread", 3), ("pwrite", 0), ("pwrite", 2), ("pwrite", 5)],
)
@pytest.mark.parametrize("masters", [False, True])
def test_a_failed_step_has_not_happened(
    kind: str,
    after: int,
    masters: bool,
    tmp_path: Path,
    breaking: tuple[Breaking, nvmeio.AioHandle],
) -> None:
    """And may be tried again, with the gradients that are still there."""
    engine, handle = breaking
    dtype = torch.bfloat16 if masters else torch.float32
    ours, theirs = model(dtype), model(dtype)
    options = {**SMALL, "master_dtype": torch.float32 if masters else None}
    (tmp_path / "theirs").mkdir()
    with (
        SwappedOptimizer(
            torch.optim.Adam,
            ours.parameters(),
            swap_dir=tmp_path,
            handle=handle,
            **options,
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.Adam, theirs.parameters(), swap_dir=tmp_path / "theirs", **options
        ) as reference,
    ):
        train(ours, optimizer, 2)
        train(theirs, reference, 2)
        loss_of(ours, 2).backward()
        before = snapshot_of(ours, optimizer)
        code = errno.EIO if kind == "pread" else errno.ENOSPC
        engine.arm(kind, after, code, times=1)
        with pytest.raises(nvmeio.TransferError) as told:
            optimizer.step()
        assert told.value.errno == code
        assert optimizer.broken == ""
        assert same(snapshot_of(ours, optimizer), before)
        optimizer.step()
        optimizer.zero_grad()
        train(theirs, reference, 1, 2)
        assert_same_weights(ours, theirs)
        assert train(ours, optimizer, 2, 3) == train(theirs, reference, 2, 3)


def test_what_cannot_be_undone_is_marked_broken(
    tmp_path: Path, breaking: tuple[Breaking, nvmeio.AioHandle]
) -> None:
    engine, handle = breaking
    made = model()
    options: dict[str, Any] = {**SMALL, "handle": handle, "recoverable": False}
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, **options
    ) as optimizer:
        train(made, optimizer, 2)
        loss_of(made, 2).backward()
        engine.arm("pwrite", 3, errno.EIO)
        with pytest.raises(nvmeio.TransferError):
            optimizer.step()
        assert "recoverable=False" in optimizer.broken
        engine.times = 0
        for call in (optimizer.step, optimizer.state_dict):
            with pytest.raises(nvmeio.NvmeioError, match="could not be undone"):
                call()


def test_a_drive_that_is_gone_leaves_it_broken(
    tmp_path: Path, breaking: tuple[Breaking, nvmeio.AioHandle]
) -> None:
    engine, handle = breaking
    made = model()
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, handle=handle, **SMALL
    ) as optimizer:
        train(made, optimizer, 2)
        loss_of(made, 2).backward()
        engine.arm("pread", 4, errno.EIO)
        with pytest.raises(nvmeio.TransferError):
            optimizer.step()
        assert "bringing back the weights failed" in optimizer.broken


def test_gradients_that_were_lost_are_not_stepped(
    tmp_path: Path, breaking: tuple[Breaking, nvmeio.AioHandle]
) -> None:
    engine, handle = breaking
    made = model()
    with SwappedOptimizer(
        torch.optim.Adam,
        made.parameters(),
        swap_dir=tmp_path,
        handle=handle,
        gradients="disk",
        **SMALL,
    ) as optimizer:
        train(made, optimizer, 1)
        before = snapshot_of(made, optimizer)
        engine.arm("pwrite", 0, errno.ENOSPC, times=1)
        with pytest.raises(nvmeio.TransferError):
            loss_of(made, 1).backward()
            optimizer.step()
        assert same(snapshot_of(made, optimizer), before)
        optimizer.zero_grad()
        train(made, optimizer, 1, 1)
        reference = model()
        train(reference, torch.optim.Adam(reference.parameters()), 2)
        assert_same_weights(made, reference)


# Going on


KILLED = """
    import os, signal, sys, threading
    sys.path.insert(0, {tests!r})
    import torch
    from _offload_models import model, train, loss_of
    import nvmeio
    from nvmeio.offload import SwappedOptimizer
    from nvmeio.testing import FakeEngine

    writes, one = [0], threading.Lock()
    def die(kind, offset, nbytes):
        if kind == "pwrite" and armed:
            with one:  # of several threads
                writes[0] += 1
                if writes[0] == {after}:
                    os.kill(os.getpid(), signal.SIGKILL)
        return 0

    armed = False
    made = model(torch.{dtype})
    handle = nvmeio.AioHandle(engine=FakeEngine(fail=die))
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, made.parameters(), swap_dir={folder!r}, handle=handle, resume=True,
        subgroup_bytes=64 << 10, master_dtype={master}, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert not optimizer.resumed
    for step in range(3):
        train(made, optimizer, 1, step)
        scheduler.step()
    armed = {after} > 0
    train(made, optimizer, 1, 3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("after", "done"), [(1, 3), (4, 3), (0, 4)])
@pytest.mark.parametrize("masters", [False, True])
def test_kill_in_mid_step_and_resume(after: int, done: int, masters: bool, tmp_path: Path) -> None:
    """The last complete step comes back: weights, state and options. `done` steps were complete."""
    dtype = "bfloat16" if masters else "float32"
    killed = run_python(
        KILLED.format(
            tests=str(Path(__file__).parent),
            folder=str(tmp_path),
            after=after,
            dtype=dtype,
            master="torch.float32" if masters else None,
        )
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    options: dict[str, Any] = {"master_dtype": torch.float32 if masters else None, "lr": 1e-2}
    ours, theirs = (model(getattr(torch, dtype)) for _ in range(2))
    for p in ours.parameters():
        p.data.zero_()
    (tmp_path / "theirs").mkdir()
    with (
        SwappedOptimizer(
            torch.optim.AdamW, ours.parameters(), swap_dir=tmp_path, resume=True, **SMALL, **options
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.AdamW,
            theirs.parameters(),
            swap_dir=tmp_path / "theirs",
            **SMALL,
            **options,
        ) as reference,
    ):
        assert optimizer.resumed
        assert optimizer.generation == 1 + done
        scheduler = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        for step in range(3):
            train(theirs, reference, 1, step)
            scheduler.step()
        train(theirs, reference, done - 3, 3)
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        # Options are those of the last complete step; the scheduler had moved on since.
        assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5 ** min(done - 1, 3)
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"]
        assert train(ours, optimizer, 3, done) == train(theirs, reference, 3, done)


def resumed(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=folder, resume=True, **{**SMALL, **options}
    )


def test_it_goes_on_after_close(tmp_path: Path) -> None:
    first, second, theirs = model(), model(), model()
    with resumed(first, tmp_path) as optimizer:
        train(first, optimizer, 3)
    for p in second.parameters():
        p.data.fill_(7)
    with resumed(second, tmp_path) as optimizer:
        assert_same_weights(second, first)
        train(second, optimizer, 3, 3)
    train(theirs, torch.optim.Adam(theirs.parameters()), 6)
    assert_same_weights(second, theirs)


def test_after_a_power_cut_what_was_durable_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest manifest, of another boot and never marked durable, may have no data behind it."""
    made, theirs = model(), model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
    with resumed(made, tmp_path, durable=False) as optimizer:
        train(made, optimizer, 1, 2)
    with monkeypatch.context() as patch:  # nobody resumes in between: that makes it durable
        patch.setattr(manifests, "boot_id", lambda: "another boot")
        with resumed(made, tmp_path) as optimizer:
            assert optimizer.generation == 3
            train(theirs, torch.optim.Adam(theirs.parameters()), 2)
            assert_same_weights(made, theirs)


def test_what_is_resumed_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lay in the page cache only; the next loss of power must not take it back."""
    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
    with resumed(made, tmp_path, durable=False) as optimizer:
        train(made, optimizer, 1, 2)
    with resumed(made, tmp_path) as optimizer:
        assert optimizer.generation == 4
    monkeypatch.setattr(manifests, "boot_id", lambda: "another boot")
    with resumed(made, tmp_path) as optimizer:
        assert optimizer.generation == 4


@pytest.mark.parametrize("damage", [b"", b"nvmeio-swap 2\nD 0000012 00000000{}", b"\0" * 4096])
def test_a_torn_manifest_leaves_the_one_before(damage: bytes, tmp_path: Path) -> None:
    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 3)
    newest = tmp_path / "optimizer" / manifests.NAMES[4 % 2]
    newest.write_bytes(damage)
    with resumed(made, tmp_path) as optimizer:
        assert optimizer.generation == 3
    for name in manifests.NAMES:
        (tmp_path / "optimizer" / name).write_bytes(b"torn")
    with pytest.raises(nvmeio.IntegrityError, match="no manifest"):
        resumed(made, tmp_path)


def test_what_belongs_to_something_else_is_not_resumed(tmp_path: Path) -> None:
    made = model()
    with resumed(made, tmp_path) as optimizer:
        train(made, optimizer, 1)
    others: dict[tuple[str, ...], Callable[[], object]] = {
        ("dtypes",): lambda: resumed(model().double(), tmp_path),
        ("parameters",): lambda: resumed(model(width=56), tmp_path),
        ("subgroup_bytes",): lambda: resumed(model(), tmp_path, subgroup_bytes=32 << 10),
        ("optimizer",): lambda: SwappedOptimizer(
            torch.optim.Adagrad, model().parameters(), swap_dir=tmp_path, resume=True, **SMALL
        ),
    }
    for differing, other in others.items():
        with pytest.raises(nvmeio.IntegrityError) as refused:
            other()
        named = re.findall(r"(\w+) \([^()]* there, [^()]* here\)", str(refused.value))
        assert tuple(named) == differing, str(refused.value)
    os.truncate(tmp_path / "optimizer" / "state.0", 4096)
    with pytest.raises(nvmeio.TransferError, match="too short"):
        resumed(made, tmp_path)


def test_a_snapshot_is_resumed_elsewhere(tmp_path: Path) -> None:
    made, theirs = model(), model()
    copy = tmp_path / "copy"
    (tmp_path / "live").mkdir()
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path / "live", **SMALL
    ) as optimizer:
        train(made, optimizer, 3)
        optimizer.snapshot(copy)
        train(made, optimizer, 2)  # goes on, and leaves the copy as it is
        with pytest.raises(nvmeio.TransferError):
            optimizer.snapshot(copy)
    with resumed(made, copy) as optimizer:
        train(theirs, torch.optim.Adam(theirs.parameters()), 3)
        assert_same_weights(made, theirs)
        assert optimizer.generation == 4


# The directory


def test_leftovers_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    killed = run_python(
        f"""
        import os, signal, torch
        from nvmeio.offload import SwappedOptimizer
        p = torch.nn.Parameter(torch.ones(50000))
        kept = SwappedOptimizer(torch.optim.Adam, [p], swap_dir={str(tmp_path)!r}, gradients="disk")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path.name for path in (tmp_path / "optimizer").iterdir()}
    assert {"state.0", "state.1", "gradients"} <= left
    made = model()
    with SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=tmp_path, **SMALL
    ) as optimizer:
        assert not (tmp_path / "optimizer" / "gradients").exists()
        train(made, optimizer, 1)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_have_one_directory(tmp_path: Path) -> None:
    with SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=tmp_path, **SMALL):
        with pytest.raises(nvmeio.TransferError, match="swaps into this directory") as told:
            SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=tmp_path)
        assert told.value.errno == errno.EBUSY
        assert str(os.getpid()) in str(told.value)
        other = run_python(
            f"""
            import torch, nvmeio
            from nvmeio.offload import SwappedOptimizer
            try:
                SwappedOptimizer(torch.optim.Adam, [torch.nn.Parameter(torch.ones(3))],
                                 swap_dir={str(tmp_path)!r})
            except nvmeio.TransferError as told:
                print(told)
            """
        )
        assert "EBUSY" in other.stdout, other.stderr


def test_a_directory_that_is_missing_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=tmp_path / "no" / "ne")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=tmp_path / "file")
    with pytest.raises(TypeError):
        SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=3)  # type: ignore[arg-type]


@pytest.mark.root
def test_a_read_only_and_a_full_file_system(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(mounted)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError) as full:  # refused when it is made, not in mid-step
            SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=mounted)
        assert full.value.errno == errno.ENOSPC
        assert list(mounted.iterdir()) == []
        # Refused while a file is open for writing, or about to be closed.
        remount = ["mount", "-o", "remount,ro", str(mounted)]
        spin_until(lambda: not subprocess.run(remount, check=False).returncode)
        with pytest.raises(OSError) as read_only:
            SwappedOptimizer(torch.optim.Adam, model().parameters(), swap_dir=mounted)
        assert read_only.value.errno == errno.EROFS
    finally:
        spin_until(lambda: not subprocess.run(["umount", str(mounted)], check=False).returncode)


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or nvmeio.files.probe_direct(shm).supported:
        pytest.skip("/dev/shm is not a tmpfs")
    folder = shm / f"nvmeio-offload-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        ours, theirs = model(), model()
        with SwappedOptimizer(
            torch.optim.Adam, ours.parameters(), swap_dir=folder, gradients="disk", **SMALL
        ) as optimizer:
            train(ours, optimizer, 3)
        train(theirs, torch.optim.Adam(theirs.parameters()), 3)
        assert_same_weights(ours, theirs)
    finally:
        shutil.rmtree(folder)


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, sys, torch, nvmeio, warnings
        warnings.simplefilter("ignore")
        from nvmeio.offload import SwappedOptimizer
        p = torch.nn.Parameter(torch.ones(50000))
        optimizer = SwappedOptimizer(torch.optim.Adam, [p], swap_dir={str(tmp_path)!r})
        p.grad = torch.ones_like(p)
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except nvmeio.ClosedError:
                sys.exit(7)
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.step()
        assert optimizer.generation == 3
        optimizer.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_a_thread_the_step_makes_itself_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left a thread behind that was never started, and closing failed with it."""

    made = model()
    with monkeypatch.context() as patch:
        die_at_birth(patch, "nvmeio-offload-help")
        optimizer = resumed(made, tmp_path)
    with optimizer:
        engine: Any = swapper_of(optimizer)
        engine.store.commit(Change(), [])
        found = manifests.newest(optimizer.swap_dir)
        assert found is not None
        assert (found.generation, found.durable) == (2, True)
