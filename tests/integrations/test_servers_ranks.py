"""Several processes, each a rank of a server, with their caches in one directory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from programs import Program

TESTS = str(Path(__file__).parents[1])

HICACHE = """
    import sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {tests!r})
    import torch
    from types import SimpleNamespace
    from integrations import test_servers_hicache as t
    sys.modules[t.MODULE] = t.double()
    directory, rank, ranks, mla = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    config = SimpleNamespace(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=mla == "mla", model_name="m", is_storage_writer=mla != "mla" or rank == 0,
        extra_config=dict(directory=directory, capacity_bytes=12 * 4096),
    )
    backend = t.sglang_hicache.NvmeHiCache(config, {{}})
    pool = t.Pool()
    backend.register_mem_pool_host(pool)

    def fill(page, value):
        pool.kv_buffer[:, :, page * t.PAGE : (page + 1) * t.PAGE] = value

    def read(keys):
        # What is there, having looked at every byte of it.
        pool.kv_buffer[:, :, 32 * t.PAGE :] = -1
        found = backend.batch_get_v1(keys, t.indices(*range(32, 32 + len(keys))))
        pages = [pool.get_data_page((32 + n) * t.PAGE) for n in range(len(keys))]
        for key, there, page in zip(keys, found, pages):
            assert not there or (page == int(key)).all(), (key, page)
        return found

    def say(what):
        print(what, flush=True)
        return sys.stdin.readline()
"""

EACH = """
    fill(1, rank + 1)
    assert backend.batch_set_v1(["7"], t.indices(1)) == [True]
    say("stored")
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(["7"], t.indices(5)) == [True]
    assert (pool.get_data_page(5 * t.PAGE) == rank + 1).all()
    say("read")
    backend.close()
"""

WRITER = """
    for first in range(0, 80, 4):
        for n in range(4):
            fill(n, first + n)
        keys = [str(first + n) for n in range(4)]
        assert backend.batch_set_v1(keys, t.indices(0, 1, 2, 3)) == [True] * 4
    say("done")
    backend.close()
"""

READER = """
    while not (all(read(["78", "79"])) and backend.batch_exists(["79"])):
        for first in range(0, 80, 8):
            read([str(first + n) for n in range(8)])
    fill(1, 77)
    assert backend.batch_set_v1(["300"], t.indices(1)) == [False]  # another one's to write
    assert not backend.exists("300")
    assert not read(["0"])[0]  # it made room
    say("done")
    backend.close()
"""


class Rank(Program[str]):
    """A process that runs one of these; goes on when it is told to."""

    def __init__(self, text: str, directory: Path, rank: int, ranks: int, kind: str) -> None:
        program = textwrap.dedent(HICACHE.format(tests=TESTS)) + textwrap.dedent(text)
        super().__init__(
            [sys.executable, "-c", program, str(directory), str(rank), str(ranks), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def says(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.stdin is not None
        self.stdin.write("\n")
        self.stdin.flush()


@contextlib.contextmanager
def running(texts: list[str], directory: Path, kind: str) -> Iterator[list[Rank]]:
    with contextlib.ExitStack() as undo:
        ranks = [
            undo.enter_context(Rank(text, directory, rank, len(texts), kind))
            for rank, text in enumerate(texts)
        ]
        for rank in ranks:
            undo.callback(rank.kill)
        yield ranks
        assert [rank.wait() for rank in ranks] == [0] * len(ranks)


def test_ranks_of_hicache_share_a_directory_and_no_page(tmp_path: Path) -> None:
    with running([EACH] * 2, tmp_path, "mha") as ranks:
        for word in ("stored", "read"):
            assert [rank.says() for rank in ranks] == [word] * 2
            for rank in ranks:
                rank.go_on()
    assert len(list((tmp_path / "nvmeio-blocks").glob("*.blocks"))) == 2


def test_with_mla_others_read_while_one_rank_writes(tmp_path: Path) -> None:
    """And makes room: a page is its own, or not there."""
    with running([WRITER, READER, READER], tmp_path, "mla") as ranks:
        assert [rank.says() for rank in ranks] == ["done"] * 3
        for rank in ranks:
            rank.go_on()
    assert len(list((tmp_path / "nvmeio-blocks").glob("*.blocks"))) == 1
