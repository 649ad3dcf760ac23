"""What clients of all stores have in common: requests that only ask the store which rows there are."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tensordict import TensorDict

from headrace.data_plane.claim_terms import ORDERS, PartitionReport, TagRule, seconds, values_list
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import CLAIM
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import RowFacts
from headrace.errors import ClaimTimeout, DataPlaneError
from headrace.utils.arguments import texts, whole_number


class StoreClient(DataPlaneClient):
    """A client of a `SampleStore`, here or elsewhere; how rows are put and read is for the adapter to say."""

    @abstractmethod
    def _ask(self, operation: str, *arguments: object) -> Any:
        """Return what the store's method of that name returns."""

    @abstractmethod
    def _await(self, operation: str, *arguments: object, wait_s: float) -> Any:
        """Return what the store's method of that name returns that waits: after that time at the latest."""

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
        texts("fields", fields)
        texts("partition_id and tags", [partition_id, group_tag or "", *(enums or ())])
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
        values = {tag: values_list(f"enums['{tag}']", given) for tag, given in (enums or {}).items()}
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
        lease_s: float | None = None,
        holder: str | None = None,
        where: Sequence[TagRule] = (),
        order: Literal["oldest", "freshest"] = "oldest",
    ) -> KVBatchMeta | None:
        rows = whole_number("batch_size", batch_size, 1, DataPlaneError)
        names = texts("required_fields", required_fields)
        if order not in ORDERS:
            raise DataPlaneError(f"order={order!r}; expected {' or '.join(map(repr, ORDERS))}")
        other = next((rule for rule in where if not isinstance(rule, TagRule)), None)
        if other is not None:
            raise DataPlaneError(f"where has {other!r}; expected rules, as TagRule('reward', min_spread=0.1)")
        texts("holder", [holder or ""])
        lease = None if lease_s is None else seconds("lease_s", lease_s, above_zero=True)
        wait_s = seconds("timeout_s", timeout_s)
        request = ClaimRequest(
            partition_id, task_name, names, rows, allow_partial, lease, holder, list(where), order
        )
        facts: RowFacts | None = self._await("claim", request, wait_s=wait_s if blocking else 0.0)
        if facts is None and blocking:
            raise ClaimTimeout(self._ask("claim_timeout_text", request))
        if facts is None or not facts.sample_ids:
            return None
        return facts.meta(
            partition_id, task_name, names, None if facts.claim is None else {CLAIM: facts.claim}
        )

    def renew_claim(self, meta: KVBatchMeta, lease_s: float) -> None:
        self._ask("renew", meta.partition_id, _claim_of(meta), seconds("lease_s", lease_s, above_zero=True))

    def release_claim(self, meta: KVBatchMeta) -> None:
        self._ask("release", meta.partition_id, _claim_of(meta))

    def finish_claim(self, meta: KVBatchMeta) -> None:
        self._ask("finish", meta.partition_id, _claim_of(meta))

    def claimed_ids(self, meta: KVBatchMeta) -> list[str]:
        ids: list[str] = self._ask("claimed_ids", meta.partition_id, _claim_of(meta))
        return ids

    def mark_consumed(self, partition_id: str, task_name: str, sample_ids: Sequence[str]) -> None:
        self._ask("mark_consumed", partition_id, task_name, texts("sample_ids", sample_ids))

    def wait_for_room(self, partition_id: str, rows: int, timeout_s: float = 60.0) -> None:
        count, wait_s = whole_number("rows", rows, 0, DataPlaneError), seconds("timeout_s", timeout_s)
        if not self._await("has_room", partition_id, count, wait_s=wait_s):
            room = self._ask("room", partition_id)
            raise ClaimTimeout(
                f"partition '{partition_id}' has room for {room} samples, and {count} were to come, after "
                f"timeout_s={wait_s:g}. Clear samples that are done with, or register the partition with more"
            )

    def partition_report(self, partition_id: str, limit: int = 100) -> PartitionReport:
        most = whole_number("limit", limit, 0, DataPlaneError)
        report: PartitionReport = self._ask("report", partition_id, most)
        return report

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            names = self._ask("shared_columns", meta.partition_id, meta.sample_ids)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        is_consumed: bool = self._ask("is_consumed", partition_id, texts("task_names", task_names))
        return is_consumed

    def clear_samples(
        self, sample_ids: Sequence[str] | None, partition_id: str, *, claim: str | None = None
    ) -> None:
        if sample_ids is None and claim is not None:
            raise DataPlaneError(
                f"clear_samples(None) removes partition '{partition_id}' with rows that are not of the claim; "
                "give the ids of the claim's rows (meta.sample_ids), or leave out claim to remove all"
            )
        ids = None if sample_ids is None else texts("sample_ids", sample_ids)
        self._ask("clear", partition_id, ids, claim)

    def partition_ids(self) -> list[str]:
        return list(self._ask("sample_ids"))

    def sample_ids(self, partition_id: str) -> list[str]:
        by_partition: dict[str, list[str]] = self._ask("sample_ids")
        return by_partition.get(partition_id, [])

    def stored_bytes(self, partition_id: str | None = None) -> int:
        by_partition: dict[str, int] = self._ask("stored_bytes")
        return sum(by_partition.values()) if partition_id is None else by_partition.get(partition_id, 0)


def _claim_of(meta: KVBatchMeta) -> str:
    claim = meta.extra_info.get(CLAIM)
    if not isinstance(claim, str):
        raise DataPlaneError(
            f"the meta of {meta.size} rows has no claim in extra_info; claim_meta gives one with lease_s=<seconds>"
        )
    return claim
