"""The same tensor from `torch.empty`: 4 KiB pages, 64 bytes past a page, locked by nobody."""

from __future__ import annotations

from pathlib import Path

from _lines import Line, at_least, at_most, compare, gb_per_s
from _session import Session, calling

from nvmeio.cli.measure.worker import Failed, Worker

ROW = "unpinned"


def measure(session: Session) -> list[Line]:
    (path,) = session.files(1)
    locked = session.worker("nvmeio")
    deepspeed = session.worker("DeepSpeed")
    with session.fresh_worker("nvmeio") as plain:
        workers = {"page-locked": locked, "nvmeio": plain, "DeepSpeed": deepspeed}
        lines: list[Line] = []
        # Memory first: it needs a process in which no bounce block was touched yet.
        if plain is not None and session.attempt(
            "nvmeio", plain, "prepare", locked=False, nbytes=session.size
        ):
            lines += _memory(session, plain, path)
        ready = {
            name: worker
            for name, worker in workers.items()
            if worker is not None
            and session.attempt(
                name, worker, "prepare", locked=name == "page-locked", nbytes=session.size
            )
            and session.attempt(name, worker, "check", path=str(path))
        }
        for method, title in (("read", "read, torch.empty"), ("write", "overwrite, torch.empty")):
            samples = session.measure(
                title,
                [calling(name, worker, method, path=str(path)) for name, worker in ready.items()],
            )
            ours = samples.get("nvmeio", [])
            for key, peer, least in (
                ("page-locked", "nvmeio, page-locked", 0.9),
                ("DeepSpeed", "DeepSpeed, same tensor", 1.5),
            ):
                theirs = samples.get(key, [])
                lines.append(
                    compare(ROW, title, peer, "GB/s", gb_per_s, ours, theirs, at_least(least))
                )
        session.release(ready)
    return lines


def _memory(session: Session, worker: Worker, path: Path) -> list[Line]:
    try:
        memory = worker.call("extra_memory", path=str(path))
    except Failed as error:
        session.leave_out("nvmeio (extra memory)", error)
        return []
    mib = 1 << 20
    return [
        Line(
            ROW,
            "extra memory, torch.empty",
            "queue depth × block size × lanes",
            "MiB",
            [memory["extra"] / mib],
            [memory["allowed"] / mib],
            at_most(1.0),
            note="peak resident memory over one read and one write",
        )
    ]
