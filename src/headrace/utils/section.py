"""What every section of a recipe is made of: its base and the types of its values."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# YAML has lists only; they become tuples.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Integers = Annotated[tuple[int, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of every section: immutable, no value of another type, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
