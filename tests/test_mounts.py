"""Mounts: what the kernel tells of them."""

from __future__ import annotations

import os

from nvmeio._files import system


def test_mountinfo_is_read_as_the_manual_has_it() -> None:
    text = (
        r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
        "\nnonsense\n"
        "40 36 0:40 / /s rw - tmpfs  rw\n"
    )
    assert system.parse_mountinfo(text) == [
        system.Mount(36, "98:0", "/mnt 2", "ext3", "/dev/root"),
        system.Mount(40, "0:40", "/s", "tmpfs", ""),
    ]


def test_a_device_tells_its_file_system() -> None:
    assert system.file_system_of(os.stat("/proc").st_dev) == "proc"
    assert system.file_system_of(os.makedev(4095, 99999)) == ""
