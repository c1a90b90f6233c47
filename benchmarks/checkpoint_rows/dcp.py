"""Row `dcp`: torch.distributed.checkpoint with its own file storage and with nvmeio's."""

from __future__ import annotations

import shutil
from functools import partial

from _files import drop_from_cache, huge_pages
from _lines import Line, at_least, compare, gb_per_s
from _measure import Contender
from _session import Session
from peers import fio

from checkpoint_rows._state import worker_with_state
from checkpoint_rows.saving import against_same_memory, fio_settings, huge_bytes


def measure(session: Session) -> list[Line]:
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, _ = ready
    saved, kept = session.directory / "dcp", session.directory / "dcp-to-load"
    sides = (("nvmeio", True), ("stock", False))
    saves = session.measure(
        "DCP save",
        [
            Contender(
                name,
                partial(worker.call, "dcp_save", path=str(saved), ours=ours),
                partial(shutil.rmtree, saved, True),
            )
            for name, ours in sides
        ],
    )
    shutil.rmtree(saved, ignore_errors=True)
    worker.call("dcp_write", path=str(kept))
    (data,) = kept.glob("*.distcp")
    size = data.stat().st_size >> 20 << 20
    with huge_pages(huge_bytes(size)) as refused:
        loads = session.measure(
            "DCP load",
            [
                *(
                    Contender(
                        name,
                        partial(worker.call, "dcp_load", path=str(kept), ours=ours),
                        partial(drop_from_cache, kept),
                    )
                    for name, ours in sides
                ),
                *(
                    Contender(s.name, partial(fio.sequential, data, size, False, s))
                    for s in fio_settings(session, refused, size)
                ),
            ],
        )
    shutil.rmtree(kept, ignore_errors=True)
    return [
        compare(
            "dcp",
            "DCP save",
            "FileSystemWriter",
            "GB/s",
            gb_per_s,
            saves["nvmeio"],
            saves["stock"],
            at_least(3.0),
            "one process, durable on both sides",
        ),
        compare(
            "dcp",
            "DCP load, cold",
            "FileSystemReader",
            "GB/s",
            gb_per_s,
            loads["nvmeio"],
            loads["stock"],
            at_least(1.5),
            "of the stock writer's files",
        ),
        against_same_memory("dcp", "DCP load, cold", loads, "nvmeio", size, 0.95),
    ]
