"""Losses and gradients are those of TRL on the same model, tokens and advantages, where TRL has the method.

The first test pays for the import of TRL, which takes seconds.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.config import LossConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.scoring import Scoring, TokenScorer
from reference_training import gradients, largest_gap
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tiny_recipe import bare_recipe

PROMPT, TURN = 3, 9
LENGTHS = torch.tensor([1, 9, 4, 6])


def batch() -> BatchedDataDict:
    """Answers of LENGTHS tokens; the policy has moved away from `prev`, and `prev` is not quite the generator."""
    generator = torch.Generator().manual_seed(0)
    width = PROMPT + TURN
    ids = torch.randint(5, VOCAB_SIZE, (len(LENGTHS), width), generator=generator)
    mask = (torch.arange(width) >= PROMPT) & (torch.arange(width) < PROMPT + LENGTHS[:, None])
    data = BatchedDataDict(
        input_ids=ids,
        input_lengths=PROMPT + LENGTHS,
        token_mask=mask.to(torch.uint8),
        sample_mask=torch.ones(len(LENGTHS)),
        advantages=torch.tensor([1.0, -1.5, 0.5, 2.0]),
    )
    with torch.no_grad():
        current = scores(tiny_model("llama"), data)
    noise = [torch.randn(current.shape, generator=generator) * 0.4 for _ in range(3)]
    data["prev_logprobs"] = (current + noise[0]) * mask
    data["generation_logprobs"] = (data["prev_logprobs"] + noise[1]) * mask
    data["reference_policy_logprobs"] = (current + noise[2]) * mask
    return data


def scores(model: Any, data: BatchedDataDict) -> torch.Tensor:
    return TokenScorer(model, Scoring())(data).logprobs


def ours(cfg: LossConfig) -> tuple[float, dict[str, torch.Tensor]]:
    model, data = tiny_model("llama"), batch()
    loss, _ = PolicyGradientLoss(cfg)(
        scores(model, data),
        data,
        global_valid_seqs=torch.tensor(float(len(LENGTHS))),
        global_valid_toks=LENGTHS.sum().float(),
    )
    loss.backward()
    return loss.item(), gradients(model)


class Theirs:
    """TRL's trainers, on a tiny model that is never run beyond one loss."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import datasets
            import trl

        self._trl = trl
        self._common: dict[str, Any] = {
            "output_dir": str(directory),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "max_completion_length": TURN,
        }
        self._rows = datasets.Dataset.from_list([{"prompt": "a"}] * 2)

    def __call__(
        self,
        method: str,
        *,
        weights: torch.Tensor | None = None,
        prev: torch.Tensor | None = None,
        beta: float = 0.0,
        **options: Any,
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return loss and gradients of a trainer's loss; `weights` are of its correction for the generator."""
        model, data = tiny_model("llama"), batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = getattr(self._trl, f"{method}Trainer")(
                model=model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=getattr(self._trl, f"{method}Config")(**self._common, beta=0.0, **options),
                train_dataset=self._rows,
                processing_class=tiny_tokenizer(),
            )
        trainer.beta = beta  # set here, it asks for no reference model to load
        trainer.model.eval()  # one batch is then the whole
        answer = data["token_mask"][:, PROMPT:].long()
        prev = (data["prev_logprobs"] if prev is None else prev)[:, PROMPT:]
        inputs = {
            "prompt_ids": data["input_ids"][:, :PROMPT],
            "prompt_mask": torch.ones(len(LENGTHS), PROMPT, dtype=torch.int64),
            "completion_ids": data["input_ids"][:, PROMPT:],
            "completion_mask": answer,
            "advantages": data["advantages"],
            "old_per_token_logps": prev,
            "old_logps": prev.sum(-1),
            "ref_per_token_logps": data["reference_policy_logprobs"][:, PROMPT:],
            "num_items_in_batch": LENGTHS.sum(),
        }
        if weights is not None:
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
            inputs["importance_sampling_ratio"] = weights
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.item(), gradients(model)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    return Theirs(tmp_path_factory.mktemp("trl"))


def check_alike(
    one: tuple[float, dict[str, torch.Tensor]], other: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-4)
    assert one[0] != 0
    assert largest_gap(one[1], other[1]) < 1e-4


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2}),
        ("dr_grpo", {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2}),
        ("dapo", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
        (
            "gspo",
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),  # TRL's is the bound itself
    ],
)
def test_a_named_algorithm_has_trls_loss_and_gradient(
    theirs: Theirs, algorithm: str, options: dict[str, Any]
) -> None:
    loss = bare_recipe(algorithm, generation={"max_new_tokens": TURN}).loss
    check_alike(ours(loss), theirs("GRPO", **options))


def test_a_sequence_ratio_within_its_clips_has_trls_gradient(theirs: Theirs) -> None:
    # The clips of GSPO's paper leave no gradient to the rows of this batch.
    cfg = LossConfig(ratio_level="sequence", aggregation="sequence_mean", clip_low=0.9, clip_high=9.0)
    level = {"importance_sampling_level": "sequence", "epsilon": 0.9, "epsilon_high": 9.0}
    check_alike(ours(cfg), theirs("GRPO", loss_type="grpo", **level))


@pytest.mark.parametrize("gradient", ["value", "score_function"])
def test_the_kl_of_the_loss_is_trls(theirs: Theirs, gradient: Any) -> None:
    cfg = LossConfig(aggregation="sequence_mean", kl_coefficient=0.3, kl_gradient=gradient)
    options = {
        "loss_type": "grpo",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "use_bias_correction_kl": gradient != "value",
    }
    check_alike(ours(cfg), theirs("GRPO", beta=0.3, **options))


@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_the_correction_for_the_generator_is_trls(theirs: Theirs, kind: Any) -> None:
    data = batch()
    weights = (data["prev_logprobs"] - data["generation_logprobs"])[:, PROMPT:].exp()
    outside = (weights < 0.8) | (weights > 1.5)
    assert 0 < outside[data["token_mask"][:, PROMPT:] > 0].sum() < LENGTHS.sum()
    # TRL's token_truncate and token_mask.
    weights = weights.clamp(max=1.5) if kind == "tis" else weights.masked_fill(outside, 0.0)
    cfg = LossConfig(importance_correction=kind, importance_low=0.8, importance_high=1.5)
    options = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.2}
    check_alike(ours(cfg), theirs("GRPO", weights=weights, **options))


def test_the_gradient_of_rloo_is_trls_up_to_the_constant(theirs: Theirs) -> None:
    # TRL takes the ratio of whole answers, and its gradient is that of their logprob if the policy has not moved.
    cfg = bare_recipe("rloo", generation={"max_new_tokens": TURN}).loss
    _, gradient = ours(cfg.model_copy(update={"force_on_policy_ratio": True}))
    model, data = tiny_model("llama"), batch()
    with torch.no_grad():
        data["prev_logprobs"] = scores(model, data) * data["token_mask"]
    _, expected = theirs("RLOO", epsilon=0.2, prev=data["prev_logprobs"])
    scaled = {name: g * TURN for name, g in gradient.items()}
    assert largest_gap(scaled, expected) < 1e-4
