"""A model at the path where training looks for it: fetched from the hub, copied, linked, or what is there already."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint.hf_model import HfModel
from trainwright.errors import UserError
from trainwright.fetch import hub
from trainwright.fetch.files import check_space, writing
from trainwright.fetch.lock import Say, held
from trainwright.fetch.retry import WAITS_S
from trainwright.node import commit

Check = Callable[[Path], Sequence[str]]  # what is wrong with a model's small files
_MARKER = Path(hub.SCRATCH) / "fetch.json"  # in a directory that a fetch fills and has not finished
_AT_ONCE = 4  # files copied
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model is wanted where; the keys are the config's, for messages."""

    source: str | None  # hub id or path; None: it lies in `target` already
    revision: str | None  # branch, tag or commit on the hub; None: the newest
    target: Path
    linked_below: Path | None  # a model below this path is linked, not copied; None: always copied
    source_key: str = "model.source"
    revision_key: str = "model.revision"
    target_key: str = "backend.model_dir"


def fetch_model(request: ModelRequest, *, check: Check, say: Say, waits_s: Sequence[float] = WAITS_S) -> None:
    """Have the model in `request.target`, committed unless the user put it there.

    A revision that has moved on the hub since changes nothing: the commit tells which one is there.
    Raises UserError with all that is wrong.
    """
    target, key = request.target, request.target_key
    if _is_complete(request, check, say):
        return
    if request.source is None or _is_in_place(request):
        if not _is_of_the_user(request, check, say):
            raise UserError(
                f"{key}: no model is in {target}, and {request.source_key} names none to fetch; set it to a hub id or "
                "a path"
            )
        return
    with writing(target, key), held(target.with_name(target.name + ".lock"), say=say):
        # Another may have just fetched it, and only its owner can tell what an incomplete directory is.
        if _is_complete(request, check, say) or _is_of_the_user(request, check, say):
            return
        marker = target / _MARKER
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({"source": request.source, "revision": request.revision}), encoding="utf-8")
        try:
            resolved, crc32s = _fill(request, check, say, waits_s)
            HfModel(target, request.source_key)  # whole, as those who read it see it
        except UserError:
            _give_back(target)
            raise
        hub.remove_scratch(target)
        metadata = {"kind": "model", "source": request.source, "revision": request.revision, "resolved": resolved}
        commit.write_commit(target, metadata, known_crc32s=crc32s)
        say(f"{key}: {target} is complete, from {described(metadata)}")


def described(metadata: dict[str, Any]) -> str:
    """Return in words where a model came from, given its commit's metadata."""
    if metadata.get("resolved") is None:
        return str(metadata.get("source"))
    return f"{metadata['source']}, revision {metadata['revision'] or hub.NEWEST}, commit {metadata['resolved']}"


def other_origin(request: ModelRequest) -> str | None:
    """Return what is wrong if the complete model in the target was fetched from elsewhere, else None."""
    metadata = commit.read_commit(request.target)
    if metadata is None or request.source is None or _is_in_place(request):
        return None
    is_same = request.source == metadata.get("source")
    names = {metadata.get("revision") or hub.NEWEST, metadata.get("resolved")}
    if is_same and (is_path(request.source) or (request.revision or hub.NEWEST) in names):
        return None
    return (
        f"{request.target_key}: {request.target} holds {described(metadata)}, but {request.source_key}="
        f"{request.source} with {request.revision_key}={request.revision or 'null'} is asked for; choose another "
        f"{request.target_key}, or remove that directory"
    )


def _is_complete(request: ModelRequest, check: Check, say: Say) -> bool:
    """Return whether a fetch of this model came to its end. Raises UserError on damage, and on another model."""
    target, key = request.target, request.target_key
    metadata = commit.read_commit(target)
    if metadata is not None:
        other = other_origin(request)
        _raise([other] if other else [*check(target)])
        say(f"{key}: {target} is there, from {described(metadata)}")
        return True
    if commit.was_committed(target):
        reason = commit.why_incomplete(target)
        raise UserError(f"{key}: {target} is damaged: {reason}; remove the directory to have it fetched again")
    return False


