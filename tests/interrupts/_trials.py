"""Many trials of one scenario in one process: disturb a call, make it again, compare.

python -m interrupts._process SCENARIO FOLDER --modes opcodes timer --trials 100 --seed 1
prints a `Report` for each mode as a line of JSON. A trial that hangs ends the process, with the
stacks of all threads.
"""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import gc
import random
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from interrupts import _disturbing as disturbing
from support import PATIENCE_S, HeldEngine, nvmeio_threads, open_descriptors

import nvmeio
from nvmeio._memory import mappings

MODES = ("timer", "opcodes", "hooks", "cancel", "cancel-later", "twice")
# A second Ctrl-C is to get through within one; a machine with much else to do may take longer.
SECOND_LIMIT_S = 15.0


class Skip(Exception):
    """The scenario cannot be run here."""


class Scenario:
    """One public call of one system, made again and again in `folder`.

    `work` is what is disturbed; what is around it is not. A scenario whose work is a coroutine
    defines `awork` instead.
    """

    modes: ClassVar[tuple[str, ...]] = ("timer", "opcodes", "twice")
    told: ClassVar[tuple[type[BaseException], ...]] = (nvmeio.ClosedError,)

    awaits: ClassVar[bool] = False  # on an event loop

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.awaits = cls.awaits or cls.awork is not Scenario.awork

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        self.folder = folder
        self.given = handle  # what it passes on wherever a handle may be given
        self.poke: Callable[[], None] = lambda: None  # what hooks of the user call

    def prepare(self) -> None:
        """Before each trial."""

    def work(self) -> Any:
        """The call."""
        return self.disturbance.run(self.awork())

    async def awork(self) -> Any:
        raise NotImplementedError

    disturbance = disturbing.Disturbance()

    def again(self) -> Any:
        """The same call after an interruption."""
        return self.work()

    def check(self, found: Any) -> None:
        """Raise AssertionError unless what the call gave, and left, is right."""

    def patiently(self, work: Callable[[], Any]) -> Any:
        """What a second Ctrl-C left to itself holds a directory for as long as it takes."""
        patience = time.monotonic() + PATIENCE_S
        while True:
            try:
                return work()
            except nvmeio.TransferError as error:
                if error.errno != errno.EBUSY or time.monotonic() > patience:
                    raise
                time.sleep(0.01)

    def until(self, condition: Callable[[], bool]) -> None:
        """Of what goes on after a second Ctrl-C."""
        patience = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < patience, list(self.folder.rglob("*"))
            time.sleep(0.01)

    def is_interruption(self, error: BaseException, wanted: type[BaseException]) -> bool:
        """Whether this is how the call ends that was disturbed by `wanted`."""
        return isinstance(error, wanted)

    def says_so(self, error: BaseException) -> bool:
        """Whether this error says plainly that the object is closed or broken."""
        return isinstance(error, self.told)

    def close(self) -> None:
        """Give everything back."""


@dataclasses.dataclass
class Report:
    """What the trials of a scenario showed."""

    scenario: str
    mode: str
    seed: int
    trials: int = 0
    interrupted: int = 0
    right: int = 0
    told: int = 0
    swallowed: int = 0
    wrong: int = 0
    leaked: str = ""
    grew: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    ended: dict[str, int] = dataclasses.field(default_factory=dict)

    def fault(self, what: str) -> None:
        self.wrong += 1
        if len(self.faults) < 5:
            self.faults.append(what)


