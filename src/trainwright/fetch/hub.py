"""A model of the Hugging Face hub: safetensors, configuration and tokenizer of one commit, into a directory.

Files that a killed download had finished stay; one that it was in the middle of starts again.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint.convert import ReportBytes
from trainwright.checkpoint.hf_model import INDEX, SINGLE
from trainwright.checkpoint.progress import shown
from trainwright.errors import UserError
from trainwright.fetch.files import check_space
from trainwright.fetch.lock import Say
from trainwright.fetch.retry import WAITS_S, DamagedError, retrying

SCRATCH = ".cache"  # where huggingface_hub keeps what is underway, below the directory
NEWEST = "main"  # the revision where none is named
_UNDERWAY = f"{SCRATCH}/huggingface/download/*.incomplete"
_AT_ONCE = 8  # files
_LOOK_S = 2.0  # between two looks at how much has arrived
_CHUNK_BYTES = 1 << 22
_WEIGHTS = re.compile(r"model.*\.safetensors")
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_PASS_ON = "launcher.env_from=[HF_TOKEN]"


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """One commit of a model on the hub."""

    repo: str
    key: str  # of the config, which names it, for messages
    commit_hash: str
    files: tuple["HubFile", ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file to fetch."""

    name: str
    num_bytes: int
    sha256: str | None  # None: a small file, whose checksum the hub does not tell

    @property
    def is_weights(self) -> bool:
        return _WEIGHTS.fullmatch(self.name) is not None


def chosen(names: Iterable[str]) -> tuple[list[str], str | None]:
    """Return which files of a model are wanted, and why there is no such model among them, if so."""
    top = sorted(name for name in names if "/" not in name)
    weights = [name for name in top if _WEIGHTS.fullmatch(name)]
    pickle_indices = [name for name in top if name.endswith(".index.json") and ".safetensors" not in name]
    small = [name for name in top if name.endswith(_SMALL) or name.upper().startswith(("LICENSE", "NOTICE"))]
    pickles = [name for name in top if name.endswith((".bin", ".pt", ".pth")) and "model" in name]
    problem = None
    if not weights and pickles:
        problem = (
            f"it has its weights as pickles only ({pickles[0]}), which are never read here; save them once "
            "as safetensors, with transformers: AutoModelForCausalLM.from_pretrained(ID).save_pretrained(DIR), and the "
            "tokenizer; then name DIR"
        )
    elif not weights:
        problem = "it has no model*.safetensors"
    return [name for name in weights + small if name not in pickle_indices], problem


def look_up(repo: str, revision: str | None, *, key: str, say: Say, waits_s: Sequence[float] = WAITS_S) -> HubModel:
    """Return what a revision of a model is at this moment. `key` names the model in messages."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=_endpoint(), token=_token())
    try:
        info = retrying(
            lambda: api.model_info(repo, revision=revision, files_metadata=True), repo, say=say, waits_s=waits_s
        )
    except GatedRepoError as error:
        raise UserError(_gated(repo, key)) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{key}: {repo} has no revision {revision}; name a branch, tag or commit of it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{key}: the hub shows no model {repo}; correct the id, give a path, or, if it is private, set HF_TOKEN "
            f"and {_PASS_ON}"
        ) from error
    siblings = {file.rfilename: file for file in info.siblings or ()}
    names, problem = chosen(siblings)
    if problem is not None:
        raise UserError(f"{key}: {repo}: {problem}")
    assert info.sha is not None
    files = tuple(
        HubFile(name=name, num_bytes=siblings[name].size or 0, sha256=_sha256(siblings[name])) for name in names
    )
    return HubModel(repo=repo, key=key, commit_hash=info.sha, files=files)


def download(
    model: HubModel,
    directory: Path,
    *,
    key: str,
    check: Callable[[Path], None],
    say: Say,
    waits_s: Sequence[float] = WAITS_S,
) -> dict[str, int]:
    """Fetch all files of `model` and return their CRC-32. `check` looks at the small files before the large ones come.

    `key` names the directory in messages.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    for left in directory.glob(_UNDERWAY):
        left.unlink()  # of a process that was killed: no other can go on with it
    with ThreadPoolExecutor(_AT_ONCE) as pool:

        def fetch(files: Sequence[HubFile]) -> dict[str, int]:
            fetched = [pool.submit(_fetch, model, file, directory, say, waits_s) for file in files]
            return {file.name: each.result() for file, each in zip(files, fetched, strict=True)}

        crc32s = fetch([file for file in model.files if not file.is_weights])
        check(directory)
        listed = weight_files(directory)
        weights = sorted((file for file in model.files if file.name in listed), key=lambda file: -file.num_bytes)
        total_bytes = sum(file.num_bytes for file in weights)
        check_space(directory, total_bytes - _arrived(directory, weights), key)
        with shown(model.repo) as report, _watched(lambda: _arrived(directory, weights), total_bytes, report):
            return crc32s | fetch(weights)


