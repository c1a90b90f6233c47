"""What a server's keys and values are of: weights that are told by their contents, and settings.

A server names a block by the tokens in it. With other weights at the same path, by fine-tuning in
place or half a download, the same names stand for other keys and values: found, they would give
wrong tokens without an error. So what is found depends on the weights' files too
(`weights_digest`), and where nobody can tell what is served, nothing is kept beyond the process.
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

WEIGHTS = ("weights", "weights_id", "fingerprint")


def server_begins() -> None:
    """Note that the server is about to load its weights; called by nvmeio's plugin."""
    if not _began:
        _began.append(time.time())


class ServedModel(NamedTuple):
    """A model that computes keys and values, by a path or a name on the hub.

    `revision` None is the hub's main one, `cache` None the hub's default place. `is_revision_known`
    tells whether the server said which it serves, `is_made_up` whether it has no weights of files,
    `has_adapters` whether requests may name adapters, whose files nobody looks at.
    """

    name: str
    revision: str | None = None
    cache: str | None = None
    is_revision_known: bool = True
    is_made_up: bool = False
    has_adapters: bool = False


class WeightOptions(NamedTuple):
    """The user's options about the weights.

    `weights` is where their files are, None asks the server; `weights_id` a name of the user's own,
    in place of looking at them; `fingerprint` as `weights_digest.look_at` takes it.
    """

    weights: str | None = None
    weights_id: str | None = None
    fingerprint: Any = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WeightOptions:
        """The options of a configuration; ValueError if one of them makes no sense."""
        options = cls(**{name: given[name] for name in WEIGHTS if given.get(name) is not None})
        if options.fingerprint not in HOWS:
            raise ValueError(
                f'"fingerprint" must be one of {", ".join(HOWS)}, not {options.fingerprint!r}'
            )
        for name in ("weights", "weights_id"):
            value = getattr(options, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f'"{name}" must be a text, not {value!r}')
        return options


class Untold(Exception):
    """The served weights are not known; says why."""


def identity_of(
    models: Sequence[ServedModel], options: WeightOptions, settings: Sequence[Any], directory: str
) -> str | None:
    """A text that identifies blocks of these models; None where nobody can tell, which is logged.

    `models` are the model and those that draft for it; `settings` what else makes keys and values,
    or names of blocks, differ; `directory` the store's, which remembers what files were like.
    """
    try:
        if options.weights_id is not None:
            found: list[Any] = ["named", options.weights_id]
        else:
            if any(model.has_adapters for model in models):
                raise Untold("LoRA adapters are served, which are told by their names only")
            if options.weights is not None:
                models = [ServedModel(options.weights)]
            found = [_looked_at(model, options, directory) for model in models]
    except Untold as why:
        logger.warning(
            "KV blocks are of use to this process only, and not after a restart: %s. To keep them "
            'say "weights_id": "NAME" with another name for each version of the weights and of '
            'adapters, or, without adapters, "weights": "DIRECTORY" where the files are',
            why,
        )
        return None
    return json.dumps([found, list(settings)], default=str)


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
            model.name, "config.json", cache_dir=model.cache, revision=model.revision
        )
    except (ImportError, ValueError) as failed:  # of names that are no repository's
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
