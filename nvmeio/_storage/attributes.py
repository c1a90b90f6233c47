"""Who may do what with a file that takes the place of another: owner, mode, ACL, other attributes.

A file that is replaced by another one loses what the old one had, unless it is carried over. In no
case does anybody get more than before: of what cannot be carried over, the narrower is taken.

Source: man 5 acl (the mask stands where the mode has the group's permissions), man 7 xattr,
linux/posix_acl_xattr.h.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct

_ACL = "system.posix_acl_access"
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, id
_GROUP_OBJ = 0x04

# What the kernel and its security modules keep for themselves, of this file and no other.
_NOT_OURS = ("security.capability", "security.evm", "security.ima", "trusted.overlay.", "btrfs.")


def take_over(fd: int, old: str | os.PathLike[str]) -> None:
    """Give an open file what another one has, as far as this process may."""
    facts, mine = os.stat(old), os.fstat(fd)
    mode = stat.S_IMODE(facts.st_mode)
    # Each alone: a member of the group may give a file to it, though not to another user.
    for owner, group in ((-1, facts.st_gid), (facts.st_uid, -1)):
        if (owner, group) not in ((-1, mine.st_gid), (mine.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.fchown(fd, owner, group)
    mine = os.fstat(fd)
    if (mine.st_uid, mine.st_gid) != (facts.st_uid, facts.st_gid):
        mode &= 0o777  # set-user-ID of somebody else
    theirs = _attributes(old)
    acl = theirs.pop(_ACL, None)
    if acl is None:
        _remove(fd, _ACL)  # what the directory's default gave it
    elif not _set(fd, _ACL, acl):
        mode = mode & ~0o070 | (_group_of(acl) << 3 & mode)
    if mine.st_gid != facts.st_gid:
        mode &= ~0o070 | (mode & 0o007) << 3  # the permissions were another group's
    with contextlib.suppress(OSError):
        os.fchmod(fd, mode)
    for name in _attributes(fd).keys() - theirs.keys() - {_ACL}:
        _remove(fd, name)
    for name, value in theirs.items():
        _set(fd, name, value)


def _attributes(file: int | str | os.PathLike[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(file):
            if not name.startswith(_NOT_OURS):
                with contextlib.suppress(OSError):
                    found[name] = os.getxattr(file, name)
    return found


def _set(fd: int, name: str, value: bytes) -> bool:
    try:
        os.setxattr(fd, name, value)
    except OSError:
        return False
    return True


def _remove(fd: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.removexattr(fd, name)


def _group_of(acl: bytes) -> int:
    """What an ACL grants the owning group; nothing where that cannot be told."""
    if (len(acl) - _ACL_HEADER.size) % _ACL_ENTRY.size:
        return 0
    for tag, permissions, _ in _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER.size :]):
        if tag == _GROUP_OBJ:
            return int(permissions) & 0o7
    return 0
