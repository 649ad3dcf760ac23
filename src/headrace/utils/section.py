"""What every section of a recipe is made of: its base, types of values, and how values are written."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; they become tuples.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Integers = Annotated[tuple[int, ...], Field(strict=False)]


def _finite(value: Any, key: str = "") -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value}: expected a finite number; the files of a run hold no other")
    entries = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, entry in entries:
        _finite(entry, f"{key}.{name}" if key else str(name))
    return value


# What others name: anything that the files of a run can hold.
Settings = Annotated[dict[str, Any], AfterValidator(_finite)]


class Section(BaseModel):
    """Base of every section: immutable, no value of another type, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def faults(self) -> Iterator[str]:
        """Yield what its values contradict each other in; the first becomes the error."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self


def plain(value: Any) -> Any:
    """Return mappings of any kind (OmegaConf's too) and sections, with the keys that they set, as dicts."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def written(value: object, most: int = 1000) -> str:
    """Return a value as overrides have it, cut to `most` characters."""
    if isinstance(value, tuple):
        return shortened(f"[{', '.join(map(written, value))}]", most)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
