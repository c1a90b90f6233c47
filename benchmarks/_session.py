"""One run of the comparison: its directory, its worker processes, what it had to skip."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _files import write_file
from _measure import Contender, Sample, turns
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nvmeio.cli.measure import peers
from nvmeio.cli.measure.disk import Disks
from nvmeio.cli.measure.worker import Failed, Worker, opened, why_missing
from nvmeio.errors import BackendUnavailableError

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 1200  # DeepSpeed compiles its op at first use
CALL_TIMEOUT_S = 300

TARGETS = {
    "nvmeio": "peers.nvmeio_side:NvmeioPeer",
    "gathers": "peers.gathers:Gathers",
    "DeepSpeed": "peers.deepspeed:DeepSpeedPeer",
    "caio": "peers.caio_peer:CaioPeer",
    "thread pool": "peers.plain:ThreadPoolPeer",
    "checkpoints": "peers.checkpoints:Checkpoints",
    "ranks": "peers.ranks:Rank",
    "sizes": "peers.sizes:Sizes",
    "offload": "peers.offloads:Offloads",
    "activations": "peers.activations:Activations",
    "parking": "peers.parking:Parking",
    "ZeRO-3": "peers.zero3:OnItsOwn",
    "streaming": "peers.inference:Streaming",
    "accelerate offload": "peers.inference:Accelerate",
    "AirLLM": "peers.streamers:AirLLM",
    "llama.cpp": "peers.streamers:LlamaCpp",
    "bitsandbytes": "peers.few_bits:BitsAndBytes",
    "torchao": "peers.few_bits:TorchAO",
    "ZeRO-3 inference": "peers.zero3_inference:ZeroInference",
}

_COMPILING = ("DeepSpeed", "ZeRO-3", "ZeRO-3 inference")


@dataclass(frozen=True)
class Skipped:
    """A peer without figures; `failed` if it was there and did not do the work."""

    name: str
    reason: str
    install: str
    failed: bool = False


class Session:
    """Hands workers and files to the rows and runs their contenders in turn.

    Args:
        directory: Empty directory for everything that is written; the caller removes it.
        size: Bytes of the large file.
        repeats: Measurements per contender.
        quick: Whether rows with sizes of their own shrink them.
        console: Where progress goes.
    """

    def __init__(
        self, directory: Path, size: int, repeats: int, quick: bool, console: Console
    ) -> None:
        self.directory = directory
        self.size = size
        self.repeats = repeats
        self.quick = quick
        self.console = console
        self._disks = Disks([directory])
        self.skipped: dict[str, Skipped] = {}
        self._workers: dict[str, Worker] = {}
        self._started = 0

    # Peers

    def worker(self, name: str) -> Worker | None:
        """The long-lived process of a peer, or None where it is skipped."""
        known = self._workers.get(name)
        if known is not None and known.alive:
            return known
        if known is not None:  # it died in an earlier row, which said so
            known.close()
            del self._workers[name]
        worker = self._start(name)
        if worker is not None:
            self._workers[name] = worker
        return worker

    @contextmanager
    def fresh_worker(self, name: str) -> Iterator[Worker | None]:
        """A process of its own for one row."""
        worker = self._start(name)
        try:
            yield worker
        finally:
            if worker is not None:
                worker.close()

    def skip(self, name: str, reason: str, install: str = "", *, failed: bool = False) -> None:
        if name not in self.skipped:
            self.skipped[name] = Skipped(name, reason, install, failed)
            self.console.print(f"[yellow]{'failed' if failed else 'skipped'}[/] {name}: {reason}")

    def leave_out(self, name: str, error: Exception) -> None:
        """A peer that is missing, or has failed."""
        if isinstance(error, BackendUnavailableError):
            self.skip(name, why_missing(error), error.remedy)
        else:
            self.skip(name, str(error), failed=True)

    def has_fio(self) -> bool:
        """Whether fio is there; it is named where it is not."""
        try:
            peers.require_fio()
        except BackendUnavailableError as missing:
            self.leave_out("fio", missing)
            return False
        return True

    def release(self, workers: Mapping[str, Worker]) -> None:
        """Give the tensors back at the end of a row; a worker that died has done so."""
        for worker in workers.values():
            with suppress(Failed):
                worker.call("release")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _start(self, name: str) -> Worker | None:
        if name in self.skipped:
            return None
        hint = " (compiles its op at first use: minutes)" if name in _COMPILING else ""
        self._started += 1
        try:
            with self.console.status(f"starting {name}{hint}"):
                return start_worker(TARGETS[name], self.directory / f"worker-{self._started}.log")
        except (BackendUnavailableError, Failed) as error:
            self.leave_out(name, error)
        return None

    # Files

    def files(self, count: int, nbytes: int | None = None) -> list[Path]:
        """That many written files, shared by all rows and contenders; written on first demand."""
        paths = [self.directory / f"data-{number}" for number in range(count)]
        missing = [path for path in paths if not path.exists()]
        if missing:
            with self.console.status(f"writing {len(missing)} file(s)"):
                for path in missing:
                    write_file(path, nbytes or self.size)
                os.sync()
        return paths

    # Measuring

    def measure(self, title: str, contenders: Sequence[Contender]) -> dict[str, list[Sample]]:
        """Run everybody `repeats` times in turn; who fails is skipped from then on."""
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
        failed: set[str] = set()
        with self._progress() as progress:
            task = progress.add_task(title, total=len(contenders) * self.repeats)
            for repeat, contender in turns(contenders, self.repeats):
                progress.update(task, description=f"{title}: {contender.name}, {repeat + 1}")
                if contender.name not in failed:
                    try:
                        samples[contender.name].append(self._run(contender))
                    except (Failed, BackendUnavailableError) as error:
                        failed.add(contender.name)
                        self.leave_out(f"{contender.name} ({title})", error)
                progress.advance(task)
        # A median of fewer repeats than the others' is not the same measurement.
        return {name: [] if name in failed else series for name, series in samples.items()}

    def attempt(self, name: str, worker: Worker, method: str, **arguments: object) -> bool:
        """Run preparations in a worker; whether they worked."""
        try:
            with self.console.status(f"{name}: {method}"):
                worker.call(method, timeout_s=CALL_TIMEOUT_S, **arguments)
        except (Failed, BackendUnavailableError) as error:
            self.leave_out(f"{name} ({method})", error)
            return False
        return True

    def _run(self, contender: Contender) -> Sample:
        if contender.before is not None:
            contender.before()
        before = self._disks.look()
        sample = contender.run()
        after = self._disks.look()
        if before is not None and after is not None:
            sample.disk_read, sample.disk_written = after.since(before)
        return sample

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )


def start_worker(target: str, log: Path) -> Worker:
    """A peer in a process of its own, ready.

    Raises:
        BackendUnavailableError, Failed: It cannot be had, or did not come up.
    """
    worker = Worker(target, log=log, path=[HERE])
    try:
        opened(worker.answer(START_TIMEOUT_S))
    except BaseException:
        worker.close()
        raise
    return worker


def calling(
    name: str,
    worker: Worker,
    method: str,
    *,
    before: Callable[[], None] | None = None,
    **arguments: object,
) -> Contender:
    """A contender that is one call into a worker."""
    return Contender(
        name, partial(worker.call, method, timeout_s=CALL_TIMEOUT_S, **arguments), before
    )
