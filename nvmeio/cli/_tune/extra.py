"""The libraries that `nvmeio tune` stands on: optuna searches, plotly draws."""

from __future__ import annotations

import importlib

from nvmeio.errors import BackendUnavailableError


def require_libraries() -> None:
    """Makes sure that they are installed, before anything is measured.

    Raises:
        BackendUnavailableError: One is not; says how to install it.
    """
    missing = []
    for name in ("optuna", "plotly"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append((name, str(error)))
    if missing:
        raise BackendUnavailableError(
            "nvmeio tune searches with optuna and draws with plotly",
            attempts=missing,
            remedy="pip install 'nvmeio[tune]'",
        )
