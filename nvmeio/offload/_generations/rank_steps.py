"""Several ranks: the owner of each directory, and the step that all of them go on from.

After a loss of power a rank has what it had made durable, and no drive is as fast as the other. So
that all of them have a generation in common, no rank gives up generation N - 1 before every rank
has made N durable (`DurableSteps`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from nvmeio._distributed.rank_store import RankStore, pauses, several
from nvmeio.errors import IntegrityError, TransferError, counted
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.manifests import Manifest, UnusableGeneration


@dataclasses.dataclass
class Made:
    """Counts the optimizers that this rank made; all ranks make them in the same order.

    An optimizer that is refused is not counted, so the next try has the number that the other ranks
    have already.
    """

    count: int = 0


_made = Made()


class DurableSteps:
    """Tells the other ranks which generations are durable here, and waits for theirs.

    Each durable generation has a key, which every rank counts up, so a wait asks for one number
    however many ranks there are. It waits only for ranks that joined and have not closed their
    optimizer.

    `store` is shared by the ranks and all such optimizers; `made` are those of this rank.
    """

    def __init__(self, store: RankStore, timeout_s: float, made: Made) -> None:
        self._all = store
        self._timeout_s = timeout_s
        self._made = made
        self._enter(made.count)
        self._joined = self._is_made = False
        self._first = -1  # the generation that the first change went out from
        self._told = -1  # the last generation that this rank has made durable

    def _enter(self, number: int) -> None:
        self._number = number
        self._store = self._all.within(str(number), self._all.path, self._all.operation)

    @classmethod
    def of_default_group(cls, directory: str) -> DurableSteps | None:
        """The steps of the default process group's ranks; None for a process alone."""
        if not several():
            return None
        store = RankStore.of_group(dist.group.WORLD, "steps", directory, "step")
        return cls(store, store.timeout_s, _made)

    def join(self) -> None:
        """Count this rank among those that are waited for."""
        if not self._joined:
            self._store.add("joined", 1)
            self._joined = True
            if self._told >= 0:
                self._store.add(f"durable/{self._told}", 1)

    def _withdraw(self) -> None:
        """Take back `join`, and this rank's messages since."""
        if self._joined:
            self._joined = False
            if self._told >= 0:
                self._store.add(f"durable/{self._told}", -1)
            self._store.add("joined", -1)

    def stay(self) -> None:
        """Count this optimizer as made: the next one gets the next number."""
        self._is_made, self._made.count = True, self._number + 1

    def undo_stay(self) -> None:
        if self._is_made and self._made.count == self._number + 1:
            self._is_made, self._made.count = False, self._number

    def tell(self, generation: int) -> None:
        """Tell the others that a generation is durable here."""
        if self._joined and generation > self._told:
            self._store.add(f"durable/{generation}", 1)
            self._told = generation

    def lose(self, generation: int, why: str) -> None:
        """Tell waiting ranks that a generation could not be made durable here. Never raises."""
        self._store.fail("lost", why, generation=generation)

    def leave(self) -> None:
        """Take no further steps, or give up an optimizer that was refused. Never raises."""
        with contextlib.suppress(TransferError):
            if not self._is_made:
                self._withdraw()
            if not self._joined:
                return
            self._joined = False
            self._store.set(f"left/{self._store.rank}", str(self._told).encode())
            self._store.add("left", 1)

    def wait(self, generation: int) -> None:
        """Wait until a generation is durable on all ranks.

        TransferError if a rank could not make it so (EIO), or has not in time (ETIMEDOUT).
        """
        if self._first < 0:
            self._first = generation
        if generation <= self._first + 1:  # a state dict is loaded before the first step
            self._follow(generation)
        if generation <= 0:
            return
        until = time.monotonic() + self._timeout_s
        for _ in pauses():
            joined = self._store.add("joined", 0)
            done = self._store.add(f"durable/{generation}", 0)
            if done >= joined or done + self._left_before(generation) >= joined:
                break
            if self._past() >= generation:  # for one that joined when the others were further
                break
            told = self._store.failure("lost")
            if told is not None:
                raise self._lost(told)
            if time.monotonic() > until:
                raise TransferError(
                    errno.ETIMEDOUT,
                    operation="step",
                    path=self._store.path,
                    detail=f"{joined - done} of {counted(joined, 'rank')} have not made generation "
                    f"{generation} durable within {self._timeout_s:g} s, so this one cannot give "
                    "up the one before: they died, hang, or took fewer steps; durable=False has "
                    "no rank wait for another",
                )
        if self._store.rank == 0 and generation > 2:
            self._store.set("past", str(generation - 2).encode())
            self._store.delete(f"durable/{generation - 2}")

    def _follow(self, generation: int) -> None:
        """Before the first step, follow ranks that have closed this optimizer and made another.

        If one rank is refused all make theirs again, and this one may be here before others close
        theirs.
        """
        while self._joined:
            joined = self._store.add("joined", 0)
            if joined < 2 or self._left_before(generation + 1) < joined - 1:
                return  # somebody is here, or has made a step
            following = self._all.within(str(self._number + 1), self._all.path, "step")
            if not following.add("joined", 0):
                return
            self._withdraw()
            self._enter(self._number + 1)
            self.join()
            self.stay()

    def _past(self) -> int:
        """The last generation whose count was deleted: every rank has it."""
        return int(self._store.get("past")) if self._store.check(["past"]) else 0

    def _left_before(self, generation: int) -> int:
        """How many ranks left before they had made a generation durable."""
        if not self._store.add("left", 0):
            return 0
        keys = [f"left/{rank}" for rank in range(self._store.size)]
        return sum(
            int(self._store.get(key)) < generation for key in keys if self._store.check([key])
        )

    def _lost(self, told: dict[str, Any]) -> TransferError:
        return TransferError(
            errno.EIO,
            operation="step",
            path=self._store.path,
            detail=f"rank {told['rank']} of {self._store.size} could not make generation "
            f"{told['generation']} durable ({told['text']}): load a checkpoint, or make a new "
            "optimizer with resume=True, which goes on from the last step that all ranks have",
        )


