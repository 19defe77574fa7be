"""What a conversion records about itself: its request first, in the marker; all of it in the commit, last."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint import convert
from trainwright.checkpoint.convert import Group, Report
from trainwright.errors import UserError
from trainwright.node.commit import read_commit, write_commit


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A conversion's request: what decides its result besides the values of the source."""

    kind: str
    source: Path
    source_files: Mapping[str, int]  # with their sizes in bytes
    options: Mapping[str, Any]
    degrees: Mapping[str, Any]
    model: Mapping[str, Any]

    def request(self) -> dict[str, Any]:
        """Return what the marker holds."""
        return {"schema_version": 1, "kind": self.kind, "source": str(self.source), "options": dict(self.options)}

    def commit(self, output: Path, groups: Sequence[Group], crc32s: Mapping[str, int], notes: Sequence[str]) -> None:
        """Declare `output` complete. No times are recorded: the same source and options give the same bytes."""
        metadata = {
            "kind": self.kind,
            "options": dict(self.options),
            "degrees": dict(self.degrees),
            "model": dict(self.model),
            "source": {
                "path": str(self.source),
                "files": dict(self.source_files),
                "crc32": dict(crc32s),
                "commit": read_commit(self.source),  # None: it has none; a fetch tells there where it came from
            },
            "notes": list(notes),
            "versions": {name: importlib.metadata.version(name) for name in ("trainwright", "torch", "numpy")},
        }
        write_commit(output, metadata, known_crc32s=convert.file_crc32s(output, groups))

    def check_complete(self, output: Path, groups: Sequence[Group]) -> None:
        """Raise UserError unless the complete `output` is what this request gives, the source's values included."""
        metadata = read_commit(output)
        assert metadata is not None
        made = {key: metadata.get(key) for key in ("kind", "options", "degrees")}
        asked = {"kind": self.kind, "options": dict(self.options), "degrees": dict(self.degrees)}
        if made != asked:
            raise UserError(f"--output {output}: complete, but made with {made}, not {asked}; name a new directory")
        crc32s = metadata["source"]["crc32"]
        changed = [name for name, crc32 in convert.source_crc32s(groups).items() if crc32s.get(name) != crc32]
        if changed:
            raise UserError(
                f"--output {output}: complete, but made from other values of {len(changed)} tensors, {changed[0]} "
                "first; name a new directory"
            )

    def report(
        self, output: Path, groups: Sequence[Group], notes: Sequence[str], *, was_complete: bool, wall_s: float
    ) -> Report:
        """Return what the conversion to `output` did."""
        targets = [target for group in groups for target in group.targets]
        written = 0 if was_complete else sum(target.num_bytes for target in targets)
        return Report(
            kind=self.kind,
            output=str(output),
            was_complete=was_complete,
            num_tensors=len(targets),
            read_bytes=sum(self.source_files.values()),
            written_bytes=written,
            wall_s=round(wall_s, 3),
            degrees=self.degrees,
            notes=tuple(notes),
        )
