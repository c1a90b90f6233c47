"""Public operations under a kernel that refuses: right bytes, or an error that says what failed.

python -m inject._runs FOLDER ROUNDS

prints "ready" when everything is imported and has run once; strace is attached then. A line on the
input lets it begin, the next one (when strace is gone) lets each operation show that nothing of it
lasts. At the end a line of JSON says what was seen.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from interrupts import _checkpoints, _inference, _offload, _operations
from interrupts._trials import Scenario

import nvmeio
from nvmeio._memory import mappings

SCENARIOS: dict[str, type[Scenario]] = {
    "operations": _operations.SyncOperations,
    "operations-async": _operations.AsyncOperations,
    "handles": _operations.Handles,
    "pool": _operations.Pool,
    "save": _checkpoints.Save,
    "save-async": _checkpoints.AsyncSave,
    "load": _checkpoints.Load,
    "safetensors-save": _checkpoints.SafetensorsSave,
    "safetensors-load": _checkpoints.SafetensorsLoad,
    "file-object": _checkpoints.FileObject,
    "checkpointer-save": _checkpoints.CheckpointerSave,
    "checkpointers": _checkpoints.Checkpointers,
    "dcp": _checkpoints.Dcp,
    "stream-forward": _inference.Forward,
    "streams": _inference.Streams,
    "swapped-module-passes": _offload.Passes,
    "swapped-module-gather": _offload.Gather,
    "swapped-modules": _offload.Modules,
    "swapped-optimizer-step": _offload.StepInMemory,
    "swapped-optimizer-step-disk": _offload.StepOnDisk,
    "swapped-optimizer-snapshot": _offload.Snapshot,
    "swapped-optimizer-resume": _offload.Resume,
}
RUN_LIMIT_S = 300

# What Python and torch say themselves where the kernel gives no memory, no thread or no file.
_CLEAR = (
    "can't start new thread",
    "can't allocate memory",
    "Cannot allocate memory",
    "open file failed with strerror",
)
_MISSING = ("broken", "is closed")


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.right = 0
        self.errors: dict[str, int] = {}
        self.faults: list[str] = []
        self._made = 0
        self.open: dict[str, Scenario] = {}

    def fresh(self, name: str) -> Scenario:
        self._made += 1
        folder = self.folder / f"{name}-{self._made}"
        folder.mkdir()
        made = self.open[name] = SCENARIOS[name](folder)
        return made

    def once(self, name: str) -> None:
        """One call under injection, on an object that is made anew where the last one is broken."""
        self.runs += 1
        faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True, file=sys.__stderr__)
        scenario = self.open.pop(name, None)
        try:
            if scenario is None:
                scenario = self.fresh(name)
            self.open[name] = scenario
            scenario.prepare()
            found = scenario.work()
            scenario.check(found)
        except BaseException as error:
            self.judge(name, error)
            # What a failed call leaves is looked at when the kernel is well again; a new object
            # is made where the state that the scenario keeps count of may have moved on.
            if not isinstance(scenario, _STATELESS):
                self.open.pop(name, None)
                self.end(name, scenario)
        else:
            self.right += 1

    def end(self, name: str, scenario: Scenario | None) -> None:
        try:
            if scenario is not None:
                scenario.close()
        except BaseException as error:
            self.judge(f"{name}, closing", error)

    def judge(self, name: str, error: BaseException) -> None:
        if clear(error):
            told = f"{name}: {type(error).__name__}"
            self.errors[told] = self.errors.get(told, 0) + 1
        elif len(self.faults) < 5:
            self.faults.append(f"{name}: {''.join(traceback.format_exception(error))[-5000:]}")
        else:
            self.faults.append(name)

    def calm(self, name: str) -> None:
        """Without injection all is right again, on the same object or on a new one."""
        faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True, file=sys.__stderr__)
        scenario = self.open.pop(name, None)
        try:
            if scenario is not None:
                try:
                    scenario.prepare()
                    scenario.check(scenario.work())
                except Exception as error:
                    if not clear(error):
                        raise
                scenario.close()
        except BaseException as error:
            self.judge(f"{name}, on the same object afterwards", error)
        try:
            scenario = self.fresh(name)
            scenario.prepare()
            scenario.check(scenario.work())
            scenario.close()
        except BaseException as error:
            self.faults.append(f"{name}, on a new object afterwards: {traceback.format_exc()}")
            del error
        self.open.pop(name, None)


# Those whose next call needs nothing of the one before.
_STATELESS = (_operations.SyncOperations, _checkpoints.Load, _inference.Forward, _offload.Passes)


def clear(error: BaseException) -> bool:
    """Whether an error says what failed, or one that it was raised from does."""
    for each in _chain(error):
        if isinstance(each, (nvmeio.NvmeioError, OSError, MemoryError)):
            return True
        if any(text in str(each) for text in (*_CLEAR, *_MISSING)):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    chain: BaseException | None = error
    while chain is not None:
        yield chain
        for met, _ in getattr(chain, "failures", {}).values():  # of DCP's CheckpointException
            yield from _chain(met)
        # An AssertionError of ours says that bytes are wrong, whatever was handled before.
        chain = chain.__cause__ or (
            None if isinstance(chain, AssertionError) else chain.__context__
        )


def main() -> int:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    names = sys.argv[3:] or list(SCENARIOS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = Runs(folder)
    for name in names:
        scenario = runs.fresh(name)
        scenario.prepare()
        scenario.check(scenario.work())
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(rounds):
        for name in names:
            runs.once(name)
    print("done", flush=True)
    sys.stdin.readline()
    for name in names:
        runs.calm(name)
    faulthandler.cancel_dump_traceback_later()
    report: dict[str, Any] = {
        "runs": runs.runs,
        "right": runs.right,
        "errors": runs.errors,
        "faults": runs.faults,
        "mappings": len(mappings.mapped),
    }
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
