"""Plays `gcloud storage rsync gs://BUCKET/FOLDER TARGET --exclude=REGEX` on a folder that holds buckets."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path


def main(buckets: Path, url: str, target: Path, exclude: str) -> None:
    """Copy the files of a folder that `exclude` does not match; as long as BUCKETS/hold is there, only their halves."""
    assert url.startswith("gs://")
    pattern = re.compile(exclude.partition("=")[2])
    for path in sorted((buckets / url[len("gs://") :]).iterdir()):
        if path.is_file() and not pattern.match(path.name):
            (target / path.name).write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            while (buckets / "hold").exists():
                time.sleep(0.02)
            shutil.copyfile(path, target / path.name)


main(Path(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), sys.argv[6])
