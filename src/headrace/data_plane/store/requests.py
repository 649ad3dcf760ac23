"""What clients ask of a store, checked and made plain before it leaves the caller: the same for every store."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, Self

from headrace.errors import DataPlaneError
from headrace.utils.arguments import names_list, texts, whole_number


class Registration(NamedTuple):
    """How a partition is opened; see `DataPlaneClient.register_partition`."""

    partition_id: str
    num_samples: int
    tasks: tuple[str, ...]
    group_size: int = 1
    group_tag: str | None = None
    enums: Mapping[str, tuple[Any, ...]] = {}

    @classmethod
    def of(
        cls,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        group_tag: str | None = None,
    ) -> Self:
        """Return the registration that a call asks for.

        Raises:
            SchemaError: a text in place of a list.
            DataPlaneError: sizes that are no numbers of rows, or samples that make no whole groups.
        """
        names_list("fields", fields)
        samples = whole_number("num_samples", num_samples, 0, DataPlaneError)
        size = 1
        if grpo_group_size is not None:
            size = whole_number("grpo_group_size", grpo_group_size, 1, DataPlaneError)
        if samples % size:
            raise DataPlaneError(
                f"partition '{partition_id}' expects {samples} samples, which are no whole groups of "
                f"grpo_group_size={size}"
            )
        values = {
            tag: tuple(names_list(f"enums['{tag}']", allowed)) for tag, allowed in (enums or {}).items()
        }
        return cls(
            partition_id, samples, tuple(texts("consumer_tasks", consumer_tasks)), size, group_tag, values
        )


class ClaimRequest(NamedTuple):
    """Which rows a claim takes; see `DataPlaneClient.claim_meta`."""

    partition_id: str
    task: str
    fields: list[str]
    rows: int
    allow_partial: bool = False

    @classmethod
    def of(
        cls,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        allow_partial: bool = False,
    ) -> Self:
        """Return the request that a call asks for.

        Raises:
            SchemaError: a text in place of a list.
            DataPlaneError: a `batch_size` that is no number of rows.
        """
        count = whole_number("batch_size", batch_size, 1, DataPlaneError)
        return cls(partition_id, task_name, texts("required_fields", required_fields), count, allow_partial)


def waiting_time(blocking: bool, timeout_s: float) -> float:
    """Return how many seconds a claim may wait: none if it is not blocking; infinity is for ever.

    Raises:
        DataPlaneError: no number of seconds.
    """
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        raise DataPlaneError(
            f"timeout_s={timeout_s!r}; expected a number of seconds, or math.inf to wait for ever"
        )
    return max(float(timeout_s), 0.0) if blocking else 0.0
