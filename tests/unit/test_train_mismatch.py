"""The generator's gap, summed in the loss over microbatches, is that of the whole batch."""

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.algorithms.sample_stats import (
    MismatchLoss,
    mismatch_stats,
    mismatch_summary,
    mismatch_totals,
    split_mismatch,
)
from headrace.config import LossConfig
from headrace.errors import SchemaError
from headrace.models.interfaces import LossFn
from headrace.models.policy.results import combine_metrics

ROWS, WIDTH = 7, 9


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows that count or do not, one without tokens, an excluded token, and junk wherever nothing counts."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, generation = (-torch.rand(ROWS, WIDTH, generator=generator) * 3 for _ in range(2))
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.6).to(torch.uint8)
    mask[2] = 0
    mask[3, 4] = 1
    samples = (torch.rand(ROWS, generator=generator) < 0.7).float()
    samples[2:4] = 1
    logprobs[3, 4] = -math.inf
    junk = (mask == 0) | (samples == 0)[:, None]
    generation[junk] = math.nan
    return {
        "prev_logprobs": logprobs,
        "generation_logprobs": generation,
        "token_mask": mask,
        "sample_mask": samples,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator),
    }


def counts(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": weights.sum()}


def mismatch(data: dict[str, torch.Tensor]) -> dict[str, float]:
    return mismatch_summary(mismatch_stats(data), data["sample_mask"])


def measured(data: dict[str, torch.Tensor], cuts: list[int]) -> dict[str, float]:
    """What a step reports whose microbatches end at `cuts`; empty ones are dummies of one masked row."""
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, ROWS]):
        rows = {name: column[start:stop] for name, column in data.items()}
        if start == stop:
            rows = {name: torch.zeros_like(column[:1]) for name, column in data.items()}
        totals = mismatch_totals(rows["prev_logprobs"], rows, **counts(rows))
        parts.append({f"mismatch/{name}": float(value) for name, value in totals.items()})
    return split_mismatch(combine_metrics(parts))[1]


@given(st.integers(0, 50), st.lists(st.integers(0, ROWS), max_size=4))
def test_sums_over_microbatches_are_the_mismatch_of_the_batch(seed: int, cuts: list[int]) -> None:
    data = batch(seed)
    expected = mismatch(data)
    got = measured(data, sorted(cuts))
    assert got.keys() == expected.keys()
    assert len(expected) == 10
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_batch_without_tokens_has_no_mismatch() -> None:
    data = batch()
    data["sample_mask"].zero_()
    assert measured(data, [3]) == mismatch(data) == {}


def test_loss_gradient_and_metrics_stay_as_they_are() -> None:
    plain = PolicyGradientLoss(LossConfig(force_on_policy_ratio=True))
    wrapped = MismatchLoss(plain)
    assert isinstance(wrapped, LossFn)
    assert wrapped.loss_type == plain.loss_type
    results = []
    for loss_fn in (plain, pickle.loads(pickle.dumps(wrapped))):
        data = batch()
        logprobs = data.pop("prev_logprobs").requires_grad_()
        loss, metrics = loss_fn(logprobs, data, **counts(data))
        loss.backward()
        results.append((loss.detach(), logprobs.grad, metrics))
    (loss, gradient, metrics), (other, other_gradient, all_metrics) = results
    assert torch.equal(loss, other)
    assert torch.equal(gradient, other_gradient)
    assert not any(value.requires_grad for value in all_metrics.values())
    own, gaps = split_mismatch({name: float(value) for name, value in all_metrics.items()})
    assert own == {name: float(value) for name, value in metrics.items()}
    assert gaps == pytest.approx(mismatch(batch()), rel=1e-5)


class Waits(TorchDispatchMode):
    """Collects operations that make a GPU's host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.seen += [func] if func in waits else []
        return func(*args, **(kwargs or {}))


def test_a_microbatch_waits_for_nothing() -> None:
    data = batch()
    with Waits() as waits:
        mismatch_totals(data["prev_logprobs"], data, **counts(data))
    assert waits.seen == []
    with Waits() as waits:
        mismatch(data)
    assert waits.seen, "the mode sees nothing"


def test_a_missing_column_is_refused_by_name() -> None:
    data = batch()
    logprobs = data.pop("prev_logprobs")
    del data["generation_logprobs"]
    with pytest.raises(SchemaError, match=r"'generation_logprobs'.*gap is measured"):
        mismatch_totals(logprobs, data, **counts(data))
