"""TensorBoard's event files of a run, wherever it lies: found, copied from a bucket, read."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainwright import storage
from trainwright.node.run_paths import RunPaths
from trainwright.node.tfevents import Point, ScalarReader

DEFAULT = "default"
_MARK = "tfevents"
# One training, one curve: what Vertex AI watches meanwhile, and where NeMo moves the files of earlier attempts.
_OF_THE_RUN = re.compile(r"\.|logs|run_\d+")


def find(run: Path) -> list[Path]:
    """Return the event files of a run."""
    paths = RunPaths(run)
    if storage.is_bucket(run):
        # Both depths at which frameworks write them; `*` needs a folder before it to be picked out by the bucket.
        found = storage.find_files(run, run.parent / "*" / f"*{_MARK}*")
        found += storage.find_files(run, run / "*" / f"*{_MARK}*")
        ours = {paths.own.name, paths.checkpoints.name, paths.exports.name}
        return sorted({path for path in found if path.parent == run or path.parent.name not in ours})
    found = []
    for folder, below, names in os.walk(run):
        below[:] = [name for name in below if Path(folder, name) not in (paths.own, paths.checkpoints, paths.exports)]
        found += [Path(folder, name) for name in names if _MARK in name]
    return sorted(found)


class LocalCopy:
    """The event files of a run on a bucket, in a folder here. What has grown there grows here, by its end only."""

    def __init__(self, run: Path, folder: Path) -> None:
        self._run, self._folder = run, folder
        self.failures = storage.failures(run)  # what `refresh` may raise
        folder.mkdir(parents=True, exist_ok=True)

    def refresh(self) -> None:
        """Fetch what is new. Raises `failures`."""
        for file in find(self._run):
            target = self._folder / _below(self._run, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            has = target.stat().st_size if target.exists() else 0
            with open(target, "ab") as copy:
                for content in storage.read_from(file, has):
                    copy.write(content)


def read(folder: Path) -> dict[str, dict[str, list[Point]]]:
    """Return the scalars of a run's event files here: by folder, by tag, in the order of the steps.

    Of a step that was logged twice, since a run was resumed before it, the newer value counts.
    """
    newest: dict[str, dict[str, dict[int, Point]]] = {}
    for file in find(folder):
        tags = newest.setdefault(_curve_name(file.parent.relative_to(folder).as_posix()), {})
        for point in _points(file):
            known = tags.setdefault(point.tag, {})
            if point.step not in known or known[point.step].wall_time <= point.wall_time:
                known[point.step] = point
    return {
        name: {tag: [steps[step] for step in sorted(steps)] for tag, steps in sorted(tags.items())}
        for name, tags in newest.items()
        if tags
    }


def _points(file: Path) -> Iterator[Point]:
    reader = ScalarReader(file)
    while points := reader.read_new():
        yield from points


def _curve_name(folder: str) -> str:
    return DEFAULT if _OF_THE_RUN.fullmatch(folder) else folder


def _below(run: Path, file: Path) -> str:
    return str(file)[len(str(run)) :].lstrip("/")
