"""The identity of a server's keys and values: weights and adapters by their bytes, and settings.

A server names a block by the tokens in it. The same name stands for other keys and values where the
files at a path were replaced (fine-tuning in place, half a download, an adapter trained again), or
where the bytes are laid out differently. Such a block, found, would give wrong tokens without an
error. So blocks are found only with the files (`weights_digest`) and settings they were stored
with. If these cannot be identified, blocks are not kept beyond the process.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nvmeio._formats.weights_digest import HOWS, ChangingError, look_at
from nvmeio._kv_blocks.store import DIRECTORY
from nvmeio._storage.durable import make_directory
from nvmeio._storage.untrusted import make_private_directory
from nvmeio.errors import TransferError

logger = logging.getLogger("nvmeio")

_KNOWN = "weights.json"
# When this process's server began to load nvmeio's plugins, which is before it loads weights.
_began: list[float] = []

# Counts in every identity: raised when nvmeio itself lays out or names blocks in another way.
FORMAT = 1


def server_begins() -> None:
    """Note that the server is about to load its weights; called by nvmeio's plugin."""
    if not _began:
        _began.append(time.time())


class ServedModel(NamedTuple):
    """A model that computes keys and values, by a path or a name on the hub.

    `revision` None is the hub's main one, `cache` None the hub's default place. `is_revision_known`
    tells whether the server said which it serves, `is_made_up` whether it has no weights of files.
    `configuration` is the file by which the hub's cache finds the others.
    """

    name: str
    revision: str | None = None
    cache: str | None = None
    is_revision_known: bool = True
    is_made_up: bool = False
    configuration: str = "config.json"


class ServedAdapters(NamedTuple):
    """The LoRA adapters that requests may name.

    `paths` are those that the server names, on disk or on the hub. `why_unknown` says why requests
    may name others whose blocks have the same names after a restart; None: they cannot.
    """

    paths: Sequence[str] = ()
    why_unknown: str | None = None


class WeightOptions(NamedTuple):
    """The user's options about weights and adapters.

    `weights` is the place of their files, None asks the server; `weights_id` a name of the user's
    own, in place of looking at weights and adapters; `adapters` lists the places of all adapters,
    None asks the server; `fingerprint` is what `weights_digest.look_at` takes.
    """

    weights: str | None = None
    weights_id: str | None = None
    adapters: Sequence[str] | None = None
    fingerprint: Any = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WeightOptions:
        """The options of a configuration; ValueError if one of them makes no sense."""
        names = [name for name in cls._fields if given.get(name) is not None]
        options = cls(**{name: given[name] for name in names})
        if options.fingerprint not in HOWS:
            raise ValueError(
                f'"fingerprint" must be one of {", ".join(HOWS)}, not {options.fingerprint!r}'
            )
        for name in ("weights", "weights_id"):
            value = getattr(options, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f'"{name}" must be a text, not {value!r}')
        adapters: Any = options.adapters
        if adapters is not None and (
            not isinstance(adapters, (list, tuple))
            or not all(isinstance(path, str) and path for path in adapters)
        ):
            raise ValueError(
                f'"adapters" must be a list of the adapters\' directories, not {adapters!r}'
            )
        return options


class Untold(Exception):
    """The served weights are not known; says why."""


def identity_of(
    models: Sequence[ServedModel],
    adapters: ServedAdapters,
    options: WeightOptions,
    settings: Mapping[str, Any],
    directory: str,
) -> str | None:
    """A text that identifies blocks of these models; None, and a warning, if nobody can tell.

    `models` are the model and those that draft for it. `settings` is everything else that gives the
    bytes of a block, or its name, their meaning. `directory` is the store's, which remembers what
    files were like.
    """
    try:
        found: list[Any]
        if options.weights_id is not None:
            found = ["named", options.weights_id]
        else:
            if options.weights is not None:
                models = [ServedModel(options.weights)]
            found = [_looked_at(model, options, directory) for model in models]
        trained = [
            _looked_at(ServedModel(path, configuration="adapter_config.json"), options, directory)
            for path in sorted(set(_adapters_to_look_at(adapters, options)))
        ]
    except Untold as why:
        logger.warning(
            "KV blocks are of use to this process only, and not after a restart: %s. To keep them, "
            'say where the files are ("weights": "DIRECTORY", "adapters": ["DIRECTORY", ...] with '
            'all adapters), or give each version of weights and adapters a name: "weights_id": '
            '"NAME"',
            why,
        )
        return None
    return json.dumps([FORMAT, found, trained, dict(settings)], default=str, sort_keys=True)


def _adapters_to_look_at(adapters: ServedAdapters, options: WeightOptions) -> Sequence[str]:
    if options.adapters is not None:
        return [*adapters.paths, *options.adapters]
    if options.weights_id is not None:
        return []
    if adapters.why_unknown is not None:
        raise Untold(adapters.why_unknown)
    return adapters.paths


def _looked_at(model: ServedModel, options: WeightOptions, directory: str) -> str:
    if model.is_made_up:
        raise Untold("its weights are made up (--load-format dummy)")
    path = _path_of(model)
    began = time.monotonic()
    try:
        make_directory(directory)
        make_private_directory(Path(directory) / DIRECTORY)
        found = look_at(path, options.fingerprint, Path(directory) / DIRECTORY / _KNOWN)
    except (OSError, TransferError, ChangingError) as failed:
        raise Untold(f"the weights of {model.name} cannot be identified: {failed}") from failed
    if _began and found.changed > _began[0]:
        raise Untold(
            f"{path} was written to after this server began, so it is unknown what it loaded"
        )
    logger.info(
        "KV blocks are kept for the weights %s in %s (%d files, %d bytes, %s, %.1f s)",
        *(found.digest, path, found.files, found.nbytes, found.how, time.monotonic() - began),
    )
    return f"{found.how} {found.digest}"


def _path_of(model: ServedModel) -> str:
    if os.path.exists(model.name):
        return model.name
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        config = hub.try_to_load_from_cache(
            model.name, model.configuration, cache_dir=model.cache, revision=model.revision
        )
    except (ImportError, ValueError) as failed:  # of names that are not a repository's
        raise Untold(f"there are no files of {model.name} here: {failed}") from failed
    if not isinstance(config, str):
        raise Untold(f"there are no files of {model.name} here")
    path = os.path.dirname(config)
    others = [each.name for each in Path(path).parent.iterdir() if each.name != Path(path).name]
    if others and not model.is_revision_known:
        raise Untold(
            f"the hub's cache has {len(others) + 1} revisions of {model.name}, and the server does "
            "not say which it serves"
        )
    return path
