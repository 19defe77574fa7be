"""Fetches model and data: `python -m trainwright.backends.nxdt.fetch RUN_DIR --attempt N`."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.backends.nxdt import model_config
from trainwright.backends.nxdt.document import backend_of
from trainwright.backends.nxdt.stage import run_stage, say
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.fetch.files import FileRequest, fetch_files
from trainwright.fetch.model import ModelRequest, described, fetch_model
from trainwright.fetch.retry import joined
from trainwright.node import commit
from trainwright.node.run_paths import RunPaths


def fetch(config: RunConfig, paths: RunPaths) -> None:
    """Have the data and the model where training reads them. Raises UserError with what is wrong with either."""
    problems = []
    check = partial(model_config.problems, config=config)
    works: tuple[Callable[[], None], ...] = (
        lambda: fetch_files(data_requests(config), say=say),
        lambda: fetch_model(model_request(config), check=check, say=say),
    )
    for work in works:
        try:
            work()
        except UserError as error:
            problems.append(error)
    stale = shards_of_another_model(config)  # here too: with complete shards, the stage convert is left out
    if stale is not None:
        problems.append(UserError(stale))
    if problems:
        raise joined(problems)


def data_requests(config: RunConfig) -> list[FileRequest]:
    """Return the files of data that are fetched."""
    data = config.data
    files = (
        ("data.train_source", data.train_source, "data.train_path", data.train_path),
        ("data.val_source", data.val_source, "data.val_path", data.val_path),
    )
    return [
        FileRequest(source=source, target=Path(target), source_key=source_key, target_key=target_key)
        for source_key, source, target_key, target in files
        if source is not None and target is not None and source != target
    ]


def model_request(config: RunConfig) -> ModelRequest:
    """Return which model is wanted where."""
    shared = config.site.slurm.shared_dir
    return ModelRequest(
        source=config.model.source,
        revision=config.model.revision,
        target=Path(backend_of(config).model_dir),
        linked_below=None if shared.startswith("<") else Path(shared),
    )


def shards_of_another_model(config: RunConfig) -> str | None:
    """Return what is wrong if complete shards are known to come from another fetched model, else None."""
    source, output = Path(backend_of(config).model_dir), Path(backend_of(config).pretrained_dir)
    made = commit.read_commit(output)
    origin: dict[str, Any] | None = made and made.get("source", {}).get("commit")
    now = commit.read_commit(source)
    keys = ("source", "resolved")
    if origin is None or now is None or all(origin.get(key) == now.get(key) for key in keys):
        return None  # else the values decide
    return (
        f"backend.pretrained_dir: {output} was made from {described(origin)}, but backend.model_dir={source} holds "
        f"{described(now)}; choose another backend.pretrained_dir, or remove that directory"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code: 0 done, 1 failed, 2 the user's input."""
    return run_stage(fetch, "fetch", argv)


if __name__ == "__main__":
    sys.exit(main())
