"""LoRA over matrices in 8 and 4 bits: the numbers of a plain base with the rounded values, held in fewer bytes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_plan import part, recipe
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headrace.algorithms.run import build_session, start_loop
from headrace.cli import app
from headrace.config import PolicyConfig
from headrace.errors import ConfigError
from headrace.models.automodel.quantized_base import (
    QuantizedLinear,
    quantized,
    quantized_bytes,
    round_base,
    whole,
)
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.utils.recipe import dump_recipe
from recorder import NeverStop, Recorder
from reference_training import PolicyGradient
from tiny_models import (
    save_tiny_model,
    tiny_batch,
    tiny_generation_config,
    tiny_policy_config,
    tiny_tokenizer,
)
from tiny_recipe import tiny_recipe
from torchao_path import need_torchao

need_torchao()

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
KINDS = ["int8", "nf4"]


def worker(base: str, **changes: Any) -> AutomodelPolicyWorker:
    cfg = tiny_policy_config("qwen2", lora={"rank": 4, "alpha": 8.0, "base": base}, **changes)
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )


def logprobs(policy: AutomodelPolicyWorker) -> torch.Tensor:
    return policy.get_logprobs(tiny_batch(LENGTHS))["logprobs"]


def train(policy: AutomodelPolicyWorker, seed: int) -> torch.Tensor:
    return policy.train(tiny_batch(LENGTHS, seed=seed), PolicyGradient())["grad_norm"]


def base_layers(policy: AutomodelPolicyWorker) -> list[Any]:
    return [m.base_layer for m in policy.model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_near_its_values_in_fewer_bytes_and_rounds_the_same_again(kind: str) -> None:
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    held = quantized(weight, kind)
    gap = (whole(held, torch.float32) - weight).abs()
    if kind == "int8":
        assert torch.equal(whole(held, torch.float32), held.qdata.float() * held.scale)
        assert bool((gap <= weight.abs().amax(1, keepdim=True) / 127 * 0.51).all())
        assert quantized_bytes(weight, kind) == held.qdata.nbytes + held.scale.nbytes
    else:
        assert 0.02 < float(gap.mean()) < 0.1
        assert quantized_bytes(weight, kind) == held.quantized_data.nbytes + held.quantized_scalers.nbytes
    assert torch.equal(whole(held, torch.float32), whole(quantized(weight, kind), torch.float32))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_scores_and_trains_as_a_plain_base_of_the_rounded_values_bit_for_bit(
    kind: str, precision: str
) -> None:
    rounded, plain = worker(kind, precision=precision), worker("plain", precision=precision)
    before = logprobs(plain)
    for ours, theirs in zip(base_layers(rounded), base_layers(plain), strict=True):
        assert isinstance(ours, QuantizedLinear)
        theirs.weight.data.copy_(whole(ours.weight, theirs.weight.dtype))
    assert torch.equal(logprobs(rounded), logprobs(plain))
    assert not torch.equal(logprobs(rounded), before)
    for seed in range(2):
        assert torch.equal(train(rounded, seed), train(plain, seed))
    ours, theirs = dict(rounded.named_weights()), dict(plain.named_weights())
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    reference = [p.get_reference_policy_logprobs(tiny_batch(LENGTHS)) for p in (rounded, plain)]
    assert torch.equal(*(r["reference_logprobs"] for r in reference))


@pytest.mark.parametrize("kind", KINDS)
def test_no_whole_matrix_is_kept_for_the_backward_pass(kind: str) -> None:
    layer = QuantizedLinear(torch.nn.Linear(64, 64), kind)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = layer(torch.ones(2, 64, requires_grad=True))
    assert torch.Size([64, 64]) not in kept
    x = torch.ones(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, whole(layer.weight, torch.float32).sum(0).expand(2, -1))
    assert out.shape == (2, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    policy = worker(kind)
    train(policy, 0)
    policy.save_checkpoint(tmp_path)
    again = worker(kind)
    again.load_checkpoint(tmp_path)
    assert torch.equal(train(policy, 1), train(again, 1))
    assert torch.equal(logprobs(policy), logprobs(again))


def test_a_run_updates_its_generator_by_the_adapter_and_exports_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = save_tiny_model(tmp_path / "model", "qwen2")
    lora = {"rank": 4, "base": "nf4"}
    changes = {"model": {"path": str(base)}, "tokenizer": {}, "lora": lora}
    guard = {"guard": {"enabled": True, "every_n_steps": 1, "max_logprob_gap": 1e-4}}
    plan = tiny_recipe(
        tmp_path / "run",
        policy={k: v for k, v in changes.items()},
        generation=guard,
        grpo={"max_num_steps": 2},
        data={"train_size": 16, "validation_size": 4},
        env={"exact": False},
    )
    session, recorder = build_session(plan), Recorder()
    try:
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    gaps = [r.metrics["mismatch/guard_gap_max"] for r in recorder.steps]
    assert max(gaps) < 1e-4, "generator and trainer have the same base"
    sent = {r.metrics["weights/update_bytes"] for r in recorder.steps}
    assert max(sent) < 0.5 * sum(f.stat().st_size for f in base.glob("*.safetensors"))
    (tmp_path / "mine.yaml").write_text(dump_recipe(plan))
    runner = CliRunner()
    assert runner.invoke(app, ["train", "mine.yaml", "run_dir=runs"]).exit_code == 0
    done = runner.invoke(app, ["export", "runs", "out"])
    assert done.exit_code == 0, done.stderr
    assert "policy.lora.base=nf4: the adapter is merged into the rounded matrices" in done.stdout
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rounded = AutoModelForCausalLM.from_pretrained(base)
    round_base(rounded, plan.policy.lora, torch.float32)
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = exported.state_dict()[name] - rounded.state_dict()[name]
    assert 0 < int(torch.linalg.matrix_rank(moved)) <= 4
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config") is None
    other = runner.invoke(app, ["train", "mine.yaml", "run_dir=runs", "policy.lora.base=int8"])
    assert other.exit_code == 2
    assert "policy.lora.base differs from that of the checkpoint (nf4 -> int8)" in other.stderr


def test_the_plan_of_memory_has_fewer_bytes_of_weights() -> None:
    from headrace.models.memory_plan import plan_memory

    sizes = {base: plan_memory(recipe(lora={"rank": 4, "base": base})) for base in ("plain", "nf4")}
    saved = part(sizes["plain"], "weights") - part(sizes["nf4"], "weights")
    values = 4 * (2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * 256)  # of the matrices of four layers
    assert saved == 2 * values - (values // 2 + values // 64)


def test_several_workers_are_refused_and_a_missing_torchao_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tiny_policy_config(lora={"rank": 4, "base": "nf4"}).model_dump()
    with pytest.raises(
        ValueError, match=r"lora.base=nf4 with workers=2: .*set workers=1, or lora.base=plain"
    ):
        PolicyConfig.model_validate({**values, "workers": 2})
    with pytest.raises(ConfigError, match=r"a matrix of \(3, 5\) is no multiple of 64 values; set .*int8"):
        quantized(torch.ones(3, 5), "nf4")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(
        ConfigError, match=r"policy.lora.base needs torchao .*pip install 'headrace\[torchao\]'"
    ):
        quantized(torch.ones(2, 64), "int8")
