"""Row `load`: files into tensors, the page cache dropped before each load."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from _files import drop_from_cache, huge_pages
from _lines import Line, at_least, best, compare, gb_per_s
from _measure import Contender
from _session import Session
from peers import fio

from checkpoint_rows._state import touch_memory, worker_with_state
from checkpoint_rows.saving import against_same_memory, fio_settings, huge_bytes
from nvmeio.errors import BackendUnavailableError

TORCH = ("torch.load", "torch.load, mmap")
RUNAI = "runai"
SAFETENSORS = ("safetensors", "fastsafetensors", RUNAI)


def measure(session: Session) -> list[Line]:
    ready = worker_with_state(session)
    if ready is None:
        return []
    worker, nbytes = ready
    files = {"pt": session.directory / "state.pt", "st": session.directory / "state.safetensors"}
    if not session.attempt(
        "safetensors",
        worker,
        "write_files",
        torch_file=str(files["pt"]),
        safetensors_file=str(files["st"]),
    ):
        return []
    contenders: list[Contender] = []
    for how in (*TORCH, "nvmeio.load", *SAFETENSORS, "nvmeio.load_safetensors"):
        try:
            worker.call("require", how=how)
        except BackendUnavailableError as error:
            session.leave_out(how, error)
            continue
        path = files["pt" if how in TORCH or how == "nvmeio.load" else "st"]
        run = partial(worker.call, "load", how=how, path=str(path))
        contenders.append(Contender(how, run, partial(_make_cold, path, nbytes)))
    size = files["st"].stat().st_size >> 20 << 20
    with huge_pages(huge_bytes(size)) as refused:
        settings = fio_settings(session, refused, size)
        contenders += [
            Contender(s.name, partial(fio.sequential, files["st"], size, False, s))
            for s in settings
        ]
        samples = session.measure("load", contenders)
    for path in files.values():
        path.unlink()
    name, limit = best(samples, [s.name for s in settings], gb_per_s, "fio")
    other, fastest = best(samples, [*TORCH, *SAFETENSORS], gb_per_s, "the best peer")
    lines = []
    for ours in ("nvmeio.load", "nvmeio.load_safetensors"):
        mine = samples.get(ours, [])
        for peer, theirs, least in (
            (f"the best of them: {other}", list(fastest), 1.0),
            ("torch.load", samples.get("torch.load", []), 2.0),
            (name, list(limit), 0.9),
        ):
            target = at_least(least)
            lines.append(
                compare("load", f"{ours}, cold", peer, "GB/s", gb_per_s, mine, theirs, target)
            )
        lines.append(against_same_memory("load", f"{ours}, cold", samples, ours, size, 0.95))
        for peer in (*TORCH[1:], *SAFETENSORS):
            if peer != other or peer == RUNAI:
                theirs, least = samples.get(peer, []), at_least(1.05) if peer == RUNAI else None
                work = f"{ours}, cold"
                lines.append(compare("load", work, peer, "GB/s", gb_per_s, mine, theirs, least))
    return lines


def _make_cold(path: Path, nbytes: int) -> None:
    drop_from_cache(path)
    touch_memory(nbytes)
