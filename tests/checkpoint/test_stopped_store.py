"""A rank that serves the store of torch.distributed, and is stopped as a whole."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support import PATIENCE_S, Program, spin_until

import nvmeio
from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import RankStore

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

LIMIT_S = 0.5
SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[Any]:
    """A process that serves a store; stopped by `SIGSTOP` in the test."""
    with Program[str](
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()
            program.communicate()


def test_a_store_that_does_not_answer_is_given_up(server: Any) -> None:
    """torch waits for its answer without end, and so did a save, beyond its `timeout_s`."""
    port = int(server.stdout.readline())
    patience = timedelta(seconds=PATIENCE_S)
    client = dist.TCPStore("localhost", port, is_master=False, timeout=patience)
    store = RankStore(client, 1, 2, "path", "save")
    messages = Messages(store, 1, LIMIT_S)
    messages.put("said", b"something")
    assert messages.get("said", 1) == b"something"
    server.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(nvmeio.TransferError, match=r"did not answer for 0\.5 s") as raised:
            messages.get("said", 0)
        assert raised.value.errno == errno.ETIMEDOUT
    messages.fail(raised.value)  # neither waits, nor raises
    messages.forget(["said"])
    server.send_signal(signal.SIGCONT)
    spin_until(lambda: answers(store))
    assert messages.get("said", 1) == b"something"


def test_another_connection_to_a_store_that_does_not_answer_is_given_up(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Checkpointer that was made meanwhile waited without end, for torch connects without one."""
    port = int(server.stdout.readline())
    patience = timedelta(seconds=PATIENCE_S)
    client = dist.TCPStore("localhost", port, is_master=False, timeout=patience)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    store = RankStore.of_group(None, "before", "path", "save", LIMIT_S)
    store.set("said", b"something")
    server.send_signal(signal.SIGSTOP)
    for ask in (
        lambda: RankStore.of_group(None, "made", "path", "save", LIMIT_S),
        lambda: store.for_torch("gloo"),
    ):
        with pytest.raises(nvmeio.TransferError, match=r"did not answer for 0\.5 s") as raised:
            ask()
        assert raised.value.errno == errno.ETIMEDOUT
    server.send_signal(signal.SIGCONT)
    spin_until(lambda: answers(store))
    assert store.get("said") == b"something"


def test_a_process_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's: a rank of it was taken for a process alone."""
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    with pytest.raises(ValueError, match="a process group's store"):
        RankStore.of_group(None, "name", "path", "save")


def answers(store: RankStore) -> bool:
    try:
        store.limited(LIMIT_S).check(["any"])
    except nvmeio.TransferError:
        return False
    return True
