"""`nvmeio report`: real directories on the real machine, made-up facts for what cannot be had."""

import dataclasses
import importlib.machinery
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from gds._support import compiled, real_library
from programs import run_program
from rich.console import Console
from typer.testing import CliRunner, Result

import nvmeio
from nvmeio import engines
from nvmeio.cli import app, report
from nvmeio.cli import report as report_module
from nvmeio.cli._terminal import binary_size
from nvmeio.cli.measure import machine
from nvmeio.cli.measure import machine as machine_module
from nvmeio.engines.cufile import driver
from nvmeio.engines.cufile import library as library_module
from nvmeio.errors import BackendUnavailableError
from nvmeio.files import DirectSupport, probe_direct

CONSOLE_SCRIPT = [sys.executable, "-c", "from nvmeio.cli import main; main()"]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> machine.Facts:
    """This machine's facts, in good health: each test spoils one of them."""
    real = machine.gather([tmp_path_factory.mktemp("looked-at")])
    here = dataclasses.replace(real.directories[0], direct=DirectSupport(True, 512, 4, ""))
    working = machine.EngineAttempt("libaio", True, "")
    return dataclasses.replace(
        real,
        directories=[here],
        engine=machine.EngineChoice("libaio", [working]),
        aio=machine.Aio("libaio", "/lib/libaio.so.1", "", 0, 65536),
        memory=machine.MemoryLimits(None, None, False, "madvise"),
        software=dataclasses.replace(real.software, cuda_available=False),
        cufile=machine.CuFile(None, "", "not in the usual places", False),
    )


def problems(facts: machine.Facts, **spoiled: object) -> list[report_module.Finding]:
    return list(report_module.find_problems(dataclasses.replace(facts, **spoiled)))


# The command


