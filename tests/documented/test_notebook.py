"""In Jupyter: the tutorial runs in a real kernel, bars are drawn, and an interrupt ends a call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented.pages import ROOT

pytest.importorskip("ipykernel", reason="ipykernel is not installed: `make clients` installs it")
pytest.importorskip("nbclient", reason="nbclient is not installed: see `make clients`")
pytest.importorskip("nbformat", reason="nbformat is not installed: see `make clients`")

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LIMIT_S = 500

# zmq's and asyncio's own: of kernels that end, and of Jupyter's directories.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def loop_of_jupyter() -> Iterator[None]:
    """jupyter_core keeps the event loop that it makes at its first use."""
    from jupyter_core.utils import ensure_event_loop

    loop = ensure_event_loop()
    yield
    loop.close()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A kernel of this Python, and a function that runs a cell in it and returns its outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import zmq
    from jupyter_client.manager import KernelManager

    context = zmq.Context()  # the process's own would stay open
    manager = KernelManager(kernel_name="python3", context=context)
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT_S)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        context.destroy(linger=0)


class Kernel:
    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, interrupt_at: str | None = None) -> list[dict[str, Any]]:
        """The messages of a cell; once it has printed a text, the kernel is interrupted."""
        asked, messages = self.client.execute(code), []
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") != asked:
                continue
            messages.append(message)
            text = message["content"].get("text", "")
            if interrupt_at is not None and interrupt_at in text:
                interrupt_at = None
                self.manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle":
                return messages


def texts(messages: list[dict[str, Any]]) -> str:
    return "".join(message["content"].get("text", "") for message in messages)


def errors(messages: list[dict[str, Any]]) -> list[str]:
    return [each["content"]["ename"] for each in messages if each["msg_type"] == "error"]


# In a process of its own: nbclient leaves sockets open.
EXECUTE = """
import sys, nbclient, nbformat
resources = {"metadata": {"path": sys.argv[2]}}
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", ""))
"""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
def test_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", EXECUTE, str(path), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout
    assert "checkpoints of steps [0, 1, 2]" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
def test_tutorial_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.parametrize("bar", ["tqdm_bar", "rich_bar"])
def test_bar_is_drawn_in_a_cell(kernel: Kernel, bar: str) -> None:
    """Other threads than the cell's move the bytes and draw; the cell shows it."""
    messages = kernel.run(
        f"""
import torch, nvmeio
bar = getattr(nvmeio.progress, "{bar}")()
nvmeio.save({{"weights": torch.randn(1000, 1000)}}, "model.pt", progress=bar)
loaded = nvmeio.load("model.pt", progress=bar)
"""
    )
    assert errors(messages) == []
    drawn = json.dumps([message["content"] for message in messages])
    assert "model.pt" in drawn


@pytest.mark.parametrize(
    "call",
    [
        'nvmeio.save(state, "model.pt", handle=handle)',
        'handle.async_pwrite(state["weights"], "raw.bin").result()',
        'await nvmeio.async_save(state, "model.pt", handle=handle)',
    ],
)
def test_interrupt_ends_a_call_and_the_next_one_works(kernel: Kernel, call: str) -> None:
    begun = kernel.run(
        """
import torch, nvmeio
from nvmeio.testing import FakeEngine

state = {"weights": torch.randn(1000, 1000)}
slow = FakeEngine(delay_s=0.2)  # 1,000 blocks, one after another
handle = nvmeio.AioHandle(block_size=4096, queue_depth=1, engine=slow)
"""
    )
    assert errors(begun) == []
    stopped = kernel.run(f'print("begun", flush=True)\n{call}', interrupt_at="begun")
    assert errors(stopped) in (["KeyboardInterrupt"], ["CancelledError"])
    again = kernel.run(
        'nvmeio.save(state, "again.pt")\n'
        'print("same", torch.equal(nvmeio.load("again.pt")["weights"], state["weights"]))'
    )
    assert errors(again) == []
    assert "same True" in texts(again)
