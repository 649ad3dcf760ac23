"""What clients of all stores have in common: requests that only ask the store which rows there are."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta, meta_of_checked
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.sample_store import RowFacts
from headrace.errors import DataPlaneError
from headrace.utils.arguments import names_list, texts, whole_number


class StoreClient(DataPlaneClient):
    """A client of a `SampleStore`, here or elsewhere; how rows are put and read is for the adapter to say."""

    @abstractmethod
    def _ask(self, operation: str, *arguments: object) -> Any:
        """Return what the store's method of that name returns."""

    @abstractmethod
    def _claim(self, request: ClaimRequest, wait_s: float) -> RowFacts | None:
        """Return what `SampleStore.claim` returns, after that time at the latest; a negative time waits for nothing.

        Raises:
            ClaimTimeout: rows did not come, and they were waited for.
        """

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        group_tag: str | None = None,
    ) -> None:
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
        tasks = tuple(texts("consumer_tasks", consumer_tasks))
        values = {tag: tuple(names_list(f"enums['{tag}']", given)) for tag, given in (enums or {}).items()}
        self._ask("register", Registration(partition_id, samples, tasks, size, group_tag, values))

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        allow_partial: bool = False,
    ) -> KVBatchMeta | None:
        rows = whole_number("batch_size", batch_size, 1, DataPlaneError)
        names = texts("required_fields", required_fields)
        if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
            raise DataPlaneError(
                f"timeout_s={timeout_s!r}; expected a number of seconds, or math.inf to wait for ever"
            )
        request = ClaimRequest(partition_id, task_name, names, rows, allow_partial)
        facts = self._claim(request, max(float(timeout_s), 0.0) if blocking else -1.0)
        if facts is None or not facts.sample_ids:
            return None
        ids, lengths, own_tags = facts
        return meta_of_checked(partition_id, task_name, ids, names, lengths, tags=own_tags)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            names = self._ask("shared_columns", meta.partition_id, meta.sample_ids)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        is_consumed: bool = self._ask("is_consumed", partition_id, texts("task_names", task_names))
        return is_consumed

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        self._ask("clear", partition_id, None if sample_ids is None else texts("sample_ids", sample_ids))

    def partition_ids(self) -> list[str]:
        return list(self._ask("sample_ids"))

    def sample_ids(self, partition_id: str) -> list[str]:
        by_partition: dict[str, list[str]] = self._ask("sample_ids")
        return by_partition.get(partition_id, [])

    def stored_bytes(self, partition_id: str | None = None) -> int:
        by_partition: dict[str, int] = self._ask("stored_bytes")
        return sum(by_partition.values()) if partition_id is None else by_partition.get(partition_id, 0)
