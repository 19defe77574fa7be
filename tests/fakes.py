"""Stand-ins for what lies outside of this project; one for each."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.vertex_server import Containers, Failure, VertexServer, quota

__all__ = ["Containers", "Failure", "VertexServer", "quota"]


def sbatch_on_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, refusals: Sequence[str], is_taken: bool
) -> Callable[[], int]:
    """Put an sbatch first on PATH that answers its first calls with `refusals` and then is the real one.

    With `is_taken` the controller takes the refused job all the same. Returns a function that counts the calls.
    """
    real = shutil.which("sbatch")
    folder.mkdir()
    calls = folder / "calls"
    calls.write_text("")
    cases = "\n".join(f"  {number}) echo 'sbatch: error: {text}' >&2;;" for number, text in enumerate(refusals, 1))
    script = folder / "sbatch"
    script.write_text(
        f"""#!/bin/bash
echo call >> '{calls}'
number=$(wc -l < '{calls}')
if [ "$number" -gt {len(refusals)} ]; then exec {real} "$@"; fi
{f'{real} "$@" > /dev/null' if is_taken else ":"}
case "$number" in
{cases}
esac
exit 1
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: len(calls.read_text().splitlines())


def device_monitor(folder: Path, name: str) -> str:
    """Make a program `name` that says its arguments and goes on as monitors do; return a PATH on which it is first."""
    folder.mkdir()
    program = folder / name
    program.write_text('#!/bin/bash\necho "$@"\nexec sleep infinity\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


class WebServer:
    """A web server on a port of this machine, and S3 as far as one object goes: /BUCKET/KEY.

    `objects` holds the content by path. A path below one of `private` needs an Authorization header. What `fail` says
    is how the next requests of a path go wrong.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.requests: list[tuple[str, str]] = []  # (method, path)
        self.hangs = threading.Event()  # set once an answer hangs
        self._failures: dict[str, list[int | str]] = defaultdict(list)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> "Iterator[WebServer]":
        server = cls()
        thread = threading.Thread(target=server._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server._server.shutdown()
            server._server.server_close()
            thread.join()

    def fail(self, path: str, *ways: int | str) -> None:
        """Let the next GETs of `path` fail: a status, `cut` (half, then the end) or `hang` (half, then nothing)."""
        self._failures[path] += ways

    def gets(self, path: str) -> int:
        return self.requests.count(("GET", path))

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body, a Range left out of account."""
        if any(path.startswith(prefix) for prefix in self.private) and "Authorization" not in headers:
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        body = self.objects.get(path)
        if body is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        etag = hashlib.md5(body).hexdigest()
        return 200, {"ETag": f'"{etag}"', "Last-Modified": "Mon, 02 Mar 2026 10:00:00 GMT"}, body

    def _next_failure(self, path: str) -> int | str | None:
        with self._lock:
            return self._failures[path].pop(0) if self._failures[path] else None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                path = unquote(self.path.split("?")[0])
                outer.requests.append((self.command, path))
                failure = outer._next_failure(path) if self.command == "GET" else None
                status, headers, body = outer.answer(self.command, path, self.headers)  # type: ignore[arg-type]
                if isinstance(failure, int):
                    status, headers, body, failure = failure, {}, b"", None
                wanted = self.headers.get("Range")
                if wanted is not None and status == 200:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, end = int(first), min(int(last or len(body) - 1), len(body) - 1)
                    headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
                    status, body = 206, body[start : end + 1]
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # of a client that was killed
                    if self.command == "GET":
                        self.wfile.write(body if failure is None else body[: len(body) // 2])
                if failure == "hang":
                    self.wfile.flush()
                    outer.hangs.set()
                    self.rfile.read(1)  # until the client is gone
                self.close_connection = self.close_connection or failure is not None

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


class HubServer(WebServer):
    """The Hugging Face hub: models with their commits; weights come by way of a redirect, with their SHA-256."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: dict[str, dict[str, Mapping[str, bytes]]] = defaultdict(dict)  # files by model and commit
        self.branches: dict[tuple[str, str], str] = {}  # commit by model and branch
        self.gated: set[str] = set()
        self.oversize: dict[str, int] = {}  # by model: bytes that its weights are said to have

    def publish(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a new commit the newest of a branch, and return its hash."""
        text = "".join(name + hashlib.sha1(content).hexdigest() for name, content in sorted(files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[repo][commit] = files
        self.branches[repo, branch] = commit
        return commit

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        words = path.strip("/").split("/")
        if words[:1] == ["stored"]:
            return super().answer(method, path, headers)
        is_api = words[:2] == ["api", "models"]
        repo = "/".join(words[2:4] if is_api else words[:2])
        if repo not in self.commits:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated and not is_api and "Authorization" not in headers:
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        revision = words[5] if is_api and len(words) > 5 else "main" if is_api else words[3]
        commit = self.branches.get((repo, revision), revision)
        if commit not in self.commits[repo]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.commits[repo][commit]
        if is_api:
            siblings = [_sibling(name, content, self.oversize.get(repo)) for name, content in files.items()]
            tree = {"id": repo, "sha": commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        name = "/".join(words[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        content = files[name]
        told = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if not name.endswith(".safetensors"):
            return 200, told, content
        sha256 = hashlib.sha256(content).hexdigest()
        self.objects.setdefault(f"/stored/{sha256}", content)
        linked = {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        elsewhere = self.url.replace("127.0.0.1", "localhost")  # weights come from another host
        return 302, {**told, **linked, "Location": f"{elsewhere}/stored/{sha256}"}, b""


def _sibling(name: str, content: bytes, weight_bytes: int | None) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
    if name.endswith(".safetensors"):
        size = weight_bytes or len(content)
        sibling["size"] = size
        sibling["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
    return sibling


def neuron_tools(folder: Path, versions: Mapping[str, str] | None = None) -> Path:
    """Make a Neuron environment: torchrun, neuron_parallel_compile and an interpreter that has packages of `versions`.

    Returns the interpreter, as backend.python names it. What the tools do and which variables change it stands in
    fake_neuron_tools.py.
    """
    programs, packages = folder / "bin", folder / "lib" / "python3.10" / "site-packages"
    programs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(packages, ignore_errors=True)
    for name, version in ({"neuronx-cc": "2.19.8089.0"} if versions is None else versions).items():
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    tools = Path(__file__).with_name("fake_neuron_tools.py")
    texts = {"python3": f'PYTHONPATH={packages} exec {sys.executable} "$@"'}
    for name in ("torchrun", "neuron_parallel_compile"):
        texts[name] = f'exec {sys.executable} -I -S {tools} {name} "$@"'
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return programs / "python3"


def nxdt_checkout(folder: Path) -> Path:
    """Make what the driver looks for in a checkout of neuronx-distributed-training, and return it."""
    orchestrator = folder / "examples" / "training_orchestrator.py"
    orchestrator.parent.mkdir(parents=True, exist_ok=True)
    orchestrator.write_text("raise SystemExit('played by tests/fake_neuron_tools.py')\n")
    return folder


def gcloud_on_path(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    there: Sequence[str] = (),
    failing: Mapping[str, int] | None = None,
    buckets: Path | None = None,
) -> Callable[[], list[str]]:
    """Put a gcloud first on PATH that makes nothing; return a function that gives the commands it was called with.

    Commands that look for something succeed if they name one of `there`; those that hold a text of `failing` end with
    its code. What it says goes where gcloud's goes. `storage rsync` copies from the folder `buckets`.
    """
    folder.mkdir()
    calls = folder / "calls"
    calls.write_text("")
    fails = "".join(f"  *{shlex.quote(text)}*) exit {code};;\n" for text, code in (failing or {}).items())
    found = "".join(f"  *{shlex.quote(text)}*) exit 0;;\n" for text in there)
    script = folder / "gcloud"
    script.write_text(
        f"""#!/bin/bash
echo "gcloud $*" >> '{calls}'
echo "gcloud says: $1 $2"
case "$*" in
{fails}{found}  *" describe "*|*print-access-token) exit 1;;
esac
if [ "$1 $2" = "storage rsync" ]; then
  exec '{sys.executable}' -I '{Path(__file__).with_name("fake_rsync.py")}' '{buckets}' "$@"
fi
for word; do if [ -f "$word/Dockerfile" ]; then cp -r "$word" '{folder}/context'; fi; done
exit 0
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: calls.read_text().splitlines()