def _arrived(directory: Path, files: Sequence[HubFile]) -> int:
    """Return how many bytes of `files` are on the disk, in whole files and in those underway."""
    done = 0
    for path in (*(directory / file.name for file in files), *directory.glob(_UNDERWAY)):
        with contextlib.suppress(FileNotFoundError):  # not begun, or renamed in this moment
            done += path.stat().st_size
    return done


def weight_files(directory: Path) -> set[str]:
    """Return the weight files of a model: some repositories have others beside them, of other types or shapes."""
    if not (directory / INDEX).is_file():
        return {SINGLE}
    return set(json.loads((directory / INDEX).read_bytes()).get("weight_map", {}).values())


def _fetch(model: HubModel, file: HubFile, directory: Path, say: Say, waits_s: Sequence[float]) -> int:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError

    def fetch() -> int:
        hf_hub_download(
            model.repo,
            file.name,
            revision=model.commit_hash,
            local_dir=directory,
            endpoint=_endpoint(),
            token=_token(),
            etag_timeout=30,
        )
        return _measured(directory / file.name, file)

    try:
        return retrying(fetch, file.name, say=say, waits_s=waits_s)
    except GatedRepoError as error:  # of such a model everyone may see what files it has
        raise UserError(_gated(model.repo, model.key)) from error


def _gated(repo: str, key: str) -> str:
    return (
        f"{key}: {repo} is given only to users who accepted its terms; do so on its page, set HF_TOKEN and {_PASS_ON}"
    )


def _measured(path: Path, file: HubFile) -> int:
    """Return the file's CRC-32, its checksum on the hub compared on the way. Removes the file if it is another."""
    crc32, sha256 = 0, hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
            crc32 = zlib.crc32(chunk, crc32)
            if file.sha256 is not None:
                sha256.update(chunk)
    size = path.stat().st_size
    if size != file.num_bytes:
        path.unlink()
        raise DamagedError(f"{size} of {file.num_bytes} bytes arrived")
    if file.sha256 not in (None, sha256.hexdigest()):
        path.unlink()
        raise DamagedError("its SHA-256 is not the one that the hub tells")
    return crc32


def _token() -> str | bool:
    """Return the token of the environment; False: none, not even one that a login left on this disk."""
    return os.environ.get("HF_TOKEN") or False


def _endpoint() -> str | None:
    """Return the hub to ask, as the environment says now; None: huggingface.co."""
    return os.environ.get("HF_ENDPOINT")


def _sha256(sibling: Any) -> str | None:
    return None if sibling.lfs is None else str(sibling.lfs.sha256)


@contextlib.contextmanager
def _watched(arrived: Callable[[], int], total_bytes: int, report: ReportBytes) -> Iterator[None]:
    """Report how many bytes have arrived while a block runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            report(min(arrived(), total_bytes), total_bytes)
        report(min(arrived(), total_bytes), total_bytes)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def remove_scratch(directory: Path) -> None:
    """Remove what huggingface_hub noted about the download."""
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
