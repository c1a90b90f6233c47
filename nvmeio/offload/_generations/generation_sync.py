"""Generations of state that survive a power cut: data first, then the word that it is there."""

from __future__ import annotations

import contextlib
import errno

from nvmeio._io.drives import DriveHandles
from nvmeio._storage.durable import sync_data
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, TransferError
from nvmeio.files import File
from nvmeio.offload._generations import manifests
from nvmeio.offload._generations.manifests import Manifest
from nvmeio.offload._generations.rank_steps import DurableSteps
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._swap_files.swap_dirs import SwapDirs


class GenerationSync:
    """Makes one generation after the other durable, beside what comes next.

    Args:
        directory: Of the files; locked by this process.
        files: The files.
        handles: For fsync.
        ranks: What several ranks tell each other of their generations.
        helper: The thread that does it; None where there is none: it is done at once.
    """

    def __init__(
        self,
        directory: SwapDirs,
        files: StateFiles,
        handles: DriveHandles,
        ranks: DurableSteps | None,
        helper: OwnerThread | None,
    ) -> None:
        self._directory = directory
        self._files = files
        self._handles = handles
        self._ranks = ranks
        self._helper = helper
        self._begun: Manifest | None = None  # until the helper takes it up
        self._lost: tuple[int, BaseException] | None = None  # what cannot be trusted, and why
        self._unmarked: Manifest | None = None  # durable, but for the mark
        self._names_to_sync = 2  # the first two generations make new files

    def start(self, manifest: Manifest) -> None:
        """Begin to make a generation durable; the one before is settled."""
        self._begun = manifest
        if self._helper is None:
            self._take_up()
        else:
            self._helper.post(self._take_up)

    def _take_up(self) -> None:
        manifest, self._begun = self._begun, None
        if manifest is not None:
            self._sync(manifest)

    def _sync(self, manifest: Manifest) -> None:
        """Data first, then the manifest: it must not promise what a power cut could take."""
        try:
            for file in self._files.opened:
                self._sync_file(file)
            if self._names_to_sync:
                self._directory.sync_names()
                self._names_to_sync -= 1
        except BaseException as failed:
            self._lost = manifest.generation, failed
            if self._ranks is not None:
                self._ranks.lose(manifest.generation, str(failed))
            with contextlib.suppress(TransferError):  # who resumes must not rely on it
                manifests.drop(self._directory.path, manifest.generation)
            return
        try:
            if not manifest.durable:
                manifests.mark_durable(self._directory.path, manifest)
            self._tell(manifest)
        except BaseException:
            self._unmarked = manifest  # `settle` tries again, and tells

    def _tell(self, manifest: Manifest) -> None:
        if self._ranks is not None:
            self._ranks.tell(manifest.generation)

    def _sync_file(self, file: File) -> None:
        try:
            self._handles.sync_fsync(file, data_only=True)
        except ClosedError:  # the handle's owner closed it first: what was written is there
            sync_data(file)

    def settle(self) -> None:
        """Wait until the generation that was begun is durable.

        Raises:
            TransferError: It is not. Where its data was lost, every further call raises: the
                kernel reports that once, and forgets what it could not write (man 2 fsync).
        """
        if self._helper is not None:
            self._helper.drain()
        self._take_up()  # if the helper has ended
        if self._lost is not None:
            generation, why = self._lost
            raise TransferError(
                getattr(why, "errno", None) or errno.EIO,
                operation="fsync",
                path=self._directory.path,
                detail=f"generation {generation} may be lost ({why}): load a "
                "checkpoint, or make the optimizer anew with resume=True, which goes on from the "
                "last step that is durable",
            ) from why
        if self._unmarked is not None:
            manifests.store(self._directory.path, self._unmarked)
            manifests.mark_durable(self._directory.path, self._unmarked)
            self._tell(self._unmarked)
            self._unmarked = None
