"""From drives that ranks do not share back to the state: which save, and who has which part."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import dataclass
from typing import Any

from nvmeio._io.handles import CallHandle
from nvmeio._io.long_call import LongCall
from nvmeio.checkpoint._load.load_options import HowToLoad, nothing_to_read
from nvmeio.checkpoint._load.loading import load_archive
from nvmeio.checkpoint._load.unpickling import seam
from nvmeio.checkpoint._manager.restoring import Wanted, until_there
from nvmeio.checkpoint._ranks.drives import OwnDrives, Save
from nvmeio.checkpoint._ranks.part_ranks import Image, PartRanks, of_one, open_part
from nvmeio.errors import BackendUnavailableError, TransferError

logger = logging.getLogger("nvmeio")


def restore_parts(wanted: Wanted[PartRanks], drives: OwnDrives, how: HowToLoad) -> Any:
    """The state, or a list of states, from what ranks have on their drives."""
    if seam() is None:
        raise BackendUnavailableError(
            "parts of a checkpoint are put together beneath torch's unpickler, which this torch "
            "has in another place than any that is known here",
            attempts=[("torch.serialization._load", "missing, or of other parameters")],
        )
    load = _LoadingParts(wanted, drives, how)
    # Recycled between the look and the opening, which all ranks know.
    return until_there(how.call, load.found, lambda failed: failed.errno == errno.ESTALE)


@dataclass(frozen=True)
class _LoadingParts:
    wanted: Wanted[PartRanks]
    drives: OwnDrives
    how: HowToLoad

    def found(self) -> Any:
        """Look what is whole, and load it."""
        wanted = self.wanted
        ranks = wanted.new_ranks()
        ranks.listen(self.how.call)
        with ranks.telling():
            survey = ranks.survey(self.drives, step=wanted.step, rank=wanted.rank)
            save, warning = survey.chosen(wanted.step)
            if warning and wanted.own == 0:
                logger.warning("%s", warning)
            if save.kind == "part":
                ranks.resume()
                return self._load(save, None, ranks)
            return self._load_states(save, survey.saves[save])

    def _load_states(self, save: Save, having: dict[int, list[int]]) -> Any:
        """Of ranks with a state each: this one's own, another one's, or all."""
        wanted, own = self.wanted, self.wanted.own
        if wanted.rank is not None:
            if wanted.rank >= save.parts:
                raise ValueError(
                    f"step {save.step}: there is no rank {wanted.rank}: it was saved by "
                    f"{save.parts}, 0 to {save.parts - 1}"
                )
            return self._load(save, wanted.rank, wanted.new_ranks())
        if wanted.size != save.parts:
            return [self._load(save, each, wanted.new_ranks()) for each in range(save.parts)]
        if all(rank in having[rank] for rank in range(save.parts)):
            return self._load_own(save)
        found = None
        for each in range(save.parts):
            state = self._load(save, each, wanted.new_ranks())
            found = state if each == own else found
        return found

    def _load_own(self, save: Save) -> Any:
        try:
            return self._load(save, self.wanted.own, of_one())
        except TransferError as failed:
            if failed.errno != errno.ESTALE:
                raise
            raise TransferError(  # no other rank knows, to look once more
                errno.ENOENT,
                operation="open",
                path=os.path.join(self.wanted.directory, save.name),
                detail=f"step {save.step} was recycled while it was restored; restore a newer one",
            ) from failed

    def _load(self, save: Save, number: int | None, ranks: PartRanks) -> Any:
        """One archive; all of its parts, or the one that it has."""
        paths = self.drives.paths(save)
        if number is not None:
            paths = {number: paths[number]} if number in paths else {}
        name = os.path.join(self.wanted.directory, save.name)
        with ranks.loading(self.how.call), contextlib.ExitStack() as opened:
            mine = [open_part(path, save, each, opened) for each, path in paths.items()]
            nbytes = ranks.connect(mine, name, nothing_to_read(self.how.options))
            image = opened.enter_context(Image(nbytes, name))
            with CallHandle(self.how.handle, name) as handle:
                ranks.fill(image, handle.get)
                return load_archive(image, self.how, handle, ranks)


def whole_saves(ranks: PartRanks, drives: OwnDrives, call: LongCall) -> list[Save]:
    """Those that can be restored, the oldest first; the same on all ranks."""
    ranks.listen(call)
    with ranks.telling():
        return ranks.survey(drives).whole()
