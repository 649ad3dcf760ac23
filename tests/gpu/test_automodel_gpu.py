"""On a CUDA device: packed attention through varlen_attn, bfloat16 experts, and the worker's whole step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.attention import PACKED_ATTENTION, check_isolation, choose_attention
from headrace.models.automodel.data import Packing
from headrace.models.automodel.experts import GROUPED_EXPERTS
from headrace.models.automodel.scoring import Scoring, TokenScorer
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_training import PolicyGradient, gradients, largest_gap, naive_logprobs
from tiny_models import tiny_batch, tiny_generation_config, tiny_model, tiny_policy_config, tiny_tokenizer

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LENGTHS = [7, 12, 1, 3, 9, 12, 2]
LONG = [100, 33, 120, 64, 5, 128]
NAMES = ["llama", "qwen3_moe", "mistral_window", "gemma3"]


def _model(name: str, attention: str) -> Any:
    model = tiny_model(name, attn_implementation=attention).to(CUDA)
    if model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation(GROUPED_EXPERTS)
    return model


def _score(model: Any, data: BatchedDataDict, *, packed: bool, precision: str) -> torch.Tensor:
    scoring, packing = Scoring(chunk_tokens=64), Packing() if packed else None
    return TokenScorer(model, scoring, precision, packing=packing)(data).logprobs


def _batch(lengths: list[int], seed: int = 0) -> BatchedDataDict:
    return tiny_batch(lengths, seed=seed).to(CUDA)


@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
@pytest.mark.parametrize("name", NAMES)
def test_float32_packed_rows_score_like_single_rows_on_the_cpu(name: str, lengths: list[int]) -> None:
    cpu = tiny_batch(lengths)
    with torch.no_grad():
        truth = naive_logprobs(tiny_model(name), cpu["input_ids"], cpu["input_lengths"])
        packed = _score(_model(name, PACKED_ATTENTION), _batch(lengths), packed=True, precision="float32")
        padded = _score(_model(name, "sdpa"), _batch(lengths), packed=False, precision="float32")
    torch.testing.assert_close(packed.cpu(), truth, rtol=0, atol=5e-5)
    torch.testing.assert_close(padded.cpu(), truth, rtol=0, atol=5e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_packed_and_padded_rows_differ_by_rounding_only(name: str, lengths: list[int]) -> None:
    cpu = tiny_batch(lengths)
    with torch.no_grad():
        truth = naive_logprobs(tiny_model(name), cpu["input_ids"], cpu["input_lengths"])
    there = truth != 0
    gaps = []
    for attention, packed in ((PACKED_ATTENTION, True), ("sdpa", False)):
        model = _model(name, attention)
        scores = _score(model, _batch(lengths), packed=packed, precision="bfloat16")
        (scores * _batch(lengths)["advantages"]).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        gaps.append(float((scores.detach().cpu() - truth)[there].abs().mean()))
    # The mean distance from the float32 truth is that of the padded path.
    assert gaps[0] < 1.5 * gaps[1] + 1e-3
    assert gaps[0] < 0.2


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_bfloat16_packed_gradients_are_near_the_float32_ones(name: str) -> None:
    results = []
    for attention, packed, precision in (("sdpa", False, "float32"), (PACKED_ATTENTION, True, "bfloat16")):
        model = _model(name, attention)
        scores = _score(model, _batch(LONG), packed=packed, precision=precision)
        (scores * _batch(LONG)["advantages"]).sum().backward()
        results.append(torch.cat([g.flatten() for g in gradients(model).values()]))
    assert float(torch.nn.functional.cosine_similarity(results[0], results[1], dim=0)) > 0.99


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3"])
def test_changing_one_packed_sequence_leaves_the_others_bit_for_bit(name: str) -> None:
    model = _model(name, PACKED_ATTENTION)
    data, mixed = _batch(LONG, seed=1), _batch(LONG, seed=1)
    mixed["input_ids"][1] = _batch(LONG, seed=2)["input_ids"][1]
    with torch.no_grad():
        before = _score(model, data, packed=True, precision="bfloat16")
        after = _score(model, mixed, packed=True, precision="bfloat16")
    unchanged = [i for i in range(len(LONG)) if i != 1]
    assert torch.equal(before[unchanged], after[unchanged])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", NAMES)
def test_the_isolation_check_passes(name: str) -> None:
    check_isolation(_model(name, PACKED_ATTENTION))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_grouped_experts_repeat_bit_for_bit(precision: str) -> None:
    runs = []
    for _ in range(2):
        model = _model("qwen3_moe", "sdpa")
        _score(model, _batch(LONG), packed=False, precision=precision).sum().backward()
        runs.append(gradients(model))
    assert largest_gap(runs[0], runs[1]) < (1e-5 if precision == "float32" else 1e-2)


def _worker(**changes: Any) -> AutomodelPolicyWorker:
    cfg = tiny_policy_config(
        "qwen3_moe",
        device="cuda",
        sequence_packing={"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32},
        **changes,
    )
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )


def _planned() -> BatchedDataDict:
    args: Any = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": 32,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    parts, _ = tiny_batch([9, 4, 12, 7, 5, 3, 11, 8]).shard_by_batch_size(
        1, batch_size=8, sequence_packing_args=args
    )
    return parts[0]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_worker_trains_scores_and_resumes(precision: str, checkpointing: bool, tmp_path: Path) -> None:
    worker = _worker(precision=precision, activation_checkpointing=checkpointing)
    cpu = AutomodelPolicyWorker(
        tiny_policy_config("qwen3_moe", sequence_packing={"enabled": True}),
        tiny_generation_config(),
        tokenizer=tiny_tokenizer(),
        seed=0,
    )
    result, truth = worker.train(_planned(), PolicyGradient()), cpu.train(_planned(), PolicyGradient())
    tolerance = 1e-4 if precision == "float32" else 0.1
    torch.testing.assert_close(result["loss"], truth["loss"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(result["grad_norm"], truth["grad_norm"], rtol=tolerance, atol=tolerance)
    assert {t.dtype for _, t in worker.named_weights()} == {torch.float32}
    worker.save_checkpoint(tmp_path)
    again = _worker(precision=precision, activation_checkpointing=checkpointing)
    again.load_checkpoint(tmp_path)
    ours, theirs = (w.train(_planned(), PolicyGradient())["loss"] for w in (worker, again))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    scores = worker.get_logprobs(_planned())["logprobs"]
    assert scores.device.type == "cpu"
    assert scores.shape == (8, 12)
    assert worker.get_reference_policy_logprobs(_planned())["reference_logprobs"].isfinite().all()
    assert worker.peak_tflops() > 0


def test_flash_attention_is_chosen_only_where_it_is_installed() -> None:
    chosen = choose_attention(CUDA, torch.bfloat16, True, "sdpa")
    assert chosen in (PACKED_ATTENTION, "flash_attention_2")
    assert choose_attention(CUDA, torch.float32, True, "sdpa") == PACKED_ATTENTION
