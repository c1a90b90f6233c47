"""Programs that end without `close`: the last step that was complete is there, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_state, assert_same_weights, loss_of, model, train
from programs import Program
from support import run_python

from nvmeio.offload import SwappedOptimizer

pytestmark = pytest.mark.slow

# Somebody has made a `weakref.finalize` before anything of ours was imported, as many libraries do:
# its hook is called behind ours then.
PROGRAM = """
    import sys, weakref
    class Early: pass
    early = Early()
    weakref.finalize(early, len, ())
    sys.path.insert(0, {tests!r})
    import os, signal, threading, torch
    from _offload_models import loss_of, model, train
    import nvmeio
    from nvmeio.offload import SwappedModule, SwappedOptimizer

    handle = {handle}
    made = model()
    optimizer = SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir={folder!r}, resume=True,
        subgroup_bytes=64 << 10, handle=handle, {options})
    train(made, optimizer, 3)
    {end}
"""

ENDS = {
    "normal": "pass",
    "exit": "sys.exit(0)",
    "exception": "raise ValueError('the end')",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "handle closed first": "handle.close()",
    "handle and optimizer closed": "handle.close(); optimizer.close()",
    "dropped": "del optimizer",
    "in another thread": (
        "t = threading.Thread(target=train, args=(made, optimizer, 0)); t.start(); t.join()"
    ),
}


@pytest.mark.parametrize(
    ("end", "gradients"),
    [*((end, "memory") for end in ENDS), ("normal", "disk"), ("handle closed first", "disk")],
)
def test_the_last_step_is_kept(end: str, gradients: str, tmp_path: Path) -> None:
    """It was thrown away in 8 of 8, with exit status 0 and an EIO that had not happened."""
    done = run_python(
        PROGRAM.format(
            tests=str(Path(__file__).parent),
            folder=str(tmp_path),
            handle="nvmeio.AioHandle()" if "handle" in end else "None",
            options=f"gradients={gradients!r}",
            end=ENDS[end],
        )
    )
    status = {"exception": (1,), "interrupt": (130, -signal.SIGINT)}.get(end, (0,))
    assert done.returncode in status, done.stderr
    for word in ("EIO", "may be lost", "ClosedError", "Exception ignored", "closed:"):
        assert word not in done.stderr
    ours, theirs = model(), model()
    reference = torch.optim.Adam(theirs.parameters())
    train(theirs, reference, 3)
    with SwappedOptimizer(
        torch.optim.Adam,
        ours.parameters(),
        swap_dir=tmp_path,
        resume=True,
        subgroup_bytes=64 << 10,
        gradients=gradients,
    ) as optimizer:
        assert optimizer.generation == 4
        assert_same_weights(ours, theirs)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("end", ["normal", "exit", "exception", "interrupt"])
def test_without_resume_nothing_is_left(end: str, tmp_path: Path) -> None:
    """Of an optimizer, its gradients and its module, whichever goes first."""
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import os, signal, torch
        from _offload_models import model, train
        from nvmeio.offload import SwappedModule, SwappedOptimizer
        module = SwappedModule(model(), swap_dir={str(tmp_path)!r}, resident_bytes=1 << 20)
        optimizer = SwappedOptimizer(
            torch.optim.Adam, module.parameters(), swap_dir={str(tmp_path)!r}, gradients="disk",
            subgroup_bytes=64 << 10)
        train(module, optimizer, 2)
        {ENDS[end]}
        """
    )
    status = {"exception": (1,), "interrupt": (130, -signal.SIGINT)}.get(end, (0,))
    assert done.returncode in status, done.stderr
    for word in ("EIO", "may be lost", "ClosedError", "Exception ignored"):
        assert word not in done.stderr
    assert list(tmp_path.iterdir()) == []


IN_MEMORY: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": {"enabled": True}},
    "parameters on the drive": {"bf16": {"enabled": True}, "offload_param": {"device": "nvme"}},
}


@pytest.mark.parametrize("dropped", ["in a function", "at exit"])
@pytest.mark.parametrize("what", IN_MEMORY)
def test_state_in_memory_ends_quietly_without_close(
    what: str, dropped: str, tmp_path: Path
) -> None:
    """The temporary directory was removed before the last manifest was written into it: status 120.

    A finalizer of the optimizer's removed it, and its own thread, which ends the state, came later.
    """
    for name in ("tmp", "nvme"):
        (tmp_path / name).mkdir()
    config = {"offload_optimizer": {"device": "cpu"}, **IN_MEMORY[what]}
    if "offload_param" in config:
        config["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    done = run_python(
        f"""
        import sys, tempfile
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from _offload_models import model, train
        from nvmeio.offload import offload
        tempfile.tempdir = {str(tmp_path / "tmp")!r}
        def run():
            made, optimizer = offload(
                model(torch.{"bfloat16" if "bf16" in config else "float32"}),
                torch.optim.AdamW, {config!r}, lr=1e-3)
            train(made, optimizer, 3)
            return made, optimizer
        {"run()" if dropped == "in a function" else "kept = run()"}
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [list((tmp_path / name).iterdir()) for name in ("tmp", "nvme")] == [[], []]


def test_interrupted_in_mid_step_the_last_whole_one_is_kept(tmp_path: Path) -> None:
    """The program ends by Ctrl-C while a step is under way; what is there is what it began with."""
    program = PROGRAM.format(
        tests=str(Path(__file__).parent),
        folder=str(tmp_path),
        handle="None",
        options="",
        end="""
    from nvmeio.offload._optimizer import turns
    compute, interrupted = turns.Step._compute, threading.Event()
    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, interrupt)
    def slowly(*args):
        print("now", flush=True)
        assert interrupted.wait(100)
        return compute(*args)
    turns.Step._compute = slowly
    loss_of(made, 3).backward()
    optimizer.step()
    """,
    )
    with Program[bytes](
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"now\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert b"KeyboardInterrupt" in errors
    assert b"lost" not in errors
    ours, theirs = model(), model()
    train(theirs, torch.optim.Adam(theirs.parameters()), 3)
    options: dict[str, Any] = {"resume": True, "subgroup_bytes": 64 << 10}
    with SwappedOptimizer(
        torch.optim.Adam, ours.parameters(), swap_dir=tmp_path, **options
    ) as optimizer:
        assert optimizer.generation == 4
        assert_same_weights(ours, theirs)
        loss_of(ours, 3).backward()
        optimizer.step()
