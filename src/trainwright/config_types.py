"""What the sections of a config are made of: their strict base, and the kinds of values that several share."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

_CLOCK = re.compile(r"(?:(?P<d>\d+)[-:](?=\d+:\d+:\d+$))?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def parse_duration(value: object) -> object:
    """Return seconds for a whole number, `HH:MM:SS`, `D-HH:MM:SS` or `DD:HH:MM:SS`; raise ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("write seconds, HH:MM:SS, D-HH:MM:SS or DD:HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.group("d", "h", "m", "s"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Duration = Annotated[int, Field(gt=0), BeforeValidator(parse_duration)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Directive = Annotated[str, Field(pattern=r"^[^\r\n]+$")]  # text for one line of a batch script
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]  # becomes a folder and part of a job name


class Section(BaseModel):
    """A part of a config: frozen, strict, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def disagreements(self) -> Iterator[str]:
        """Yield what no single field shows: values that contradict each other whatever the hardware."""
        return iter(())

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = tuple(self.disagreements())
        if problems:
            raise ValueError("\n".join(problems))
        return self
