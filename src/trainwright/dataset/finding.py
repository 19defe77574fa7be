"""What is wrong with training data, as its inspection tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataFinding:
    """error: data are lost, or the run fails."""

    id: str
    severity: Literal["error", "warning"]
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.id}] {self.message}; {self.remedy}"
