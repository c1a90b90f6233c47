"""Row `ranks`: 2 and 4 ranks of one machine, saving and loading a state that all of them have."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from _files import drop_from_cache
from _lines import Line, at_least, compare, gb_per_s
from _measure import Contender, Sample
from _session import CALL_TIMEOUT_S, Session

from nvmeio.cli.measure.worker import Failed, Worker, opened

WORLDS = (2, 4)


def measure(session: Session) -> list[Line]:
    lines: list[Line] = []
    for world in WORLDS:
        try:
            lines += _measure_world(session, world)
        except Failed as error:
            session.leave_out(f"{world} ranks", error)
    return lines


def _measure_world(session: Session, world: int) -> list[Line]:
    with contextlib.ExitStack() as started:
        workers = [started.enter_context(session.fresh_worker("ranks")) for _ in range(world)]
        ranks = [worker for worker in workers if worker is not None]
        if len(ranks) < world:
            return []
        # Each holds all of it, and a copy of its part: half the size for every rank's sake.
        nbytes = session.size // 2 >> 20 << 20
        store = str(session.directory / f"store-{world}")
        _send(
            ranks,
            "join",
            [{"rank": rank} for rank in range(world)],
            world=world,
            store=store,
            nbytes=nbytes,
        )
        folders = {
            writers: session.directory / f"ranks-{world}-{writers}" for writers in (world, 1)
        }
        contenders = [
            Contender(
                f"{writers} writers",
                partial(_all, ranks, "save"),
                partial(_all, ranks, "open", directory=str(folder), writers=writers),
            )
            for writers, folder in folders.items()
        ]
        for contender in contenders:  # from the third save on a file is recycled
            assert contender.before is not None
            contender.before()
            for _ in range(3):
                contender.run()
        saves = session.measure(f"{world} ranks save", contenders)
        _all(ranks, "close")
        path = next(iter(folders.values())) / "latest"
        loads = session.measure(
            f"{world} ranks load",
            [
                Contender(
                    name,
                    partial(_all, ranks, "load", path=str(path), together=together),
                    partial(drop_from_cache, path.resolve()),
                )
                for name, together in (("together", True), ("each all", False))
            ],
        )
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    return [
        compare(
            "ranks",
            f"{world} ranks of one machine save one state",
            "one of them writes",
            "GB/s",
            gb_per_s,
            saves[f"{world} writers"],
            saves["1 writers"],
            at_least(1.0),
            "from the call until it is durable",
        ),
        compare(
            "ranks",
            f"{world} ranks of one machine load it, each byte read once",
            "each reads everything",
            "GB/s",
            gb_per_s,
            loads["together"],
            loads["each all"],
            None,
            "of the state; through gloo on the loopback",
        ),
    ]


def _all(ranks: Sequence[Worker], method: str, **named: Any) -> Sample | None:
    """Have all ranks do the same at once; the sample of the slowest."""
    return _send(ranks, method, [{}] * len(ranks), **named)


def _send(
    ranks: Sequence[Worker], method: str, each: Sequence[dict[str, Any]], **named: Any
) -> Any:
    for rank, own in zip(ranks, each, strict=True):
        rank.send(method, **own, **named)
    answers = [rank.answer(CALL_TIMEOUT_S) for rank in ranks]
    values = [opened(answer) for answer in answers]
    return max(values, key=lambda sample: sample.seconds) if isinstance(values[0], Sample) else None
