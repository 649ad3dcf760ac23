"""What a step does inside, for displays: spans of time, the store after each stage, microbatches, tokens of samples.

It is bounded by the keys `logging.detail_*` and `logging.token*`, and told to `RunObserver.on_detail`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from headrace.config_logging import LoggingConfig
from headrace.data_plane.interfaces import KVBatchMeta, PartitionReport
from headrace.data_plane.observability import DataPlaneEvent, listening
from headrace.distributed.plan_report import bins_of
from headrace.models.policy.lm_policy import Policy

Tell = Callable[[int, str, dict[str, Any]], None]

_TRACKS = {
    "rollout": ("rollout",),
    "validation": ("rollout",),
    "prev_logprobs": ("ranks",),
    "reference_logprobs": ("ranks",),
    "train": ("ranks",),
    "checkpoint": ("ranks",),
    "update_weights": ("rollout", "ranks"),
    "wait": (),
}
"""Who works in a stage; in any other it is the driver."""
_MOST_STORE_SPANS = 32
_MOST_ROWS = 4096
_UNCONSUMED_SHOWN = 8
_LEASES_SHOWN = 16
_TOKENS_OF_THE_PROMPT = 32
_TOKEN_COLUMNS = ("input_ids", "token_mask", "generation_logprobs", "prev_logprobs", "advantages")
_DIGITS = 4


class StepDetail:
    """Watches the stages of a run and tells of every n-th step; as it is made without arguments, it is silent."""

    def __init__(
        self, cfg: LoggingConfig | None = None, tell: Tell = lambda step, kind, values: None
    ) -> None:
        self._cfg = cfg
        self._tell = tell
        self._step = 0
        self._texts: dict[int, str] = {}

    def _is_due(self, step: int) -> bool:
        every = 0 if self._cfg is None else self._cfg.detail_every
        return bool(every) and (step % every == 0 or step == 1)

    @contextmanager
    def stage(self, step: int, name: str, policy: Policy) -> Iterator[None]:
        """Tell that a stage has begun, and at its end how long it took and what the store holds then."""
        self._step = step
        if not self._is_due(step):
            yield
            return
        started, begun = time.time(), time.perf_counter()
        self._tell(step, "begin", {"stage": name, "at_s": round(started, 3)})
        operations: list[tuple[str, float, float]] = []

        def note(event: DataPlaneEvent) -> None:
            if len(operations) < _MOST_STORE_SPANS:
                start = time.time() - event.seconds
                operations.append((event.op, round(start, 4), round(event.seconds, 6)))

        with listening(note):
            yield
        span: dict[str, Any] = {"name": name, "tracks": list(_TRACKS.get(name, ("driver",)))}
        span |= {"start_s": round(started, 4), "seconds": round(time.perf_counter() - begun, 6)}
        self._tell(step, "span", {**span, "operations": operations})
        report = policy.store_report(limit=_UNCONSUMED_SHOWN)
        if report is not None and report[1].rows:
            self._tell(step, "store", {"stage": name, "partitions": [_partition(*report)]})

    def beside(self, step: int, calls: Iterable[tuple[str, float, float]]) -> None:
        """Tell of rollouts that have gone on beside the stages: whose, their begin by `time.time`, their seconds."""
        for who, started, seconds in calls if self._is_due(step) else ():
            times = {"start_s": round(started, 4), "seconds": round(seconds, 6)}
            self._tell(step, "span", {"name": "rollout", "tracks": [who], "beside": True, **times})

    def microbatches(self, policy: Policy, lengths: Sequence[int]) -> None:
        """Tell of the microbatches in which the present step's rows have trained."""
        if not self._is_due(self._step) or not 0 < len(lengths) <= _MOST_ROWS:
            return
        plan = policy.training_plan(lengths)
        self._tell(
            self._step, "packing", {"stage": "train", **bins_of(plan, policy.cfg.train_micro_batch_size)}
        )

    def tokens(self, policy: Policy, rows: Any) -> list[dict[str, Any]]:
        """Return the tokens of the first rows, with what is known of each; see `_token_rows`."""
        cfg = self._cfg
        if (
            cfg is None
            or not cfg.tokens_of_samples
            or not cfg.samples_per_step
            or not self._is_due(self._step)
        ):
            return []
        known = rows.fields if isinstance(rows, KVBatchMeta) else rows
        names = [name for name in _TOKEN_COLUMNS if known is None or name in known]
        count = min(cfg.tokens_of_samples, cfg.samples_per_step)
        columns = policy.read_columns(rows, names, count)
        return [self._token_row(columns, row, policy) for row in range(len(columns["input_ids"]))]

    def _token_row(self, columns: Mapping[str, Any], row: int, policy: Policy) -> dict[str, Any]:
        """Return {text, mask, logprob, gap, advantage, cut}: lists from shortly before the first sampled token on.

        `gap` is the trainer's logprob minus the generator's.
        """
        assert self._cfg is not None
        mask = columns["token_mask"][row].bool()
        sampled = mask.nonzero().flatten()
        if not len(sampled):
            return {}
        start = max(0, int(sampled[0]) - _TOKENS_OF_THE_PROMPT)
        end = int(sampled[-1]) + 1
        stop = min(end, start + self._cfg.tokens_per_sample)
        part = slice(start, stop)
        own = mask[part].tolist()
        ids = columns["input_ids"][row][part].tolist()
        result = {
            "text": [self._text(policy, i) for i in ids],
            "mask": [int(m) for m in own],
            "cut": stop < end,
        }
        generation = columns["generation_logprobs"][row][part]
        result["logprob"] = _numbers(generation, own)
        if "prev_logprobs" in columns:
            result["gap"] = _numbers(columns["prev_logprobs"][row][part] - generation, own)
        advantages = columns["advantages"][row]
        each = advantages[part] if advantages.dim() else advantages.expand(len(ids))
        return {**result, "advantage": _numbers(each, own)}

    def _text(self, policy: Policy, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(policy.tokenizer.decode([token]))
        return self._texts[token]


def _numbers(values: torch.Tensor, own: Sequence[bool]) -> list[float | None]:
    pairs = zip(values.tolist(), own)
    return [round(value, _DIGITS) if is_own and math.isfinite(value) else None for value, is_own in pairs]


def _partition(name: str, report: PartitionReport) -> dict[str, Any]:
    columns = {
        column: {"ready": report.rows_by_column.get(column, 0), "bytes": size}
        for column, size in report.bytes_by_column.items()
    }
    leases = [
        {
            "claim": lease.claim,
            "task": lease.task,
            "holder": lease.holder,
            "rows": lease.rows,
            "left_s": round(lease.seconds_left, 1) if math.isfinite(lease.seconds_left) else None,
        }
        for lease in report.leases[:_LEASES_SHOWN]
    ]
    return {
        "id": name,
        "rows": report.rows,
        "columns": columns,
        "tasks": {task: vars(counts) for task, counts in report.tasks.items()},
        "producers": dict(list(report.rows_by_producer.items())[:_LEASES_SHOWN]),
        "leases": leases,
        "left_count": report.unconsumed_rows,
        "left": [{"id": row.sample_id, "producer": row.producer} for row in report.unconsumed],
    }
