"""Models by their name on the Hugging Face hub: its cache, and downloads where they are allowed.

huggingface_hub is imported by the functions here, never by this module. It decides what is allowed
(``HF_HUB_OFFLINE``), where the cache is (``HF_HOME``) and who asks (``HF_TOKEN``).
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
from pathlib import Path
from typing import Any

from nvmeio._formats import packed_index
from nvmeio._formats.safetensors import shards
from nvmeio.errors import BackendUnavailableError

# As huggingface_hub's `validate_repo_id` takes them; the oldest have no owner ("gpt2").
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Small, and not in every repository: of generation, and of `nvmeio generate`'s tokenizer.
_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)


def directory_of(given: str | os.PathLike[str], revision: str | None = None) -> str:
    """The directory of a model: `given` itself, or where the hub's cache has that name.

    Args:
        given: A directory, or "owner/name" of a repository. A directory of that name comes first.
        revision: Branch, tag or commit of the repository; by default its main branch.

    Returns:
        A directory with the configuration and all weights in safetensors files.

    Raises:
        FileNotFoundError: There is neither such a directory nor such a repository; or it, or its
            safetensors files, are not in the cache and cannot be downloaded. Says which.
        BackendUnavailableError: It is a name, and huggingface_hub is not installed.
        ValueError: `revision` is given with a directory.
    """
    name = os.fspath(given)
    if os.path.isdir(name):
        if revision is not None:
            raise ValueError(f"revision is for the hub, and {name} is a directory: leave it out")
        return name
    if os.path.exists(name) or not isinstance(given, str) or not _NAME.fullmatch(name):
        what = "is not a directory" if os.path.exists(name) else "does not exist"
        raise FileNotFoundError(
            f"{name} {what}{_near(name)}: name a directory that save_pretrained or nvmeio pack "
            'wrote, or a repository on the hub as "owner/name"'
        )
    hub = _require(name)
    _check_answers(hub, name, revision)
    config = _download(hub, name, _CONFIG, revision)
    if config is None:
        raise FileNotFoundError(
            f"{name} is not a directory here{_near(name)}, and the repository of that name on the "
            f"hub has no {_CONFIG}"
        )
    found = Path(config).parent
    commit = found.name  # the cache has a directory a commit: all files are of the same one
    whole = (_WEIGHTS, packed_index.QUANTISED_NAME)
    held = next((file for file in whole if _download(hub, name, file, commit, needed=False)), None)
    weights = [held or _WEIGHTS]
    if held is None and _download(hub, name, _INDEX, commit) is not None:
        weights = sorted(str(p.relative_to(found)) for p in shards.read_index(found / _INDEX))
    for file in weights:
        if _download(hub, name, file, commit) is None:
            raise FileNotFoundError(
                f"{name} on the hub (commit {commit}) has no {file}: nvmeio streams safetensors "
                "files. Load it once with transformers, and save it with save_pretrained(directory)"
            )
    for file in _BESIDE:
        _download(hub, name, file, commit, needed=False)
    return str(found)


def _near(name: str) -> str:
    """A directory here whose name looks like it, in words; "" where there is none."""
    parent, last = os.path.split(name.rstrip("/"))
    try:
        beside = [entry.name for entry in os.scandir(parent or ".") if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(last, beside, 1)
    return f" (there is {os.path.join(parent, close[0])})" if close else ""


def _require(name: str) -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
        for part in ("constants", "errors"):  # no attributes of it before somebody imports them
            importlib.import_module(f"huggingface_hub.{part}")
        return hub
    except ImportError as failed:
        raise BackendUnavailableError(
            f"{name} is not a directory here{_near(name)}; as a name on the hub it needs "
            "huggingface_hub",
            attempts=[("huggingface_hub", str(failed))],
            remedy='pip install "nvmeio[transformers]", or name a directory',
        ) from failed


def _check_answers(hub: Any, name: str, revision: str | None) -> None:
    """Ask the hub once for files outside its cache: huggingface_hub asks six times, for 30 s.

    FileNotFoundError if it does not answer.
    """
    constants = hub.constants
    cached = hub.try_to_load_from_cache(name, _CONFIG, revision=revision)
    if constants.HF_HUB_OFFLINE or cached is not None:
        return
    try:
        url = hub.hf_hub_url(name, _CONFIG, revision=revision)
        hub.get_session().head(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as failed:  # of requests or httpx
        raise FileNotFoundError(
            f"{name} is not a directory here{_near(name)}; a repository of that name is not in the "
            f"hub's cache ({constants.HF_HUB_CACHE}), and the hub ({constants.ENDPOINT}) does not "
            f"answer: {failed}"
        ) from failed


def _download(
    hub: Any, name: str, file: str, revision: str | None, needed: bool = True
) -> str | None:
    """The path of a file in the cache, downloaded if it has to be; None if there is none."""
    errors = hub.errors
    if revision is not None and _COMMIT.fullmatch(revision):
        cached = hub.try_to_load_from_cache(name, file, revision=revision)
        if cached is not None:  # its path, or a note that the repository lacks it
            return cached if isinstance(cached, str) else None
    try:
        path: str = hub.hf_hub_download(name, file, revision=revision)
        return path
    except errors.LocalEntryNotFoundError as missing:  # offline, or the hub does not answer
        if not needed:
            return None
        raise FileNotFoundError(
            f"{name} is not a directory here{_near(name)}; {file} of the repository of that name "
            f"is not in the hub's cache ({hub.constants.HF_HUB_CACHE}) and was not downloaded: "
            f"{missing}"
        ) from missing
    except errors.EntryNotFoundError:
        return None
    except errors.RepositoryNotFoundError as missing:  # or one that this user may not read
        raise FileNotFoundError(
            f"{name} is not a directory here{_near(name)}, and no repository on the hub that you "
            "may "
            f"read: {missing}"
        ) from missing
    except errors.RevisionNotFoundError as missing:
        raise FileNotFoundError(f"{name} on the hub has no revision {revision!r}") from missing