def directory_name(what: str) -> str:
    """A name that differs between the ranks of the default process group, if there is one."""
    return f"{what}-{dist.get_rank():05d}-of-{dist.get_world_size():05d}" if several() else what


class Agreed(NamedTuple):
    """The generation that all ranks go on from.

    `manifest` is this rank's of the last generation that all have, None if no rank made a step;
    `later` are this rank's after it. `run` is the name that all ranks give to what begins now.
    """

    manifest: Manifest | None
    later: list[Manifest]
    unusable: list[UnusableGeneration]
    run: str


class _Held(NamedTuple):
    """The message of one rank to the others."""

    generations: list[tuple[int, str]]  # and the run of each
    why_none: str
    run: str  # a name for what begins now; that of rank 0 is taken

    @property
    def last(self) -> int:
        return max((generation for generation, _ in self.generations), default=0)


def agreed(directory: str, failure: Exception | None = None) -> Agreed:
    """Find the last generation that every rank has, and this rank's generations after it.

    A collective of the default process group, if that has several ranks. Killed ranks may differ by
    one step, not more, since backward waits for all; mostly two generations are there. A generation
    of the same number but of another run (a drive that came from elsewhere) does not count.

    `failure` says why this rank has no such directory, and is raised once the others know.
    IntegrityError is raised on all ranks, if one has no whole manifest or they have none in common.
    """
    mine: list[Manifest] = []
    unusable: list[UnusableGeneration] = []
    try:
        if failure is None:
            mine, unusable = manifests.read(directory)
    except Exception as failed:
        failure = failed
    own = _Held([(m.generation, m.run) for m in mine], str(failure or ""), uuid.uuid4().hex)
    ranks = [own]
    if several():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, tuple(own))
        ranks = [_Held(*each) for each in gathered]
    if failure is not None:
        raise failure
    for rank, held in enumerate(ranks):
        if held.why_none:
            raise IntegrityError(
                f"rank {rank} cannot resume: {held.why_none}",
                expected="a whole manifest",
                found=held.why_none,
            )
    run = ranks[0].run
    common = set.intersection(*(set(held.generations) for held in ranks))
    if not common:
        if all(held.last <= 1 for held in ranks):
            return Agreed(None, mine, unusable, run)  # killed before the first step
        raise _nothing_in_common(directory, ranks)
    last = max(common)
    manifest = next(each for each in mine if (each.generation, each.run) == last)
    later = [each for each in mine if each.generation > manifest.generation]
    return Agreed(manifest, later, unusable, run)


def _nothing_in_common(directory: str, ranks: Sequence[_Held]) -> IntegrityError:
    numbers = [sorted(generation for generation, _ in held.generations) for held in ranks]
    others = ""
    if set.intersection(*map(set, numbers)):
        others = "; those of the same number are of another run (a drive or directory mixed up?)"
    return IntegrityError(
        f"the ranks have no step in common to resume from: rank by rank, {directory} and its "
        f"neighbours have the generations {numbers}{others}; go on from a checkpoint",
        expected="a generation that every rank has",
        found=numbers,
    )
