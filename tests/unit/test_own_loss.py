"""`loss.target`: what a loss of the user's own is weighed by, against the built-in loss that it writes again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.algorithms.own_code import OwnLoss
from headrace.algorithms.sample_stats import MismatchLoss
from headrace.config import LossConfig
from headrace.errors import ConfigError
from headrace.utils.targets import extend_import_path

CODE = """
def clipped(inputs, cfg):
    ratio = (inputs.logprobs - inputs["prev_logprobs"]).exp()
    gain = (ratio * inputs["advantages"]).minimum(
        ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * inputs["advantages"]
    )
    return -gain


def corrected(inputs, cfg):
    return clipped(inputs, cfg)


corrected.corrects_importance = True


def whole(logprobs, data, global_valid_seqs, global_valid_toks):
    return logprobs.sum() / global_valid_toks, {}


def whole_corrected(logprobs, data, global_valid_seqs, global_valid_toks):
    return whole(logprobs, data, global_valid_seqs, global_valid_toks)


whole_corrected.corrects_importance = True
whole_corrected.per_sequence_metrics = ["spread"]
"""


@pytest.fixture(scope="module", autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own losses")
    (Path(folder) / "own_losses.py").write_text(CODE)
    extend_import_path((str(folder),))


def loss_of(name: str, **keys: Any) -> OwnLoss:
    return OwnLoss.of(LossConfig(target=f"own_losses:{name}", **keys), ())


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(scale: float) -> torch.Tensor:
        return -scale * torch.rand(6, 9, generator=generator)

    prev = draw(2.0)
    return {
        "token_mask": (torch.rand(6, 9, generator=generator) < 0.7).float(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 0.5, 1]),
        "advantages": draw(2.0) + 1,
        "prev_logprobs": prev,
        "generation_logprobs": prev
        + torch.linspace(-1.5, 1.5, 6)[:, None] * torch.rand(6, 9, generator=generator),
        "logprobs": prev + 0.3 * torch.randn(6, 9, generator=generator),
    }


def value_and_gradient(loss_fn: Any) -> tuple[torch.Tensor, torch.Tensor]:
    data = batch()
    logprobs = data.pop("logprobs").requires_grad_()
    tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    loss, _ = loss_fn(logprobs, data, global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=tokens)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "sequence_mask"])
def test_a_loss_per_token_is_corrected_as_the_built_in_one(correction: str, aggregation: str) -> None:
    keys: dict[str, Any] = {
        "importance_correction": correction,
        "aggregation": aggregation,
        "max_sequence_logprob_error": 1.8,
    }
    loss, gradient = value_and_gradient(loss_of("clipped", **keys))
    expected, expected_gradient = value_and_gradient(PolicyGradientLoss(LossConfig(**keys)))
    assert loss == expected
    assert torch.equal(gradient, expected_gradient)
    out = (gradient == 0).all(-1).sum()
    assert out > 1, "of the masked row alone, the limit would have taken none out"


def test_a_loss_that_corrects_itself_is_not_weighed_again() -> None:
    keys = {"importance_correction": "tis", "importance_high": 1.2}
    loss, _ = value_and_gradient(loss_of("corrected", **keys))
    assert loss == value_and_gradient(loss_of("clipped"))[0]
    assert loss != value_and_gradient(loss_of("clipped", **keys))[0]


def test_a_whole_loss_beside_a_correction_has_to_say_that_it_corrects() -> None:
    with pytest.raises(
        ConfigError, match=r"own_losses:whole .*importance_correction=tis .*corrects_importance"
    ):
        loss_of("whole", importance_correction="tis")
    loss_of("whole")
    loss_of("whole_corrected", importance_correction="tis")


@pytest.mark.parametrize(
    ("loss_fn", "by_sequence"),
    [
        (lambda: loss_of("clipped"), set()),
        (lambda: loss_of("clipped", aggregation="sequence_mean"), {"policy_loss"}),
        (lambda: loss_of("whole_corrected"), {"spread"}),
        (lambda: PolicyGradientLoss(LossConfig(aggregation="sequence_mean")), None),
    ],
)
def test_metrics_per_sequence_are_known_through_the_wrapper_for_mismatch(
    loss_fn: Any, by_sequence: set[str] | None
) -> None:
    inner = loss_fn()
    assert by_sequence is None or inner.per_sequence_metrics == by_sequence
    assert MismatchLoss(inner).per_sequence_metrics == inner.per_sequence_metrics
