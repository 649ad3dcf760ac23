"""Router replay as a training step sees it: how many rows may be missing, and a check after every stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.config import RouterReplayConfig
from headrace.errors import ReplayError
from headrace.models.router_replay.diagnosis import check_choices
from headrace.models.router_replay.stats import ReplayStats, TracedRows
from headrace.models.router_replay.trace import TRACE_COLUMNS, TRACED_SAMPLES, trace_of, write_trace

_SHOWN = 4


@dataclass
class ReplayWatch:
    """Router replay of one step: checks of its samples and stages, their metrics, and the trace if asked for.

    Per sample, (N,) each: `total_tokens`, the `missing` fraction of rows and the `digests` (`route_facts`). `read`
    returns padded columns of the samples.
    """

    cfg: RouterReplayConfig
    step: int
    sample_ids: Sequence[str]
    total_tokens: torch.Tensor
    missing: torch.Tensor
    digests: torch.Tensor
    read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
    trace_dir: Path | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    _traced: dict[str, Sequence[TracedRows]] = field(default_factory=dict)

    def budget(self) -> torch.Tensor:
        """Return (N,) float32, 0 for samples that lack a larger fraction of their rows than the recipe allows.

        Raises:
            ReplayError: there are such samples, and `on_excess` is "refuse"; names the worst.
        """
        cfg, missing = self.cfg, self.missing
        if not cfg.enabled:
            return torch.ones(len(missing))
        over = missing > cfg.max_missing_fraction
        if cfg.on_excess == "refuse" and bool(over.any()):
            worst = missing.argsort(descending=True)[: min(_SHOWN, int(over.sum()))].tolist()
            shown = ", ".join(f"'{self.sample_ids[i]}' {float(missing[i]):.1%}" for i in worst)
            raise ReplayError(
                f"{int(over.sum())} of {len(missing)} samples lack the routes of more than "
                f"policy.router_replay.max_missing_fraction={cfg.max_missing_fraction:.1%} of their rows: {shown}. The "
                "engine did not record them; raise the fraction, or set policy.router_replay.on_excess=mask"
            )
        self.metrics["router_replay/missing_fraction"] = float(missing.mean())
        self.metrics["router_replay/masked_samples"] = float(over.sum())
        return 1.0 - over.float()

    def check(self, replayed: Mapping[str, ReplayStats], stage: str) -> None:
        """Check the stage that has just run; with a trace, write that first.

        Raises:
            ReplayError: the stage replayed nothing, or `ReplayStats.check` or `check_choices` refuses it.
        """
        if not self.cfg.enabled:
            return
        if stage not in replayed:
            raise ReplayError(
                f"stage '{stage}' ran without router replay, and policy.router_replay.enabled=true"
            )
        stats = replayed[stage]
        if self.cfg.trace and self.trace_dir is not None:
            self._traced[stage] = stats.rows
            columns = self.read(TRACE_COLUMNS)
            trace = trace_of(self.step, self.sample_ids, self.digests, columns, self._traced)
            write_trace(self.trace_dir, trace)
            self.metrics[TRACED_SAMPLES] = float(len(self.sample_ids))
        stats.check(stage, digests=self.digests, total_tokens=self.total_tokens)
        check_choices(stage, stats, self.cfg.min_exact_fraction)
        self.metrics |= stats.metrics(stage)
