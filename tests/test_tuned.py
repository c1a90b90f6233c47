"""Settings stored per file system: found again, replaced whole, and never half believed."""

import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import nvmeio
from nvmeio import tuned
from nvmeio._storage.replace import replace_file
from nvmeio.engines.base import Options

FOUND = Options(2 << 20, 16, True, False, 2)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "shared"))
    return tmp_path / "config/nvmeio/tuned.json"


def test_nothing_is_stored_at_first(tmp_path: Path) -> None:
    assert tuned.find(tmp_path) is None


def test_a_stored_setting_is_found_from_any_path_of_its_file_system(
    tmp_path: Path, config: Path
) -> None:
    stored = tuned.Tuned(FOUND, str(tmp_path), "2026-11-21T10:00:00+00:00", "0.1.0", 3.5, 5.0)
    assert tuned.save(tmp_path, stored) == config
    for path in (tmp_path, tmp_path / "not" / "there" / "yet.bin", config):
        assert tuned.find(path) == stored


def test_the_handle_takes_the_stored_setting(tmp_path: Path) -> None:
    tuned.save(tmp_path, tuned.Tuned(FOUND))
    with nvmeio.AioHandle.tuned(tmp_path / "weights.bin", engine="threads") as handle:
        assert handle.engine == "threads"
        assert handle.get_block_size() == FOUND.block_size
        assert handle.get_queue_depth() == FOUND.queue_depth
        assert handle.get_single_submit() is FOUND.single_submit
        assert handle.get_overlap_events() is FOUND.overlap_events
        assert handle.get_intra_op_parallelism() == FOUND.intra_op_parallelism


def test_the_handle_takes_the_defaults_where_nothing_is_stored(tmp_path: Path) -> None:
    with nvmeio.AioHandle.tuned(tmp_path) as handle, nvmeio.AioHandle() as default:
        assert handle.get_queue_depth() == default.get_queue_depth()
        assert handle.get_block_size() == default.get_block_size()


def test_a_forked_child_does_not_keep_the_next_save_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked by another thread during a save, it had the lock for as long as it lived."""
    waiting, go = os.pipe()
    children: list[int] = []

    def fork_meanwhile(*arguments: Any) -> None:
        children.append(os.fork())
        if not children[0]:
            os.close(go)
            os.read(waiting, 1)
            os._exit(0)
        replace_file(*arguments)

    monkeypatch.setattr(tuned, "replace_file", fork_meanwhile)
    try:
        lock = os.open(tuned.save(tmp_path, tuned.Tuned(FOUND)).parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
    finally:
        os.close(go)
        os.close(waiting)
        os.waitpid(children[0], 0)


def test_another_file_system_keeps_its_own_setting(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    tuned.save(tmp_path, tuned.Tuned(FOUND))
    assert tuned.find(memory) is None
    tuned.save(memory, tuned.Tuned(Options()))
    found = [tuned.find(tmp_path), tuned.find(memory)]
    assert [t.aio for t in found if t] == [FOUND, Options()]


def test_settings_for_all_users_count_where_a_user_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, aio in (("shared", FOUND), ("config", Options(queue_depth=7))):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / name))
        tuned.save(tmp_path, tuned.Tuned(aio))
    found = tuned.find(tmp_path)
    assert found is not None and found.aio.queue_depth == 7
    (tmp_path / "config/nvmeio/tuned.json").unlink()
    found = tuned.find(tmp_path)
    assert found is not None and found.aio == FOUND


def test_relative_config_directories_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """So says the XDG Base Directory Specification."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("XDG_CONFIG_DIRS", "there:/absolute")
    assert tuned.places() == [
        Path.home() / ".config/nvmeio/tuned.json",
        Path("/absolute/nvmeio/tuned.json"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[]", '"format": 1'),
        ('{"format": 2, "file_systems": {}}', '"format": 1'),
    ],
)
def test_a_damaged_file_is_an_error_and_is_left_alone(
    tmp_path: Path, config: Path, text: str, complaint: str
) -> None:
    config.parent.mkdir(parents=True)
    config.write_text(text)
    for use in (tuned.find, nvmeio.AioHandle.tuned, lambda p: tuned.save(p, tuned.Tuned(FOUND))):
        with pytest.raises(ValueError, match=complaint) as raised:
            use(tmp_path)
        assert str(config) in str(raised.value)
    assert config.read_text() == text


def test_a_switch_may_be_a_word(tmp_path: Path, config: Path) -> None:
    """As DeepNVMe's tuner prints them; "false" is true to Python."""
    config.parent.mkdir(parents=True)
    key = tuned.file_system_key(tmp_path)
    aio = {**Options()._asdict(), "single_submit": "True", "overlap_events": "false"}
    config.write_text(json.dumps({"format": 1, "file_systems": {key: {"aio": aio}}}))
    found = tuned.find(tmp_path)
    assert found is not None
    assert (found.aio.single_submit, found.aio.overlap_events) == (True, False)


@pytest.mark.parametrize(
    "aio",
    [
        None,
        {"block_size": 4096},
        {**Options()._asdict(), "queue_depth": "32"},
        {**Options()._asdict(), "single_submit": "no"},
        {**Options()._asdict(), "use_gds": False},
    ],
)
def test_a_setting_of_other_parameters_or_types_is_an_error(
    tmp_path: Path, config: Path, aio: object
) -> None:
    config.parent.mkdir(parents=True)
    key = tuned.file_system_key(tmp_path)
    config.write_text(json.dumps({"format": 1, "file_systems": {key: {"aio": aio}}}))
    with pytest.raises(ValueError, match="tuned settings"):
        tuned.find(tmp_path)


def test_saving_at_the_same_time_loses_nothing(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tunes may end at once; each knows a file system of its own."""
    me = threading.local()
    monkeypatch.setattr(tuned, "file_system_key", lambda path: f"uuid:{me.number}")

    def save_often(number: int) -> None:
        me.number = number
        for _ in range(20):
            tuned.save(tmp_path, tuned.Tuned(Options(queue_depth=number)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_often, (1, 2, 3, 4)))
    stored = json.loads(config.read_text())["file_systems"]
    assert {key: entry["aio"]["queue_depth"] for key, entry in stored.items()} == {
        f"uuid:{number}": number for number in (1, 2, 3, 4)
    }
    assert [path.name for path in config.parent.iterdir()] == ["tuned.json"]


def test_a_uuid_is_found_through_the_links_of_udev_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels before 6.9 do not answer FS_IOC_GETFSUUID."""
    device = next((p for p in Path("/dev").iterdir() if p.is_block_device()), None)
    if device is None:
        pytest.skip("there is no block device in /dev")
    (tmp_path / "0ff1-ce").symlink_to(device)
    monkeypatch.setattr(tuned, "_UUID_LINKS", tmp_path)
    monkeypatch.setattr(tuned, "_uuid_from_kernel", lambda directory: None)
    mounted = tmp_path.stat().st_dev == device.stat().st_rdev
    key = tuned.file_system_key(tmp_path)
    assert (key == "uuid:0ff1-ce") is mounted
    assert key.startswith(("uuid:", "mount:"))


def test_settings_that_this_user_may_not_read_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOME is root's, the user is not: no reason to refuse a checkpoint."""

    def refused(file: Path, *arguments: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refused)
    assert tuned.find(tmp_path) is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuned.places() == [Path("/etc/xdg/nvmeio/tuned.json")]
