"""Router replay as a training step sees it: the fall-back budget, and what every stage has to prove."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from headrace.algorithms.route_trace import TRACE_COLUMNS, TRACED_SAMPLES, trace_of, write_trace
from headrace.config import RouterReplayConfig
from headrace.data_plane.route_binding import as_word
from headrace.errors import ReplayError
from headrace.models.router_replay.choices import check_choices
from headrace.models.router_replay.proof import ReplayProof, TracedRows

_SHOWN = 4
_PLACES = (
    ("fetched", "what the workers fetched is not what the rollout recorded (transport, or stale rows)"),
    ("sliced", "the rows cut for forwards are not those that were fetched (a shift, or rows taken twice)"),
    ("used", "the routers did not use the rows that they were given"),
)


def budget_mask(cfg: RouterReplayConfig, missing: torch.Tensor, sample_ids: Sequence[str]) -> torch.Tensor:
    """Return (N,) float32, 0 for samples with a larger share of `missing` rows than the budget allows.

    Raises:
        ReplayError: there are such samples, and `on_excess` is "refuse"; names the worst.
    """
    if not cfg.enabled:
        return torch.ones(len(missing))
    over = missing > cfg.max_missing_fraction
    if cfg.on_excess == "refuse" and bool(over.any()):
        worst = missing.argsort(descending=True)[: min(_SHOWN, int(over.sum()))].tolist()
        shown = ", ".join(f"'{sample_ids[i]}' {float(missing[i]):.1%}" for i in worst)
        raise ReplayError(
            f"{int(over.sum())} of {len(missing)} samples lack the routes of more than "
            f"policy.router_replay.max_missing_fraction={cfg.max_missing_fraction:.1%} of their rows: {shown}. The "
            "engine did not record them; raise the fraction, or set policy.router_replay.on_excess=mask"
        )
    return 1.0 - over.float()


def check_stage(stage: str, proof: ReplayProof, *, digests: torch.Tensor, total_tokens: torch.Tensor) -> None:
    """Hold a stage to exactly one use of every recorded row.

    Args:
        stage: Its name, for the message.
        proof: The sum over all workers.
        digests: (N,) of the step's samples, as the rollout computed them (`route_facts`).
        total_tokens: (N,) of the same samples.

    Raises:
        ReplayError: nothing was replayed, rows that no router reached, rows used twice or not at all, or rows that are
            not those of the rollout; says between which two places they changed.
    """
    proof.receipt.require_effect()
    expected = int((total_tokens - 1).clamp(min=0).sum())
    if proof.tokens != expected:
        fault = "rows were consumed twice" if proof.tokens > expected else "rows were never reached"
        raise ReplayError(
            f"stage '{stage}': {proof.tokens} tokens were replayed, the step's samples have {expected}: {fault}"
        )
    recorded = as_word(digests.sum())
    for place, fault in _PLACES:
        if getattr(proof, place) != recorded:
            raise ReplayError(
                f"stage '{stage}': the routes' digest is {getattr(proof, place):016x} ({place}), and "
                f"{recorded:016x} at rollout: {fault}; policy.router_replay.trace=true and 'headrace trace-check' "
                "show where"
            )


def stage_metrics(stage: str, proof: ReplayProof) -> dict[str, float]:
    """Return counts of rows (token x layer) and agreement with the trainer's own choice, by metric name."""
    totals = proof.receipt.totals()
    metrics = {
        f"router_replay/{stage}/{name}": float(totals[name])
        for name in ("replayed", "native", "never_reached")
    }
    if proof.agreement is None:
        return metrics
    for name, share in proof.agreement.metrics().items():
        # One stage of a step compares; the name without a stage is the step's.
        metrics |= {f"router_replay/{stage}/{name}": share, f"router_replay/{name}": share}
    for name, values in proof.agreement.per_layer().items():
        metrics |= {
            f"router_replay/{name}_layer_{layer}": value
            for layer, value in enumerate(values)
            if value == value
        }
    return metrics


class ReplayWatch:
    """Router replay of one step: the budget, a check after each stage, metrics, and the trace if asked for.

    `read` returns padded columns of the step's samples.
    """

    def __init__(
        self,
        cfg: RouterReplayConfig,
        *,
        step: int,
        sample_ids: Sequence[str],
        total_tokens: torch.Tensor,
        missing: torch.Tensor,
        digests: torch.Tensor,
        read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]],
        trace_dir: Path | None = None,
    ) -> None:
        self._cfg = cfg
        self._step = step
        self._sample_ids = sample_ids
        self._total_tokens = total_tokens
        self._missing = missing
        self._digests = digests
        self._read = read
        self._trace_dir = trace_dir if cfg.enabled and cfg.trace else None
        self._traced: dict[str, Sequence[TracedRows]] = {}
        self.metrics: dict[str, float] = {}

    def budget(self) -> torch.Tensor:
        """Return (N,) float32, 0 for samples beyond the fall-back budget; see `budget_mask`."""
        mask = budget_mask(self._cfg, self._missing, self._sample_ids)
        if self._cfg.enabled:
            self.metrics["router_replay/missing_fraction"] = float(self._missing.mean())
            self.metrics["router_replay/masked_samples"] = float((1 - mask).sum())
        return mask

    def check(self, proofs: Mapping[str, ReplayProof], stage: str) -> None:
        """Hold the stage that has just run to what it must prove; with a trace, write that first.

        Raises:
            ReplayError: no proof of the stage, or one that `check_stage` or `check_choices` refuses.
        """
        if not self._cfg.enabled:
            return
        if stage not in proofs:
            raise ReplayError(
                f"stage '{stage}' ran without router replay, and policy.router_replay.enabled=true"
            )
        proof = proofs[stage]
        if self._trace_dir is not None:
            self._traced[stage] = proof.traced
            columns = self._read(TRACE_COLUMNS)
            trace = trace_of(self._step, self._sample_ids, self._digests, columns, self._traced)
            write_trace(self._trace_dir, trace)
            self.metrics[TRACED_SAMPLES] = float(len(self._sample_ids))
        check_stage(stage, proof, digests=self._digests, total_tokens=self._total_tokens)
        check_choices(stage, proof.agreement, self._cfg.min_exact_fraction, proof.evidence)
        self.metrics |= stage_metrics(stage, proof)