def _is_of_the_user(request: ModelRequest, check: Check, say: Say) -> bool:
    """Return whether the user put a whole model there; False: nobody put anything there, or a fetch was killed."""
    target, key = request.target, request.target_key
    if (target / _MARKER).exists() or not target.exists():
        return False
    if target.is_dir() and all(path.name == hub.SCRATCH for path in target.iterdir()):
        return False
    try:
        HfModel(target, key)
    except UserError as error:
        raise UserError(
            f"{error}\n{key}: {target} was not fetched by trainwright and is no whole model; complete it, or move it "
            "away to have the model fetched"
        ) from error
    _raise([*_tokenizer_problems(target, key), *check(target)])
    say(f"{key}: {target} was there already and is whole; it is used as it is")
    return True


def _fill(
    request: ModelRequest, check: Check, say: Say, waits_s: Sequence[float]
) -> tuple[str | None, dict[str, int] | None]:
    """Fill the target and return the commit of the hub and the checksums, as far as known."""
    assert request.source is not None
    target = request.target

    def check_small(directory: Path) -> None:
        _raise([*_tokenizer_problems(directory, request.source_key), *check(directory)])

    if not is_path(request.source):
        model = hub.look_up(request.source, request.revision, key=request.source_key, say=say, waits_s=waits_s)
        say(f"{request.source_key}: {model.repo} is at commit {model.commit_hash}: {model.num_bytes} bytes")
        _remove_others(target, {file.name for file in model.files})
        crc32s = hub.download(model, target, key=request.target_key, check=check_small, say=say, waits_s=waits_s)
        return model.commit_hash, crc32s
    source = Path(request.source)
    if not source.is_dir():
        raise UserError(f"{request.source_key}: {source} is no directory; give a path to a model, or a hub id")
    names, problem = hub.chosen(path.name for path in source.iterdir() if path.is_file())
    _raise([f"{request.source_key}: {source}: {problem}"] if problem else [])
    HfModel(source, request.source_key)
    weights = hub.weight_files(source)
    names = [name for name in names if name in weights or not name.endswith(".safetensors")]
    check_small(source)
    _remove_others(target, set())
    is_linked = request.linked_below is not None and request.linked_below.resolve() in source.resolve().parents
    if not is_linked:
        check_space(target, sum((source / name).stat().st_size for name in names), request.target_key)
    place = os.symlink if is_linked else shutil.copyfile
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for placed in [pool.submit(place, (source / name).resolve(), target / name) for name in names]:
            placed.result()
    say(f"{request.source_key}: {source} was {'linked' if is_linked else 'copied'}")
    return None, None


def _remove_others(target: Path, wanted: Collection[str]) -> None:
    """Remove what a killed fetch of something else left."""
    for path in target.iterdir():
        if path.name not in wanted and path.name != hub.SCRATCH:
            path.unlink()


def _give_back(target: Path) -> None:
    """Leave nothing where nothing large has arrived: a mistake of the user's is corrected and tried again elsewhere."""
    if not any(target.glob("*.safetensors")):
        shutil.rmtree(target)


def _tokenizer_problems(directory: Path, key: str) -> list[str]:
    if any((directory / name).is_file() for name in _TOKENIZERS):
        return []
    return [f"{key}: {directory} has no tokenizer ({', '.join(_TOKENIZERS)}); add its files"]


def is_path(source: str) -> bool:
    """Return whether a model's source is a path rather than an id on the hub."""
    return source.startswith(("/", "."))


def _is_in_place(request: ModelRequest) -> bool:
    source = request.source
    return source is not None and is_path(source) and os.path.realpath(source) == os.path.realpath(request.target)


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise UserError("\n".join(problems))
