"""What a policy worker needs to work from metadata: fetch its rows, run, write results back.

A worker class mixes this in beside its own `train`, `get_logprobs` and `get_reference_policy_logprobs`, which
take a BatchedDataDict. Ranks that hold parts of one replica (tensor, context, pipeline siblings) see the same
rows: one of them, the leader, talks to the store.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.column_io import write_columns
from headrace.data_plane.factory import build_data_plane_client
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.observability import MetricsDataPlaneClient
from headrace.data_plane.route_binding import sample_salts
from headrace.data_plane.schema import (
    ELEM_COUNTS_PER_GB,
    FIELDS,
    GLOBAL_FORWARD_PAD_SEQLEN,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    PER_TOKEN_FIELDS,
    PREV_UNFILTERED_LOGPROBS,
    ROUTE_SALTS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_ID,
    UNFILTERED_LOGPROBS,
    FieldSpec,
    Layout,
    declare,
    pad_values,
)
from headrace.data_plane.sharing import share_rows
from headrace.data_plane.wire import materialize
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.collectives import broadcast_columns
from headrace.distributed.columns import object_array
from headrace.distributed.ragged import is_nested
from headrace.errors import DataPlaneError
from headrace.utils.arguments import names_list

FetchPolicy = Literal["auto", "independent", "leader_broadcast"]
Batch = BatchedDataDict


class TQWorkerMixin:
    """Metadata-driven entry points of a policy worker."""

    _dp_client: DataPlaneClient | None = None
    _pad_token_id: int = 0

    # What the worker class brings.

    train: Callable[..., dict[str, Any]]
    train_microbatches: Callable[..., None]
    get_logprobs: Callable[..., Batch]
    get_reference_policy_logprobs: Callable[..., Batch]

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        """Return the group of this replica's tensor, context and pipeline ranks; None if it is one rank."""
        return None

    def _is_replica_leader(self) -> bool:
        """Return whether this rank speaks for its replica: the first of its group, whichever axes it spans."""
        group = self._get_replica_group()
        return group is None or dist.get_rank(group) == 0

    # Set-up.

    def setup_data_plane(
        self, cfg: DataPlaneConfig | Mapping[str, Any], columns: Sequence[FieldSpec] = ()
    ) -> None:
        declare(*columns)
        self._dp_client = build_data_plane_client(cfg, bootstrap=False)

    def close_data_plane(self) -> None:
        """Let go of the store; may be called twice."""
        if self._dp_client is not None:
            self._dp_client.close()
            self._dp_client = None

    shutdown = close_data_plane

    def _client(self) -> DataPlaneClient:
        if self._dp_client is None:
            raise DataPlaneError("the worker has no store; call setup_data_plane(cfg) first")
        return self._dp_client

    # Reading.

    def _fetch(
        self,
        meta: KVBatchMeta,
        *,
        layout: Layout = "padded",
        fetch_policy: FetchPolicy = "auto",
        preprocess: Callable[[Batch], Batch] | None = None,
    ) -> Batch:
        """Read the rows of `meta`, padded to the batch-wide target, with the driver's microbatch plan.

        The columns are `meta.fields`, or, where that is None, all that the rows share.
        `auto` has the leader of a replica of several ranks fetch and broadcast, and a replica of one rank
        fetch for itself. `preprocess` runs on the fetching rank, before the broadcast.
        """
        if fetch_policy not in get_args(FetchPolicy):
            raise DataPlaneError(
                f"fetch_policy='{fetch_policy}'; expected one of {', '.join(get_args(FetchPolicy))}"
            )
        group = None if fetch_policy == "independent" else self._get_replica_group()
        if group is None:
            if fetch_policy == "leader_broadcast":
                raise DataPlaneError(
                    "fetch_policy='leader_broadcast' needs a replica of several ranks; use 'auto'"
                )
            data = self._read(meta, layout, preprocess)
        else:
            data = self._read_and_broadcast(meta, layout, preprocess, group)
        if ROUTED_EXPERTS_FIELD in data:
            data[ROUTE_SALTS] = sample_salts(meta.sample_ids)
        data.token_columns = PER_TOKEN_FIELDS
        # The driver's microbatch plan is never derived again on a rank.
        for key in {MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB} & meta.extra_info.keys():
            setattr(data, key, meta.extra_info[key])
        return data

    def _read(self, meta: KVBatchMeta, layout: Layout, preprocess: Callable[[Batch], Batch] | None) -> Batch:
        data = self._materialize(meta, self._read_wire(meta), layout)
        return BatchedDataDict(preprocess(data)) if preprocess else data

    def _read_wire(self, meta: KVBatchMeta) -> TensorDict:
        if meta.fields is None:
            return self._client().get_data(meta)
        return self._client().get_samples(meta.sample_ids, meta.partition_id, meta.fields)

    def _materialize(self, meta: KVBatchMeta, wire: TensorDict, layout: Layout) -> Batch:
        data = materialize(
            wire,
            layout=layout,
            pad_value_dict=pad_values(self._pad_token_id),
            pad_to_seqlen=int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0)),
        )
        if layout == "padded":
            undeclared = [(name, value) for name, value in wire.items() if name not in FIELDS]
            data.ragged_columns = [n for n, v in undeclared if isinstance(v, torch.Tensor) and is_nested(v)]
        return data

    def _read_and_broadcast(
        self,
        meta: KVBatchMeta,
        layout: Layout,
        preprocess: Callable[[Batch], Batch] | None,
        group: dist.ProcessGroup,
    ) -> Batch:
        """Have the leader read; its siblings get the rows without padding, or what `preprocess` made of them."""
        if preprocess and layout != "padded":
            raise DataPlaneError(
                f"layout='{layout}' cannot be broadcast after preprocessing; use fetch_policy='independent'"
            )
        src = dist.get_global_rank(group, 0)
        if preprocess:
            read = partial(self._read, meta, layout, preprocess)
            return BatchedDataDict(broadcast_columns(read, src=src, group=group))
        wire = share_rows(partial(self._read_wire, meta), src=src, group=group)
        return self._materialize(meta, wire, layout)

    # Writing.

    def _write_back(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Write columns of the rows of `meta`; only the leader of a replica does, once.

        Raises:
            SchemaError: a per-token column that does not fit the declared lengths, naming column, row, sizes; or
                routes that no router can have chosen.
        """
        if self._is_replica_leader():
            write_columns(self._client(), meta, fields)

    def _write_back_result_field(
        self, meta: KVBatchMeta, result: Mapping[str, Any], *, result_key: str, field: str
    ) -> None:
        """Write `result[result_key]` back as the column `field`."""
        if result_key not in result:
            raise DataPlaneError(
                f"the worker returned {sorted(result)}; expected '{result_key}' for column '{field}'"
            )
        self._write_back(meta, {field: result[result_key]})

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has put and got so far, by column; empty if nothing measures them."""
        return bytes_moved(self._client())

    # Entry points.

    def train_presharded(
        self,
        meta: KVBatchMeta,
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        return self.train(self._fetch_named(meta), loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)

    def train_microbatches_presharded(self, meta: KVBatchMeta, loss_fn: Any, mbs: int | None = None) -> None:
        """Add the gradients of this rank's rows to the open train step; see the worker's split step."""
        self.train_microbatches(self._fetch_named(meta), loss_fn, mbs=mbs)

    def _fetch_named(self, meta: KVBatchMeta) -> Batch:
        """Return this rank's rows with their ids, by which training names a sample that it cannot use."""
        data = self._fetch(meta)
        data[SAMPLE_ID] = object_array(meta.sample_ids)
        return data

    def get_logprobs_presharded(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, **options: Any
    ) -> None:
        """Compute the policy's logprobs of this rank's rows and write them back as `prev_logprobs`.

        `options` go to the worker's `get_logprobs`. Unfiltered logprobs, if it returns some, are written back too.
        """
        result = self.get_logprobs(self._fetch(meta), micro_batch_size=micro_batch_size, **options)
        self._write_back_result_field(meta, result, result_key="logprobs", field="prev_logprobs")
        if UNFILTERED_LOGPROBS in result:
            self._write_back(meta, {PREV_UNFILTERED_LOGPROBS: result[UNFILTERED_LOGPROBS]})

    def get_reference_policy_logprobs_presharded(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None
    ) -> None:
        """Compute the reference policy's logprobs and write them back as `reference_policy_logprobs`."""
        result = self.get_reference_policy_logprobs(self._fetch(meta), micro_batch_size=micro_batch_size)
        self._write_back_result_field(
            meta, result, result_key="reference_logprobs", field="reference_policy_logprobs"
        )

    def reduce_rows_presharded(
        self, meta: KVBatchMeta, reduce_fn: Callable[[Batch], Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return `reduce_fn` of this rank's rows: a few numbers per row, small enough for the driver.

        Raises:
            DataPlaneError: a result that is not one number per row.
        """
        reduced = dict(reduce_fn(self._fetch(meta)))
        for name, value in reduced.items():
            if tuple(value.shape) != (meta.size,):
                raise DataPlaneError(
                    f"'{name}' has shape {tuple(value.shape)} for {meta.size} rows; "
                    "expected one number per row, bulk columns stay in the store"
                )
        return reduced

    def derive_columns_presharded(
        self, meta: KVBatchMeta, make: Callable[[Batch], Mapping[str, torch.Tensor]]
    ) -> list[str]:
        """Write the columns that `make` gives of this rank's rows, and return their names."""
        made = dict(make(self._fetch(meta)))
        self._write_back(meta, made)
        return list(made)


def bytes_moved(client: DataPlaneClient) -> dict[str, int]:
    """Return the bytes put and got through `client`, by column; empty unless observability is on."""
    return client.moved_bytes() if isinstance(client, MetricsDataPlaneClient) else {}


def plan_fields(available: Sequence[str] | None, wanted: Sequence[str]) -> list[str]:
    """Return what to ask the store for, in the order wanted.

    A declared column that nobody has written yet is left out (a run without a reference has no reference
    logprobs). An undeclared one is asked for all the same, so that the store names it if it is not there. With
    `available` None, all is asked for but optional columns.
    """
    names_list("fields", wanted)
    if available is None:
        return [name for name in wanted if name not in FIELDS or not FIELDS[name].optional]
    there = set(available)
    return [name for name in wanted if name in there or name not in FIELDS]
