"""The model that all rows use, written on first demand."""

from __future__ import annotations

from pathlib import Path

from _session import Session

from nvmeio.cli.measure.worker import Worker

NAME = "streaming"
PASSES = 4


def streaming(session: Session) -> tuple[Worker, Path] | None:
    """nvmeio's worker and the model's directory; None where they cannot be had (which is said)."""
    worker = session.worker(NAME)
    directory = session.directory / "model"
    if worker is None:
        return None
    if not directory.exists() and not session.attempt(
        NAME, worker, "write_model", directory=str(directory), nbytes=session.size
    ):
        return None
    return worker, directory


def weights_file(directory: Path) -> Path:
    return directory / "model.safetensors"
