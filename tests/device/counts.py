"""What docs/gds.md says that work on a device costs, counted on devices made of host memory.

    python tests/device/counts.py                      # all of it, here
    python tests/device/counts.py --tree OTHER ring    # of the ring, in another version's tree

Of a chunk of the ring: turns of the GIL, CUDA's calls and the instructions of the ring's thread
(valgrind, if it is there); of the CPU's step of CUDA parameters: copies and waits, by their number.
The other tree has its shim built in place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNKS = 64
_PAGE = 4096
_NBYTES = CHUNKS * 4 * _PAGE
_RING_BYTES = 4 * 4 * _PAGE


def ring_reads(target: Any, path: Path, counts: Callable[[], Any] = lambda: None) -> Any:
    """Read chunks to a device twice; what `counts` says before and after the second time."""
    import nvmeio

    path.write_bytes(bytes(_NBYTES))
    with nvmeio.AioHandle(engine="libaio", ring_bytes=_RING_BYTES) as handle:
        handle.sync_pread(target, path)
        before = counts()
        handle.sync_pread(target, path)
        return before, counts()


def each(before: Counter[str], after: Counter[str]) -> dict[str, float]:
    """For a chunk, of what comes for every fourth one at least."""
    counted = {name: (number - before[name]) / CHUNKS for name, number in after.items()}
    return {name: round(number, 1) for name, number in sorted(counted.items()) if number >= 0.25}


def turns(folder: Path) -> dict[str, float]:
    """Calls that let go of the GIL in the ring's thread, by name."""
    import pytest
    import torch
    from fake_device import fake_device

    calls = Counter[str]()

    def note(frame: Any, event: str, what: Any) -> None:
        name = getattr(what, "__qualname__", "")
        if event == "c_call" and name.startswith(("Lib.nv_", "poll.poll", "eventfd")):
            calls[name] += 1

    threading.setprofile(note)  # of the threads that begin now
    try:
        with pytest.MonkeyPatch.context() as patch, fake_device(patch) as device:
            target = device.take(torch.zeros(_NBYTES, dtype=torch.uint8))
            return each(*ring_reads(target, folder / "file", lambda: Counter(calls)))
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def cuda_calls(folder: Path) -> dict[str, float]:
    """CUDA's calls, and the events that are made."""
    import pytest
    import torch
    from fake_cuda import asynchronous

    from nvmeio._memory import devices

    pause = devices.pause_for  # the model's is a call of CUDA's
    with pytest.MonkeyPatch.context() as patch, asynchronous(patch) as cuda:
        patch.setattr(devices, "pause_for", pause)
        events, new = Counter[str](), torch.cuda.Event

        def made(*args: Any, **options: Any) -> Any:
            events["a new event"] += 1
            return new(*args, **options)

        patch.setattr(torch.cuda, "Event", made)
        target = cuda.tensor(torch.zeros(_NBYTES, dtype=torch.uint8))
        return each(
            *ring_reads(
                target, folder / "file", lambda: Counter(name for name, _ in cuda.calls) + events
            )
        )


def instructions(folder: Path, tree: Path) -> int:
    """Of the ring's thread, under callgrind: the one that asks the shim for transfers."""
    out = folder / "out"
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    command += [f"--callgrind-out-file={out}", sys.executable, __file__]
    subprocess.run(
        [*command, "--tree", str(tree), "reads", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = 0
    for each_thread in folder.glob("out*-*"):
        text = each_thread.read_text(errors="replace")
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if total is not None and re.search(r"\bnv_prepare\b", text):
            found = max(found, int(total[1]))
    return found // CHUNKS


def reads_counted(folder: Path) -> None:
    """In a process under callgrind, which counts the second time alone."""
    import pytest
    import torch
    from fake_device import fake_device

    states = iter(("on", "off"))

    def switch() -> None:
        command = ["callgrind_control", f"--instr={next(states)}", str(os.getpid())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    with pytest.MonkeyPatch.context() as patch, fake_device(patch) as device:
        target = device.take(torch.zeros(_NBYTES, dtype=torch.uint8))
        ring_reads(target, folder / "file", switch)


def busy(folder: Path, turns_of_torch: int) -> float:
    """Milliseconds of a chunk beside a thread that is busy in Python.

    Its bytes take next to nothing. torch's calls for a chunk, which let go of the GIL as the
    shim's do, are so many here.
    """
    import pytest
    import torch
    from fake_device import FakeDevice, Mark, fake_device

    def upload(device: FakeDevice, *copies: Any) -> Mark:  # one chunk after the other, or a list
        for _ in range(turns_of_torch):
            time.sleep(0)
        mark = Mark()
        mark.reached.set()
        return mark

    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    with pytest.MonkeyPatch.context() as patch, fake_device(patch) as device:
        patch.setattr(FakeDevice, "upload", upload)
        target = device.take(torch.zeros(_NBYTES, dtype=torch.uint8))
        thread = threading.Thread(target=spin)
        thread.start()
        try:
            before, after = ring_reads(target, folder / "file", time.perf_counter)
        finally:
            over.set()
            thread.join()
    return float(1e3 * (after - before) / CHUNKS)


def step(layers: int) -> tuple[int, Any]:
    """How many parameters, and what one more step of the CPU's costs."""
    import pytest
    import torch
    from device.test_costs import cost, on_device
    from fake_accelerator import Pace, accelerator
    from offload.test_module_on_device import WIDTH, model

    from nvmeio.offload import SwappedOptimizer

    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        # A lazy device has done nothing before it is waited for: each wait is one.
        accelerator(patch, Pace.LAZY, Pace.LAZY) as cuda,
    ):
        module = on_device(cuda, model(layers))
        module(cuda.tensor(torch.randn(3, WIDTH))).square().mean().backward()
        with SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=folder, durable=False
        ) as optimizer:
            return len(list(module.parameters())), cost(cuda, optimizer.step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("all", "ring", "reads"), default="all")
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument(
        "--turns", type=int, default=0, help="of CUDA's calls; 2 before they kept the GIL"
    )
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    sys.path[:0] = [str(tree / "tests"), str(tree)]
    if arguments.what == "reads":
        reads_counted(arguments.folder)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        print("a chunk of the ring, turns of the GIL:", turns(folder))
        print("a chunk of the ring, CUDA's calls:", cuda_calls(folder))
        for interval in (0.005, 0.0005):
            sys.setswitchinterval(interval)
            taken = sorted(busy(folder, arguments.turns) for _ in range(3))[1]
            how = f"a switch interval of {1e3 * interval:g} ms"
            print(f"a chunk of the ring beside a busy thread, {how}: {taken:.1f} ms")
        sys.setswitchinterval(0.005)
        if shutil.which("valgrind") is not None:
            print("a chunk of the ring, instructions:", instructions(folder, tree))
    for number, costs in map(step, (3, 12) if arguments.what == "all" else ()):
        print(f"a step of {number} parameters: {costs}")


if __name__ == "__main__":
    main()
