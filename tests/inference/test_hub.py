"""Models by their names on the hub: a server that answers as the hub does, and the cache."""

from __future__ import annotations

import hashlib
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inference._models import llama, loaded, logits, prompt, saved, tokens
from support import run_python
from typer.testing import CliRunner

import nvmeio
from nvmeio.cli import app
from nvmeio.inference import pack
from nvmeio.inference.hub import directory_of

hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

Make = Callable[..., Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories in directories, over HTTP."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        outer = self

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                self.answer(True)

            def answer(self, with_body: bool) -> None:
                outer.asked.append(self.path)
                name, _, rest = self.path.lstrip("/").partition("/resolve/")
                revision, _, file = rest.partition("/")
                found = outer.root / name / file
                error = ""
                if not (outer.root / name).is_dir():
                    error = "RepoNotFound"
                elif revision not in ("main", COMMIT):
                    error = "RevisionNotFound"
                elif not found.is_file():
                    error = "EntryNotFound"
                body = b"" if error else found.read_bytes()
                self.send_response(404 if error else 200)
                self.send_header("X-Repo-Commit", COMMIT)
                if error:
                    self.send_header("X-Error-Code", error)
                else:
                    self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def files_asked(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self.asked}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    close = getattr(hub, "close_session", lambda: None)
    close()  # it may have been made with a proxy
    (tmp_path / "remote").mkdir()
    served = Hub(tmp_path / "remote")
    template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub.constants, "ENDPOINT", served.address)
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # on a busy machine
        monkeypatch.setattr(hub.constants, name, 300)
    try:
        yield served
    finally:
        close()
        served.close()


def repository(remote: Hub, name: str, **options: Any) -> Path:
    directory = remote.root / name
    directory.mkdir(parents=True)
    return saved(llama, directory, **options)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_is_downloaded_once_and_streamed_as_its_directory(
    remote: Hub, stream: Make, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    options = {"max_shard_size": "100KB"} if sharded else {}
    whole = loaded(repository(remote, "owner/llama", **options))
    ids = prompt()
    model = stream("owner/llama")
    assert logits(model, ids).equal(logits(whole, ids))
    assert model.name_or_path == "owner/llama"
    assert ("model.safetensors.index.json" in remote.files_asked()) == sharded
    # The second time nothing is asked for; neither is the hub needed.
    remote.asked.clear()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    again = stream("owner/llama")
    assert tokens(again, ids).equal(tokens(whole, ids))
    assert remote.asked == []


def test_only_weights_that_are_streamed_are_downloaded(remote: Hub) -> None:
    directory = repository(remote, "owner/llama")
    for name in ("pytorch_model.bin", "model.onnx", "README.md"):
        (directory / name).write_bytes(b"something else")
    found = directory_of("owner/llama")
    assert not remote.files_asked() & {"pytorch_model.bin", "model.onnx", "README.md"}
    here = {path.name for path in Path(found).iterdir()}
    assert here == {"config.json", "generation_config.json", "model.safetensors"}
    assert directory_of("owner/llama", revision=COMMIT) == found


def test_a_quantised_model_is_downloaded(remote: Hub, tmp_path: Path) -> None:
    (remote.root / "owner").mkdir()
    pack(
        saved(llama, tmp_path / "m"),
        remote.root / "owner" / "few",
        quant_bits=4,
        quant_group_size=32,
    )
    assert (Path(directory_of("owner/few")) / "model-packed.safetensors").is_file()


def test_what_is_not_in_the_cache_is_not_found_offline(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(remote, "owner/llama")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"config.json .* is not in the hub's cache"):
        nvmeio.stream_model("owner/llama")
    assert remote.asked == []


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("owner/nobody", None, "no repository on the hub that you may read"),
        ("owner/llama", "v9", "owner/llama on the hub has no revision 'v9'"),
        ("owner/bins", None, r"has no model.safetensors: nvmeio streams safetensors files"),
        ("owner/empty", None, "has no config.json"),
    ],
)
def test_what_the_hub_does_not_have_is_named(
    remote: Hub, name: str, revision: str | None, says: str
) -> None:
    repository(remote, "owner/llama")
    bins = shutil.copytree(remote.root / "owner/llama", remote.root / "owner/bins")
    (bins / "model.safetensors").rename(bins / "pytorch_model.bin")
    (remote.root / "owner/empty").mkdir()
    with pytest.raises(FileNotFoundError, match=says):
        nvmeio.stream_model(name, revision=revision)


def test_a_misspelt_directory_is_named_with_one_request(
    remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt directory went to the hub six times, for 30 s where there is no network."""
    (tmp_path / "models" / "llama-3-70b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("models/lama-3-70b", "./models/lama-3-70b"):
        with pytest.raises(FileNotFoundError, match=r"there is (\./)?models/llama-3-70b"):
            nvmeio.stream_model(name)
    # What else the hub's client asks (which tools there are, in 2.4) is its own affair.
    assert len([asked for asked in remote.asked if "lama-3-70b" in asked]) <= 2
    remote.close()
    asked = []
    head = hub.get_session().head
    monkeypatch.setattr(hub.get_session(), "head", lambda *a, **n: (asked.append(a), head(*a, **n)))
    with pytest.raises(FileNotFoundError, match=r"there is models/llama.*does not answer"):
        nvmeio.stream_model("models/lama-3-70b")
    assert len(asked) == 1


def test_hub_names_work_where_nobody_has_imported_its_parts(tmp_path: Path) -> None:
    """`huggingface_hub.errors` is no attribute before somebody imports it: AttributeError."""
    done = run_python(
        """
        from nvmeio.inference.hub import directory_of
        try:
            directory_of("owner/nobody")
        except FileNotFoundError as missing:
            print(missing)
        """,
        fresh=True,
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path),
    )
    assert "owner/nobody is not a directory here" in done.stdout, done.stderr


def test_a_directory_comes_before_a_name(
    remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "llama").mkdir(parents=True)
    assert directory_of("owner/llama") == "owner/llama"
    with pytest.raises(ValueError, match="revision is for the hub"):
        directory_of("owner/llama", revision="main")
    assert remote.asked == []


@pytest.mark.parametrize("given", ["/nowhere/llama", "./llama", "a/b/c", Path("owner/llama")])
def test_a_missing_directory_says_so(remote: Hub, given: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: name a directory"):
        nvmeio.stream_model(given)
    assert remote.asked == []


def test_names_are_packed_and_generated_from(remote: Hub, tmp_path: Path) -> None:
    repository(remote, "owner/llama")
    report = pack("owner/llama", tmp_path / "packed")
    assert report.bytes_written > 0
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())
    given = ["--ids", "1,5,9", "--max-new-tokens", "3"]
    done = [
        CliRunner().invoke(app, ["generate", name, *given])
        for name in ("owner/llama", str(tmp_path / "packed"))
    ]
    assert [each.exit_code for each in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout
