"""Zip `node/` into the one file that every job starts."""

from __future__ import annotations

import os
import zipfile
from io import BytesIO
from pathlib import Path

from trainwright import node, storage

_ENTRY = "import sys\n\nfrom node.worker import main\n\nsys.exit(main())\n"
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest that zip files know: equal sources give equal bytes


def build_worker(target: Path) -> None:
    """Write the worker of this version to `target`, whole at first sight; the same sources give the same bytes."""
    source = Path(node.__file__).parent
    files = {f"node/{path.relative_to(source).as_posix()}": path.read_text("utf-8") for path in source.rglob("*.py")}
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, text in sorted({**files, "__main__.py": _ENTRY}.items()):
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text)
    if storage.is_bucket(target):
        storage.write_all({target: packed.getvalue()})
        return
    draft = target.with_suffix(".tmp")
    draft.write_bytes(packed.getvalue())
    os.replace(draft, target)