def test_json_on_stdout_agrees_with_the_kernel(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CONSOLE_SCRIPT, "report", "--json", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["software"]["nvmeio"] == nvmeio.__version__
    assert told["software"]["kernel"] == os.uname().release
    assert told["aio"]["max_nr"] == int(Path("/proc/sys/fs/aio-max-nr").read_text())
    assert told["engine"]["auto"] in ("libaio", "threads")
    (directory,) = told["directories"]
    assert directory["path"] == str(tmp_path.resolve())
    assert directory["direct"] == probe_direct(tmp_path)._asdict()
    assert 0 < directory["free_bytes"] < directory["total_bytes"]
    findmnt = ["findmnt", "--noheadings", "--output", "TARGET,FSTYPE", "--target", str(tmp_path)]
    try:
        mount = subprocess.run(findmnt, capture_output=True, text=True, check=True).stdout.split()
    except FileNotFoundError:
        pytest.skip("the mount could not be compared: findmnt (util-linux) is not installed")
    assert [directory["mount_point"], directory["file_system"]] == mount


def test_leaves_nothing_behind(tmp_path: Path) -> None:
    assert invoke("--dir", tmp_path).exit_code in (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_looks_at_the_current_directory_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (directory,) = json.loads(invoke("--json").stdout)["directories"]
    assert directory["path"] == str(tmp_path.resolve())


def test_takes_several_directories(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    told = json.loads(invoke("--json", "--dir", tmp_path / "a", "--dir", tmp_path / "b").stdout)
    assert [Path(d["path"]).name for d in told["directories"]] == ["a", "b"]


def test_status_is_1_where_direct_io_cannot_be_had(tmp_path: Path) -> None:
    memory_only = Path("/dev/shm")
    if not memory_only.is_dir() or not os.access(memory_only, os.W_OK):
        pytest.skip("there is no writable /dev/shm, the tmpfs that this test looks at")
    done = invoke("--dir", tmp_path, "--dir", memory_only)
    assert done.exit_code == 1
    assert "no direct I/O in /dev/shm" in done.stdout
    assert "df -h -t ext4" in done.stdout


def test_status_is_0_where_it_can(facts: machine.Facts) -> None:
    assert report.Report(facts, problems(facts)).exit_status == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_missing_directory_is_a_usage_error(tmp_path: Path, as_json: bool) -> None:
    done = invoke("--dir", tmp_path / "nowhere", *(["--json"] if as_json else []))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "does not exist" in unwrapped(done.stderr)


def test_file_for_a_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = invoke("--dir", tmp_path / "file")
    assert done.exit_code == 2
    assert "is not a directory; name the one it lies in" in unwrapped(done.stderr)


def test_directory_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    # Root may write anywhere, but not even root makes files in /proc.
    closed = Path("/proc") if os.geteuid() == 0 else tmp_path
    if closed == tmp_path:
        tmp_path.chmod(0o500)
    done = invoke("--dir", closed)
    assert done.exit_code == 2
    assert f"cannot make a file in {closed}" in unwrapped(done.stderr)


def test_unknown_option_is_a_usage_error() -> None:
    assert invoke("--directory", "x").exit_code == 2


def test_help_has_an_example() -> None:
    assert "nvmeio report --dir /mnt/nvme0 --dir /scratch" in unwrapped(invoke("--help").stdout)


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"nvmeio {nvmeio.__version__}\n")


def test_an_ascii_locale_still_gets_its_report(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CONSOLE_SCRIPT, "report", "--dir", str(tmp_path)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1)
    assert b"direct I/O" in done.stdout
    assert done.stderr == b""


def unwrapped(text: str) -> str:
    """Error and help panels without their frames and line breaks."""
    return " ".join(text.replace("│", " ").split())


# What is wrong, and its remedy


def test_nothing_is_wrong_with_a_healthy_machine(facts: machine.Facts) -> None:
    assert problems(facts) == []


def test_no_direct_io_is_an_error(facts: machine.Facts) -> None:
    refused = DirectSupport(False, 0, 0, "ramfs offers no direct I/O")
    directory = dataclasses.replace(facts.directories[0], direct=refused)
    (problem,) = problems(facts, directories=[directory])
    assert problem.severity == "error"
    assert directory.path in problem.what
    assert refused.reason in problem.what


def test_nearly_exhausted_aio_names_the_limit(facts: machine.Facts) -> None:
    (problem,) = problems(facts, aio=dataclasses.replace(facts.aio, nr=65000))
    assert problem.severity == "warning"
    assert "65000 of 65536" in problem.what
    assert problem.fix == "sudo sysctl -w fs.aio-max-nr=1048576"


def test_raising_aio_max_nr_raises_it(facts: machine.Facts) -> None:
    (problem,) = problems(facts, aio=dataclasses.replace(facts.aio, nr=1 << 21, max_nr=1 << 21))
    assert problem.fix == f"sudo sysctl -w fs.aio-max-nr={1 << 22}"


def test_exhausted_aio_is_one_error_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(engine: str, options: object) -> None:
        raise BackendUnavailableError(
            "the limit is reached", attempts=[("process 7", "fio")], remedy="raise it"
        )

    monkeypatch.setattr(engines, "start", exhausted)
    done = invoke("--dir", tmp_path, "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert told["engine"]["auto"] is None
    (problem,) = (p for p in told["problems"] if p["severity"] == "error" and "handle" in p["what"])
    assert problem["what"] == "no handle can be opened: the limit is reached (process 7: fio)"
    assert problem["fix"] == "raise it"


def test_aio_that_is_forbidden_is_a_warning(facts: machine.Facts) -> None:
    attempts = [
        machine.EngineAttempt("libaio", False, "io_setup: ENOSYS"),
        machine.EngineAttempt("threads", True, ""),
    ]
    (problem,) = problems(facts, engine=machine.EngineChoice("threads", attempts))
    assert problem.severity == "warning"
    assert "io_setup: ENOSYS" in problem.what
    assert "seccomp" in problem.fix


def test_missing_libaio_is_no_problem(facts: machine.Facts) -> None:
    assert problems(facts, aio=machine.Aio("syscalls", None, "not found", 0, 65536)) == []


def test_a_libaio_that_was_named_and_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    done = run_program(
        [*CONSOLE_SCRIPT, "report", "--json", "--dir", str(tmp_path)],
        env=os.environ | {"NVMEIO_LIBAIO": str(tmp_path / "libaio.so")},
        timeout=500,
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert (told["aio"]["library"], told["engine"]["auto"]) == (None, None)
    assert ("error", "unset NVMEIO_LIBAIO") in [(p["severity"], p["fix"]) for p in told["problems"]]


def test_huge_pages_that_are_off_are_a_warning(facts: machine.Facts) -> None:
    (problem,) = problems(facts, memory=dataclasses.replace(facts.memory, huge_pages="never"))
    assert problem.severity == "warning"
    assert problem.fix == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("hard", "fix"),
    [
        (None, "ulimit -l unlimited"),
        (1 << 30, "ulimit -l 1048576"),
        (8 << 20, 'echo "$USER - memlock unlimited" | sudo tee'),
    ],
)
def test_small_memlock_limit_is_a_note(facts: machine.Facts, hard: int | None, fix: str) -> None:
    (problem,) = problems(facts, memory=machine.MemoryLimits(8 << 20, hard, False, "madvise"))
    assert problem.severity == "note"
    assert "8 MiB" in problem.what
    assert problem.fix.startswith(fix)


def test_memlock_limit_does_not_bind_the_privileged(facts: machine.Facts) -> None:
    assert problems(facts, memory=machine.MemoryLimits(8 << 20, 8 << 20, True, "madvise")) == []


@pytest.mark.parametrize(
    ("cuda", "package"), [("12.8", "nvidia-cufile-cu12"), ("13.0", "nvidia-cufile")]
)
def test_missing_cufile_matters_beside_a_cuda_device(
    facts: machine.Facts, cuda: str, package: str
) -> None:
    software = dataclasses.replace(facts.software, cuda_available=True, torch_cuda=cuda)
    (problem,) = problems(facts, software=software)
    assert problem.fix == f"pip install {package}"


def test_gravest_problem_comes_first(facts: machine.Facts) -> None:
    refused = DirectSupport(False, 0, 0, "no")
    found = problems(
        facts,
        memory=machine.MemoryLimits(8 << 20, None, False, "never"),
        directories=[dataclasses.replace(facts.directories[0], direct=refused)],
    )
    assert [problem.severity for problem in found] == ["error", "warning", "note"]


# cuFile's whereabouts


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in ("NVMEIO_CUFILE", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(library_module, "linker_cache", lambda prefix: iter(()))
    monkeypatch.setattr(
        library_module, "_loaded", lambda: iter(())
    )  # by other tests of this process
    return monkeypatch


def cufile_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    library = directory / "libcufile.so.0"
    library.touch()
    return library


def test_named_cufile_is_taken(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    library = cufile_in(tmp_path / "mine")
    bare.setenv("NVMEIO_CUFILE", str(library))
    found = machine.find_cufile()
    assert (found.path, found.source) == (str(library), "NVMEIO_CUFILE")


def test_named_cufile_that_is_missing_is_not_replaced_by_another(
    tmp_path: Path, bare: pytest.MonkeyPatch, facts: machine.Facts
) -> None:
    cufile_in(tmp_path / "lib64")
    bare.setenv("CUDA_HOME", str(tmp_path))
    bare.setenv("NVMEIO_CUFILE", str(tmp_path / "gone.so"))
    found = machine.find_cufile()
    assert found.path is None
    assert "gone.so" in found.reason
    assert [problem.fix for problem in problems(facts, cufile=found)] == ["unset NVMEIO_CUFILE"]


def test_cufile_of_the_python_packages_comes_before_cuda_home(
    tmp_path: Path, bare: pytest.MonkeyPatch
) -> None:
    packaged = cufile_in(tmp_path / "site/nvidia/cufile/lib")
    cufile_in(tmp_path / "cuda/lib64")
    bare.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found_spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    found_spec.submodule_search_locations = [str(tmp_path / "site/nvidia")]
    bare.setattr(library_module.importlib.util, "find_spec", lambda name: found_spec)
    found = machine.find_cufile()
    assert (found.path, found.source) == (str(packaged), "nvidia/cufile/lib")


@pytest.mark.parametrize("below", ["lib64", "targets/x86_64-linux/lib"])
def test_cufile_is_found_in_cuda_path(tmp_path: Path, bare: pytest.MonkeyPatch, below: str) -> None:
    library = cufile_in(tmp_path / below)
    bare.setattr(library_module, "_packaged", lambda: iter(()))  # pip may have one here
    bare.setenv("CUDA_PATH", str(tmp_path))
    found = machine.find_cufile()
    assert (found.path, found.source) == (str(library), "$CUDA_PATH")


def test_cufile_is_not_usable_without_proc_modules(
    tmp_path: Path, bare: pytest.MonkeyPatch
) -> None:
    bare.setenv("NVMEIO_CUFILE", str(cufile_in(tmp_path / "mine")))
    found = machine.find_cufile()
    assert found.usable == Path("/proc/modules").exists()
    assert ("/proc/modules" in found.reason) == (not found.usable)


GDS = machine.CuFile(
    "/lib/libcufile.so.0", "ldconfig", "", True, "1.20", "opens", "compat", "", True, True, True
)


def shown(facts: machine.Facts, **spoiled: object) -> str:
    shown = StringIO()
    console = Console(file=shown, width=200)
    report.render(report.Report(dataclasses.replace(facts, **spoiled), []), console)
    return shown.getvalue()


def test_one_line_tells_of_cufile_where_there_is_no_gpu(facts: machine.Facts) -> None:
    """Six lines told of the parts of something that nobody there could use."""
    for cufile in (GDS, facts.cufile):
        text = shown(facts, cufile=cufile).partition("GPUDirect Storage\n")[2]
        (line,) = text.partition("\n\n")[0].splitlines()
        assert line.split()[:2] == ["no", "GPU"]
        assert str(cufile.path or "not found") in line


def test_the_report_fits_a_narrow_terminal(facts: machine.Facts) -> None:
    """Words were broken in two, and labels cut, in 60 columns."""
    output = StringIO()
    console = Console(file=output, width=60, force_terminal=True, color_system=None)
    report.render(report.Report(facts, list(report_module.find_problems(facts))), console)
    wide = shown(facts).split()
    narrow = output.getvalue()
    assert max(map(len, narrow.splitlines())) <= 60
    short = {word for word in wide if len(word) <= 40}
    assert short <= set(narrow.split())


def test_compat_mode_is_not_presented_as_dma(facts: machine.Facts) -> None:
    text = shown(
        facts, cufile=GDS, software=dataclasses.replace(facts.software, cuda_available=True)
    )
    assert "version 1.20" in text
    assert "compat  no DMA to the GPU: cuFile goes through host memory" in text
    assert "nvidia-fs    not loaded" in text
    assert "P2PDMA       in the kernel" in text


def test_driver_that_does_not_open_says_why(facts: machine.Facts) -> None:
    refusal = "cuFile: status 5033"
    spoiled = dataclasses.replace(GDS, usable=False, reason=refusal, driver=refusal, mode=None)
    software = dataclasses.replace(facts.software, cuda_available=True, torch_cuda="13.0")
    assert f"does not open  {refusal}" in shown(facts, cufile=spoiled, software=software)
    (problem,) = problems(facts, cufile=spoiled, software=software)
    assert refusal in problem.what
    assert "cufile.log" in problem.fix


def test_a_directory_whose_files_cufile_refuses_matters_beside_a_cuda_device(
    facts: machine.Facts,
) -> None:
    software = dataclasses.replace(facts.software, cuda_available=True, torch_cuda="13.0")
    reason = library_module.failure("cuFileHandleRegister", 5027).detail
    spoiled = dataclasses.replace(GDS, refused={"/data": reason})
    assert problems(facts, cufile=spoiled) == []
    (problem,) = problems(facts, cufile=spoiled, software=software)
    assert problem.what.startswith("cuFile refuses files in /data: ")
    assert "docker run -v /run/udev:/run/udev:ro" in problem.what
    assert "cufile.log" in problem.fix


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/modules is there, also for processes."""
    if driver.MODULES.exists():
        return
    stand_in = tmp_path / "modules"
    stand_in.touch()
    monkeypatch.setenv("LD_PRELOAD", str(compiled("cufile_traps.c", tmp_path)))
    monkeypatch.setenv("NVMEIO_TEST_MODULES", str(stand_in))
    monkeypatch.setattr(driver, "MODULES", stand_in)


@pytest.mark.usefixtures("modules")
def test_a_cufile_whose_driver_opens_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that tries it asked for a class that had been renamed, and always ended with 1.

    So `nvmeio report` called every cuFile unusable.
    """
    monkeypatch.setenv("NVMEIO_CUFILE", str(compiled("fake_cufile.c", tmp_path)))
    looked = machine_module.look_into_cufile(machine_module.find_cufile())
    assert (looked.usable, looked.reason, looked.driver) == (True, "", "opens")
    assert (looked.version, looked.mode) == ("1.20", "host")


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("refuses", [False, True])
def test_a_file_is_registered_in_each_directory(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver opened, cuFile was called usable, and it refused every file of the drive."""
    monkeypatch.setenv("NVMEIO_CUFILE", str(compiled("fake_cufile.c", tmp_path)))
    monkeypatch.setenv("FAKE_CUFILE", f"file_status={5027 * refuses}")
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    looked = machine_module.look_into_cufile(machine_module.find_cufile(), folders)
    assert list(looked.refused) == [str(folder) for folder in folders] * refuses
    assert all("status 5027" in reason for reason in looked.refused.values())
    assert (looked.driver, looked.usable) == ("opens", True)
    assert not [path for folder in folders for path in folder.iterdir()]


@pytest.mark.usefixtures("modules")
def test_the_installed_cufile_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVMEIO_CUFILE", real_library())
    looked = machine_module.look_into_cufile(machine_module.find_cufile())
    assert (looked.driver, looked.usable) == ("opens", True)
    assert looked.mode in ("host", "gds", "p2p", "compat")


@pytest.mark.usefixtures("modules")
def test_a_driver_that_refuses_is_not_usable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "libcufile.so"
    older.write_bytes(b"no library")
    monkeypatch.setenv("NVMEIO_CUFILE", str(older))
    looked = machine_module.look_into_cufile(machine_module.find_cufile())
    assert not looked.usable
    assert "file too short" in looked.driver or "invalid ELF header" in looked.driver


@pytest.mark.parametrize(
    ("code", "limit_s", "word"),
    [
        ("import time; time.sleep(600)", 1.0, "was not done after"),
        ("import os; os.abort()", 100.0, "ended with -6"),
        ("print('{}')", 100.0, ""),
    ],
)
def test_library_is_tried_in_a_process_that_may_hang_or_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float, word: str
) -> None:
    monkeypatch.setattr(machine_module, "_CODE", code)
    monkeypatch.setattr(machine_module, "PROBE_LIMIT_S", limit_s)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    found = machine.CuFile("/lib/libcufile.so.0", "ldconfig", "", True)
    looked = machine_module.look_into_cufile(found)
    assert word in looked.driver
    assert looked.usable == (not word)
    assert looked.json is None
    (tmp_path / "cufile.json").touch()
    assert machine_module.look_into_cufile(found).json == str(tmp_path / "cufile.json")
    assert machine_module.look_into_cufile(machine.CuFile(None, "", "no", False)).driver == ""


# Mounts, and what a person sees


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_output_fits_its_width(facts: machine.Facts, width: int) -> None:
    refused = DirectSupport(False, 0, 0, "a reason of some length, " * 8)
    directory = dataclasses.replace(facts.directories[0], path="/long" * 40, direct=refused)
    spoiled = dataclasses.replace(facts, directories=[directory])
    shown = StringIO()
    console = Console(file=shown, width=width, force_terminal=True, color_system=None)
    report.render(report.Report(spoiled, problems(spoiled)), console)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "a reason of some length" in " ".join(lines)


def test_piped_output_keeps_each_fact_on_one_line(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    lines = invoke("--dir", deep).stdout.splitlines()
    assert str(deep.resolve()) in lines
    assert [line.rstrip() for line in lines] == lines


def test_markup_in_a_path_is_shown_as_it_is(facts: machine.Facts) -> None:
    directory = dataclasses.replace(facts.directories[0], path="/data/[bold]run[/bold]")
    shown = StringIO()
    console = Console(file=shown, width=80)
    report.render(report.Report(dataclasses.replace(facts, directories=[directory]), []), console)
    assert "/data/[bold]run[/bold]" in shown.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 << 20, "8 MiB"),
        (250 * (1 << 30) + 1, "250 GiB"),
        (1 << 62, "4194304 TiB"),
    ],
)
def test_sizes(nbytes: int, shown: str) -> None:
    assert binary_size(nbytes) == shown
