"""Buckets for tests: a folder, fsspec's memory, and a server on this machine that gcsfs takes for Cloud Storage."""

import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

BUCKET = "b"
KINDS = ("folder", "memory", "emulator")


class ObjectStore(MemoryFileSystem):
    """fsspec's memory, made as strict as a bucket.

    An object comes to be whole and at once, exclusively if that is asked for; no folders are made, nothing is appended,
    renamed or copied. What is written twice is noted, and what is listed.
    """

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    replaced: ClassVar[list[str]] = []
    listed: ClassVar[list[str]] = []
    _lock = threading.RLock()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self._lock:
            if self._strip_protocol(path) in self.store:
                if mode == "create":
                    raise FileExistsError(path)
                self.replaced.append(path)
            super().pipe_file(path, value, mode, **options)

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        assert mode in ("rb", "wb", "xb"), f"a bucket cannot {mode} {path}"
        with self._lock:
            if mode == "rb":  # a reader of its own: memory's is one for all
                return BytesIO(super()._open(path, mode).getvalue())
            return super()._open(path, mode, *arguments, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.listed.append(path)
        return super().ls(path, detail, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.listed.append(path)
        return super().find(path, *arguments, **options)

    def mkdir(self, path: str, *arguments: Any, **options: Any) -> None:
        raise AssertionError(f"a bucket has no folders to make: {path}")

    makedirs = mkdir
    mv = cp_file = touch = mkdir


class _Handler(RequestHandler):
    """The emulator, and what it lacks: ifGenerationMatch=0, which creates an object only where there is none.

    It answers one request at a time, but nobody waits for a client that has connected and says nothing, such as a
    program that expects another server on a port that was free a moment ago.
    """

    timeout = 10.0
    _turn = threading.Lock()  # the emulator's storage knows no threads

    def do_GET(self) -> None:  # noqa: N802  http.server's names
        with self._turn:
            super().do_GET()

    def do_DELETE(self) -> None:  # noqa: N802
        with self._turn:
            super().do_DELETE()

    def do_POST(self) -> None:  # noqa: N802
        query, body = parse_qs(urlsplit(self.path).query), self.rfile.read(int(self.headers["Content-Length"]))
        self.rfile = BytesIO(body)
        with self._turn:
            if query.get("ifGenerationMatch") == ["0"] and self._is_there(json.loads(body.split(b"\n")[3])["name"]):
                self.send_response(412)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                super().do_POST()

    def _is_there(self, name: str) -> bool:
        with contextlib.suppress(NotFound):
            self.storage.get_file_obj(BUCKET, name)
            return True
        return False


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # gcsfs asks many things at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: gcsfs hangs up on whichever of two requests at once it no longer needs."""


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """Yield the address of a Cloud Storage with one empty bucket."""
    storage = Storage(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    server = _Server(("127.0.0.1", 0), partial(_Handler, storage))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def bucket_of_kind(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the launcher.bucket_url of an empty bucket."""
    if kind == "folder":
        (folder / BUCKET).mkdir(parents=True)
        yield str(folder)
    elif kind == "memory":
        known = fsspec.get_filesystem_class("memory")
        fsspec.register_implementation("memory", ObjectStore, clobber=True)
        ObjectStore.store.clear()
        ObjectStore.replaced.clear()
        try:
            yield "memory://"
        finally:
            fsspec.register_implementation("memory", known, clobber=True)
        # A new attempt brings its worker, and the last part of a log is replaced by its node.
        assert [
            path for path in ObjectStore.replaced if not path.endswith("/worker.pyz") and "/logs/" not in path
        ] == []
    else:
        with emulator() as address:
            monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": address})
            yield "gs://"
