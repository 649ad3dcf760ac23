"""An adapter in one process: what it trains, what it leaves alone, what a checkpoint and a generator get of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from headrace.errors import ConfigError, GenerationError
from headrace.models.automodel import lora
from headrace.models.automodel.lora import add_adapter, merged
from headrace.models.generation.hf import HFGenerator
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.router_replay import Routes, install
from reference_training import PolicyGradient
from tiny_models import (
    CONFIGS,
    save_tiny_model,
    tiny_batch,
    tiny_generation_config,
    tiny_model,
    tiny_policy_config,
    tiny_tokenizer,
)

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
LORA = {"rank": 4, "alpha": 8.0}


def worker(
    name: str = "qwen3_moe", *, lora: dict[str, Any] | None = None, **changes: Any
) -> AutomodelPolicyWorker:
    adapter = {} if lora == {} else {"lora": {**LORA, **(lora or {})}}
    reference = changes.pop("with_reference", True)
    cfg = tiny_policy_config(name, **adapter, **changes)
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=reference
    )


def train(policy: AutomodelPolicyWorker, steps: int = 1, seed: int = 0) -> dict[str, Any]:
    for step in range(steps):
        result = policy.train(tiny_batch(LENGTHS, seed=seed + step), PolicyGradient())
    return result


def logprobs(policy: AutomodelPolicyWorker) -> torch.Tensor:
    return policy.get_logprobs(tiny_batch(LENGTHS))["logprobs"]


def reference(policy: AutomodelPolicyWorker) -> torch.Tensor:
    return policy.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]


def weights_of(policy: AutomodelPolicyWorker) -> dict[str, torch.Tensor]:
    return dict(merged(policy.model.state_dict().items(), policy.cfg.lora))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2", "llama"])
def test_a_fresh_adapter_changes_no_bit_also_with_frozen_weights_held_in_bfloat16(
    name: str, precision: str
) -> None:
    plain, fresh = worker(name, lora={}, precision=precision), worker(name, precision=precision)
    assert torch.equal(logprobs(plain), logprobs(fresh))
    assert torch.equal(reference(plain), reference(fresh))
    held = {p.dtype for n, p in fresh.model.named_parameters() if "base_layer" in n}
    assert held == {torch.float32 if precision == "float32" else torch.bfloat16}
    assert {p.dtype for p in fresh.model.parameters() if p.requires_grad} == {torch.float32}


def test_training_moves_the_adapter_alone_and_the_reference_is_the_model_without_it() -> None:
    policy = worker()
    before, first = logprobs(policy), {n: p.clone() for n, p in policy.model.named_parameters()}
    train(policy)
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, first[n])}
    assert moved == {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in n for n in moved)
    assert not torch.equal(logprobs(policy), before)
    assert torch.equal(reference(policy), before)
    assert len(policy.optimizer.state) == len(moved) == 16


def test_the_policy_scores_as_the_merged_model_does() -> None:
    policy = worker("qwen2")
    train(policy, 2)
    plain = worker("qwen2", lora={})
    plain.model.load_state_dict(weights_of(policy))
    torch.testing.assert_close(logprobs(policy), logprobs(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"lora": {"dropout": 0.5}}])
def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bit_for_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    policy = worker(**changes)
    train(policy)
    policy.snapshot_reference()
    kept = reference(policy)
    assert torch.equal(kept, logprobs(policy))
    train(policy, seed=1)
    policy.save_reference(tmp_path / "reference")
    policy.save_checkpoint(tmp_path / "saved")
    files = {
        f.relative_to(tmp_path / "saved").as_posix() for f in (tmp_path / "saved").rglob("*") if f.is_file()
    }
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "trainer.json",
    }
    again = worker(**changes)
    again.load_reference(tmp_path / "reference")
    again.load_checkpoint(tmp_path / "saved")
    assert torch.equal(reference(again), kept)
    after = []
    for one in (policy, again):
        train(one, seed=2)
        after.append(logprobs(one))
    assert torch.equal(*after)
    assert not torch.equal(after[0], kept)


def test_dropout_drops_in_training_and_not_in_scoring() -> None:
    losses = []
    for dropout in (0.0, 0.9):
        policy = worker("qwen2", lora={"dropout": dropout})
        train(policy)
        assert torch.equal(logprobs(policy), logprobs(policy))
        losses.append(train(policy, seed=1)["loss"])
    assert not torch.equal(*losses)


def test_dropout_follows_from_the_run_s_seed_and_from_nothing_else() -> None:
    losses = []
    for caller in (1, 2):
        torch.manual_seed(caller)
        policy = worker("qwen2", lora={"dropout": 0.5})
        train(policy)
        before = torch.get_rng_state()
        losses.append([train(policy, seed=1)["loss"], train(policy, seed=1)["loss"]])
        assert torch.equal(torch.get_rng_state(), before), "the caller's numbers go on"
    assert losses[0] == losses[1]


def test_peft_reads_a_checkpoint_s_adapter(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "qwen2")
    policy = worker("qwen2", model={"path": str(base), "config": None}, tokenizer={})
    train(policy)
    policy.save_checkpoint(tmp_path / "saved")
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved" / "adapter"
    ).eval()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        assert torch.equal(read(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    assert read.peft_config["default"].base_model_name_or_path == str(base)


def test_activation_checkpointing_gives_the_adapter_the_same_gradients_from_recomputed_layers() -> None:
    norms, runs = [], []
    for on in (False, True):
        policy = worker("qwen2", activation_checkpointing=on)
        seen: list[int] = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        norms.append(train(policy)["grad_norm"])
        runs.append(len(seen))
    assert torch.equal(*norms)
    assert runs[1] == 2 * runs[0]


def test_router_replay_and_an_adapter_work_together() -> None:
    model = tiny_model("qwen3_moe")
    add_adapter(model, worker().cfg.lora, seed=0)
    install(model)
    ids, seen = torch.arange(5, 17)[None], Routes.record()
    native = model(input_ids=ids, routes=seen).logits
    other = seen.ids.flip(0)
    assert torch.equal(model(input_ids=ids, routes=Routes.replay(seen.ids)).logits, native)
    replayed = model(input_ids=ids, routes=Routes.replay(other)).logits
    assert not torch.equal(replayed, native)
    replayed.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".lora_B." in n)


# The generator.


def test_a_generator_merges_every_update_into_the_first_weights() -> None:
    policy = worker("qwen2")
    generator = HFGenerator(tiny_model("qwen2"), tiny_tokenizer(), tiny_generation_config())
    generator._model.load_state_dict(weights_of(policy))
    first = {n: t.clone() for n, t in generator._model.state_dict().items()}
    for seed in range(3):
        train(policy, seed=seed)
        generator.update_weights(policy.named_weights(), seed)
    expected = weights_of(policy)
    for name, tensor in generator._model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)
    changed = {n for n, t in generator._model.state_dict().items() if not torch.equal(t, first[n])}
    assert {n.split(".")[-2] for n in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert generator.weight_version == 2


def test_an_update_moves_less_than_a_twentieth_of_the_bytes_of_all_weights() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 64}
    moved = []
    for adapter in ({}, {"rank": 4}):
        policy = worker(
            "qwen2", lora=adapter, model={"config": {**CONFIGS["qwen2"], **sizes}}, with_reference=False
        )
        sent = list(policy.named_weights())
        assert policy.sent_bytes() == sum(t.nbytes for _, t in sent)
        moved.append(policy.sent_bytes())
    assert 0 < moved[1] < 0.05 * moved[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.pop("model.layers.0.self_attn.q_proj.lora_A.weight"), "missing: .*q_proj.lora_A.weight"),
        (lambda w: w.update({"x.lora_A.weight": torch.zeros(4, 4)}), "unknown: x.weight"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 5)}),
            "wrong shape",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_the_generator_changes_nothing(change: Any, told: str) -> None:
    generator = HFGenerator(tiny_model("qwen2"), tiny_tokenizer(), tiny_generation_config())
    before = {n: t.clone() for n, t in generator._model.state_dict().items()}
    policy = worker("qwen2")
    train(policy)
    update = dict(policy.named_weights())
    change(update)
    with pytest.raises(GenerationError, match=told):
        generator.update_weights(update.items(), 1)
    assert all(torch.equal(t, before[n]) for n, t in generator._model.state_dict().items())


# Mistakes.


def test_a_target_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(
        ConfigError, match=r"policy.lora.targets=w_query: .*k_proj, o_proj, q_proj, v_proj, or all"
    ):
        worker(lora={"targets": ["w_query"]})
    with pytest.raises(ConfigError, match=r"targets=gate_up_proj: .*fused experts"):
        worker(lora={"targets": ["gate_up_proj"]})
    with pytest.raises(ConfigError, match=r"targets=lm_head: .*output head"):
        worker(lora={"targets": ["lm_head"]})


def test_checkpoints_of_all_weights_and_of_an_adapter_are_not_mistaken(tmp_path: Path) -> None:
    full, small = worker(lora={}), worker()
    full.save_checkpoint(tmp_path / "full")
    small.save_checkpoint(tmp_path / "small")
    with pytest.raises(
        ConfigError, match=r"policy.lora.rank=4: the checkpoint in .* holds all weights; remove"
    ):
        small.load_checkpoint(tmp_path / "full")
    with pytest.raises(
        ConfigError, match=r"policy.lora.rank=null: the checkpoint in .* holds an adapter; set"
    ):
        full.load_checkpoint(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"policy.lora.rank=2: the adapter in .* has rank 4"):
        worker(lora={"rank": 2}).load_checkpoint(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"k_proj.lora_A.weight has shape .* there and None"):
        worker(lora={"targets": ["v_proj"]}).load_checkpoint(tmp_path / "small")
    (tmp_path / "small" / "adapter" / "adapter_config.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"small/adapter: missing or damaged \(.* no JSON object\); use another"
    ):
        small.load_checkpoint(tmp_path / "small")


def test_a_missing_peft_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"policy.lora.rank needs peft .*; pip install 'headrace\[lora\]', or remove"
    ):
        lora.import_peft()
