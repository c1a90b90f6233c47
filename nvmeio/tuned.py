"""Settings that `nvmeio tune --save` found, one per file system.

They lie in ``$XDG_CONFIG_HOME/nvmeio/tuned.json`` (``~/.config`` by default); if a user has none
for a file system, those of ``$XDG_CONFIG_DIRS`` (``/etc/xdg``) count, so that an administrator can
tune a machine once for everybody. A file system is known by its UUID, so a setting outlives a
remount and a change of device names.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import stat
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvmeio import _checks
from nvmeio._files.system import find_mount
from nvmeio._storage.locks import unlock
from nvmeio._storage.replace import replace_file
from nvmeio._storage.untrusted import SETTINGS_BYTES, read_small
from nvmeio._threads.closing import opened
from nvmeio.engines.base import Options

__all__ = ["Tuned", "file_system_key", "find", "places", "save"]

logger = logging.getLogger("nvmeio")
_told: set[str] = set()

FORMAT = 1
# linux/fs.h: FS_IOC_GETFSUUID, _IOR(0x15, 0, struct fsuuid2), since Linux 6.9; struct fsuuid2 is a
# length and 16 bytes.
_GET_UUID = 0x80111500
_UUID_LINKS = Path("/dev/disk/by-uuid")


@dataclass(frozen=True)
class Tuned:
    """A stored setting and its measured rates.

    Attributes:
        aio: The parameters, for ``AioHandle(*aio)`` or ``AioHandle(**aio._asdict())``.
        directory: The directory that was measured.
        tuned_at: The time of the measurement, in ISO 8601 with the time zone.
        nvmeio: The version that measured.
        read_gb_per_s: GB/s (10**9 bytes) with this setting; None where reads were not measured.
        write_gb_per_s: The same for writes.
        default_read_gb_per_s: GB/s with the default setting, measured beside.
        default_write_gb_per_s: The same for writes.
    """

    aio: Options
    directory: str = ""
    tuned_at: str = ""
    nvmeio: str = ""
    read_gb_per_s: float | None = None
    write_gb_per_s: float | None = None
    default_read_gb_per_s: float | None = None
    default_write_gb_per_s: float | None = None


def places() -> list[Path]:
    """The files that may hold settings, the one that `save` writes first."""
    # A relative path in these variables is to be ignored (XDG Base Directory Specification).
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # ~ stays as it is where neither HOME nor the user is known, as in containers.
    bases = [home if os.path.isabs(home) else os.path.expanduser("~/.config")]
    bases += (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    return [Path(base) / "nvmeio" / "tuned.json" for base in bases if os.path.isabs(base)]


def find(path: str | os.PathLike[str]) -> Tuned | None:
    """The setting stored for the file system of a path; None where there is none.

    Args:
        path: A file or directory. A path that does not exist yet counts as lying in its nearest
            parent that does.

    Raises:
        ValueError: A file of settings is damaged; says which, and what is wrong with it.
        OSError: One cannot be read, is not a regular file, or is larger than settings are; but for
            one that this user may not read, which counts as missing (the log says so, once, at
            INFO).
    """
    key: str | None = None
    for file in places():
        try:
            stored = _load(file)
        except PermissionError as refused:
            if refused.filename not in _told:  # another user's: HOME is often root's
                _told.add(refused.filename)
                logger.info("no settings are taken from %s: %s", file, refused.strerror)
            continue
        if not stored:
            continue
        key = key or file_system_key(path)
        if key in stored:
            return _parse(stored[key], file)
    return None


def save(path: str | os.PathLike[str], tuned: Tuned) -> Path:
    """Store a setting for the file system of a path, in the user's own file.

    Returns:
        The file, which is replaced whole: readers see the old contents or the new.

    Raises:
        ValueError: The file holds something else; it is left as it is.
        OSError: It cannot be written.
    """
    file = places()[0]
    key = file_system_key(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Two tunes may end at the same time, on different file systems.
    with opened(file.parent, os.O_RDONLY | os.O_DIRECTORY) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            stored = {**_load(file), key: {**vars(tuned), "aio": tuned.aio._asdict()}}
            text = json.dumps({"format": FORMAT, "file_systems": stored}, indent=2) + "\n"
            replace_file(file, [memoryview(text.encode())])
        finally:
            unlock(lock)
    return file


def file_system_key(path: str | os.PathLike[str]) -> str:
    """The name of a file system: "uuid:...", or how it is mounted where it has no UUID."""
    directory = _existing_directory(Path(path))
    found = _uuid_from_kernel(directory) or _uuid_from_links(directory)
    if found:
        return f"uuid:{found}"
    with suppress(OSError):
        mount = find_mount(directory)
        if mount is not None:
            return f"mount:{mount.file_system}:{mount.source}:{mount.mount_point}"
    return f"device:{directory.stat().st_dev}"


def _existing_directory(path: Path) -> Path:
    for candidate in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            if stat.S_ISDIR(candidate.stat().st_mode):
                return candidate
    return Path("/")


def _uuid_from_kernel(directory: Path) -> str | None:
    answer = bytearray(17)
    # An older kernel, or a file system without one, leaves it empty.
    with suppress(OSError), opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        fcntl.ioctl(descriptor, _GET_UUID, answer)
    length, value = struct.unpack("B16s", answer)
    return str(uuid.UUID(bytes=value)) if length == 16 and any(value) else None


def _uuid_from_links(directory: Path) -> str | None:
    device = directory.stat().st_dev
    with suppress(OSError):
        for link in _UUID_LINKS.iterdir():
            if link.stat().st_rdev == device:
                return link.name
    return None


# The file


def _load(file: Path) -> dict[str, Any]:
    """The settings in a file by file system; nothing if there is no such file."""
    try:
        text = read_small(file, SETTINGS_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    stored = whole.get("file_systems") if isinstance(whole, dict) else None
    if not isinstance(stored, dict) or whole.get("format") != FORMAT:
        raise _damaged(file, f'no object with "format": {FORMAT} and "file_systems"')
    return stored


def _parse(entry: Any, file: Path) -> Tuned:
    aio = entry.get("aio") if isinstance(entry, dict) else None
    if not isinstance(aio, Mapping) or set(aio) != set(Options._fields):
        raise _damaged(file, f'an "aio" with exactly {", ".join(Options._fields)} is missing')
    settings: dict[str, Any] = {}
    for name, default in Options()._asdict().items():
        check = _checks.switch if isinstance(default, bool) else _checks.integer
        try:
            settings[name] = check(name, aio[name])
        except TypeError as wrong:
            raise _damaged(file, str(wrong)) from wrong
    known = {field.name for field in dataclasses.fields(Tuned)} - {"aio"}
    return Tuned(Options(**settings), **{name: entry[name] for name in known if name in entry})


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file} is not a file of tuned settings: {what}. Delete it, then run "
        "`nvmeio tune --save` again"
    )