class Trials:
    def __init__(self, make: type[Scenario], folder: Path, report: Report, limit_s: float) -> None:
        self._make = make
        self._folder = folder
        self._report = report
        self._limit_s = limit_s
        self._made = 0
        self._ignored = 0
        self._most: tuple[int, int, int] = (0, 0, 0)
        self._held: tuple[HeldEngine, nvmeio.AioHandle] | None = None
        if report.mode == "twice":
            engine = HeldEngine()
            engine.gate.set()
            self._held = engine, nvmeio.AioHandle(block_size=16384, queue_depth=8, engine=engine)
        sys.unraisablehook = self._unraisable

    def _unraisable(self, unraisable: Any) -> None:
        """Of finalisers: nobody can do better."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._ignored += 1

    def fresh(self) -> Scenario:
        self._made += 1
        folder = self._folder / str(self._made)
        folder.mkdir()
        return self._make(folder, self._held and self._held[1])

    def run(self, trials: int, seed: int) -> None:
        chance = random.Random(seed)
        scenario = self.fresh()
        self._undisturbed(scenario)
        scenario.close()
        shutil.rmtree(scenario.folder)
        del scenario
        gc.collect()
        gc.freeze()  # torch's objects are many: without them a collection takes 1 ms, not 150
        before = _held()
        scenario = self.fresh()
        span = self._measure(scenario)
        self._most = len(open_descriptors()), len(nvmeio_threads()), len(mappings.mapped)
        phase = chance.random()
        for number in range(trials):
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)
            # Moments are drawn; places are swept over, so that no two trials are alike.
            drawn = self._report.mode in ("timer", "cancel-later")
            at = chance.random() if drawn else (number + phase) / trials
            if not self._trial(scenario, self._disturb(at, span)):
                self._discard(scenario)
                scenario = self.fresh()
                try:
                    self._undisturbed(scenario)
                except Exception as failed:
                    self._report.fault(f"a fresh one, undisturbed: {_told(failed)}")
                    break  # the process itself is spoilt
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)
        scenario.close()
        del scenario
        if self._held is not None:
            self._held[1].close()
        self._report.leaked = _left(before)
        faulthandler.cancel_dump_traceback_later()

    def _measure(self, scenario: Scenario) -> float:
        """How long the call takes, in the unit of its disturbance."""
        mode = self._report.mode
        counting: Any = None
        if mode == "twice":
            return 0.0
        if mode in ("timer", "cancel-later"):
            taken = []
            for _ in range(3):
                started = time.perf_counter()
                self._undisturbed(scenario)
                taken.append(time.perf_counter() - started)
            return 1.2 * min(taken)
        counting = {
            "opcodes": disturbing.Opcodes,
            "hooks": disturbing.Hook,
            "cancel": disturbing.Cancel,
        }[mode](None)
        self._undisturbed(scenario, counting)
        if not counting.count:
            raise RuntimeError(f"{mode}: the scenario offers no place to disturb it")
        return float(counting.count)

    def _disturb(self, at: float, span: float) -> disturbing.Disturbance:
        mode = self._report.mode
        if self._held is not None:
            return disturbing.Twice(self._held[0], SECOND_LIMIT_S)
        if mode == "timer":
            return disturbing.Timer(at * span)
        if mode == "cancel-later":
            return disturbing.CancelLater(at * span)
        number = 1 + int(at * span)
        if mode == "opcodes":
            return disturbing.Opcodes(number)
        return disturbing.Hook(number) if mode == "hooks" else disturbing.Cancel(number)

    def _undisturbed(
        self, scenario: Scenario, counting: disturbing.Disturbance | None = None
    ) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)
        scenario.prepare()
        scenario.check(self._call(scenario, counting or disturbing.Disturbance()))

    def _call(self, scenario: Scenario, disturbance: disturbing.Disturbance) -> Any:
        scenario.disturbance = disturbance
        scenario.poke = disturbance.poke
        try:
            with disturbance.around():
                return scenario.work()
        finally:
            scenario.disturbance = disturbing.Disturbance()
            scenario.poke = lambda: None

    def _trial(self, scenario: Scenario, disturbance: disturbing.Disturbance) -> bool:
        """Whether the scenario can go on."""
        report = self._report
        report.trials += 1
        ignored = self._ignored
        try:
            scenario.prepare()
        except Exception:
            report.fault("preparing, after a trial that was right: " + traceback.format_exc())
            return False
        found: Any = None
        try:
            found = self._call(scenario, disturbance)
        except BaseException as raised:
            if disturbance.fired and scenario.is_interruption(raised, disturbance.raises):
                where = _where(raised)
                report.interrupted += 1
            elif disturbance.fired and scenario.says_so(raised):
                report.told += 1
                return False
            else:
                report.fault(f"the call raised something else: {_told(raised)}")
                return False
        else:
            if disturbance.fired and self._ignored == ignored:
                report.swallowed += 1
            where = "not interrupted"
        report.ended[where] = report.ended.get(where, 0) + 1
        try:
            scenario.check(scenario.again() if where != "not interrupted" else found)
        except BaseException as wrong:
            if where != "not interrupted" and scenario.says_so(wrong):
                report.told += 1
            else:
                report.fault(f"{where}: afterwards {_told(wrong)}")
            return False
        report.right += 1
        self._watch(where)
        return True

    def _watch(self, where: str) -> None:
        """Whether more is held than after the trial before: tells where to look for a leak."""
        gc.collect()
        held = len(open_descriptors()), len(nvmeio_threads()), len(mappings.mapped)
        if any(now > then for now, then in zip(held, self._most, strict=True)):
            if len(self._report.grew) < 20:
                self._report.grew.append(f"{where}: descriptors, threads, mappings {held}")
            self._most = held

    def _discard(self, scenario: Scenario) -> None:
        try:
            scenario.close()
        except Exception as failed:
            if not scenario.says_so(failed):
                self._report.fault(f"closing afterwards: {_told(failed)}")


def _where(raised: BaseException) -> str:
    """The innermost places of ours on the way."""
    ours = [f for f in traceback.extract_tb(raised.__traceback__) if "/nvmeio/" in f.filename]
    frame = ours[-1] if ours else traceback.extract_tb(raised.__traceback__)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]


# What a process holds


def _held() -> tuple[dict[int, str], set[threading.Thread], int]:
    return open_descriptors(), nvmeio_threads(), len(mappings.mapped)


def _left(before: tuple[dict[int, str], set[threading.Thread], int]) -> str:
    """What is held now and was not before; what ends by itself is given time."""
    patience = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        descriptors, threads, mapped = _held()
        left = {fd: t for fd, t in descriptors.items() if before[0].get(fd) != t}
        running = threads - before[1]
        more = mapped - before[2]
        if not left and not running and more <= 0:
            return ""
        if time.monotonic() > patience:
            return f"descriptors {left}, threads {running}, mappings {more}"
        time.sleep(0.01)
