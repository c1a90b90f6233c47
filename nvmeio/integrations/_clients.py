"""Clients that are imported late: which package is in use, and classes that derive from theirs.

A class of ours that inherits from a client's is made when it is asked for: the client is imported
then, and by its user's choice.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nvmeio.errors import BackendUnavailableError


def client(module: str, *names: str, wanted: str, remedy: str) -> Any:
    """A client's module, or its objects of these names: one as it is, several as a list.

    `wanted` is what nvmeio does there, `remedy` how to install it, both for the error if it is not
    installed or not of the kind that is known here.
    """
    try:
        found = importlib.import_module(module)
        members = [getattr(found, name) for name in names]
    except (ImportError, AttributeError) as failed:
        attempts = [(module, str(failed))]
        raise BackendUnavailableError(wanted, attempts=attempts, remedy=remedy) from failed
    return members if len(members) > 1 else (members or [found])[0]


def resolved(name: str) -> Any:
    """The object of a dotted name; None if there is none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def joined(name: str, ours: type, *theirs: type, doc: str | None = None, **attributes: Any) -> Any:
    """Derive a class of ours from a client's, under the module of ours."""
    about = {"__doc__": doc or ours.__doc__, "__module__": ours.__module__, **attributes}
    return type(name, (ours, *theirs), about)


def on_demand(module: str, name: str, make: Callable[[], Any]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that makes one class when it is first asked for.

    If the class is in the module by then, or is put there by `make`, that one is taken.
    """

    def found(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {module!r} has no attribute {asked!r}")
        return vars(sys.modules[module]).setdefault(name, make())

    return found


# The modules in which Lightning's two packages keep the Trainer and its callbacks.
LIGHTNING = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def lightning_modules(places: Mapping[str, str]) -> list[str]:
    """The module of each Lightning package that is in use, else of those that are installed."""
    names = [name for name in places if name in sys.modules]
    names = names or [name for name in places if importlib.util.find_spec(name) is not None]
    if not names:
        raise BackendUnavailableError(
            "there is no Lightning to plug into",
            attempts=[(name, "not installed") for name in places],
            remedy="pip install lightning",
        )
    return [places[name] for name in names]
