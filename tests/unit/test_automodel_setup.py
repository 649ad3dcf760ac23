"""Models, tokenizers, optimizers and schedules from a recipe, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.models.automodel.setup import (
    build_optimizer,
    build_scheduler,
    enable_activation_checkpointing,
    load_model,
    load_tokenizer,
    lr_factor,
    resolve_device,
)
from tiny_models import CONFIGS, VOCAB_SIZE, save_tiny_model, tiny_model, tiny_policy_config, tiny_tokenizer

TOKENIZER = {"builder": "characters", "characters": "abc"}


def _from(directory: Path, **changes: Any) -> PolicyConfig:
    values = {"model": {"path": str(directory)}, "device": "cpu", "max_total_sequence_length": 32, **changes}
    return PolicyConfig.model_validate(values)


def _config(values: dict[str, Any], **changes: Any) -> PolicyConfig:
    merged = {"model": {"config": values}, "tokenizer": TOKENIZER, "max_total_sequence_length": 32, **changes}
    return PolicyConfig.model_validate({"device": "cpu", **merged})


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def _equal(a: Any, b: Any) -> bool:
    return all(torch.equal(_weights(a)[name], _weights(b)[name]) for name in _weights(a))


# Models.


def test_the_weights_of_a_model_made_from_a_config_depend_on_the_seed_alone() -> None:
    cfg = tiny_policy_config("llama")
    torch.manual_seed(1)
    first = load_model(cfg, seed=3)
    torch.manual_seed(2)
    assert _equal(first, load_model(cfg, seed=3))
    assert not _equal(first, load_model(cfg, seed=4))


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load_model(tiny_policy_config("llama"), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_directory_gives_its_weights_in_float32_and_evaluation_mode(tmp_path: Path) -> None:
    saved = tiny_model("qwen3_moe", seed=5)
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_model(_from(tmp_path), seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert _equal(model, saved.float())


def test_a_config_without_a_vocabulary_takes_the_tokenizers() -> None:
    values = {k: v for k, v in CONFIGS["llama"].items() if k != "vocab_size"}
    model = load_model(_config(values), seed=0)
    tokenizer = load_tokenizer(_config(values))
    assert model.config.vocab_size == len(tokenizer) == 8
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_dropout_and_router_noise_are_off() -> None:
    noisy = {**CONFIGS["llama"], "attention_dropout": 0.3}
    assert load_model(_config(noisy), seed=0).config.attention_dropout == 0.0
    moe = {**CONFIGS["qwen3_moe"], "output_router_logits": True}
    assert load_model(_config(moe), seed=0).config.output_router_logits is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 64}, r"policy\.model\.config has no model_type"),
        ({"model_type": "qwen3moe"}, r"model_type=qwen3moe: .*close names: qwen3_moe"),
        ({"model_type": "llama", "num_hiden_layers": 2}, r"num_hiden_layers.*did you mean num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": "wide"}, r"policy\.model\.config: .*hidden_size"),
        ({**CONFIGS["llama"], "vocab_size": 4}, r"tokenizer has 8 tokens and the model vocab_size=4"),
        ({**CONFIGS["llama"], "max_position_embeddings": 16}, r"max_total_sequence_length=32 .*=16"),
        (
            {**CONFIGS["gemma2"]},
            r"policy\.model: transformers cannot build .*attn_implementation=sdpa \(eager works for most\)",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_with_key_and_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(_config(values), seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -4}, r"^policy\.model\.config\.hidden_size=-4: expected 1 or more$"),
        ({"num_attention_heads": 0}, r"config\.num_attention_heads=0: expected 1 or more$"),
        ({"num_hidden_layers": -1}, r"config\.num_hidden_layers=-1: expected 1 or more$"),
        ({"num_experts_per_tok": 0}, r"config\.num_experts_per_tok=0: expected 1 or more$"),
        ({"num_experts": -8}, r"config\.num_experts=-8: expected 0 or more$"),
        ({"num_experts_per_tok": 99}, r"cannot run .*; num_experts_per_tok=99 is more than num_experts="),
        (
            {"hidden_act": "nope"},
            r"cannot build this model: config\.hidden_act=nope is no name that it knows$",
        ),
    ],
    ids=str,
)
def test_a_size_or_name_that_no_model_has_is_refused_by_its_key_and_blames_no_other(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(_config({**CONFIGS["qwen3_moe"], **changes}), seed=0)
    assert "implementation" not in str(caught.value)


def test_experts_of_a_model_without_any_are_refused_by_that_key_alone() -> None:
    cfg = _config(CONFIGS["llama"])
    model = cfg.model.model_copy(update={"experts_implementation": "grouped_mm"})
    with pytest.raises(
        ConfigError, match="this model with experts_implementation=grouped_mm: Llama"
    ) as caught:
        load_model(cfg.model_copy(update={"model": model}), seed=0)
    assert "attn_implementation" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 3}, {"num_experts_per_tok": 99}], ids=str)
def test_sizes_that_only_a_forward_pass_refuses_are_refused_before_the_run(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model\.config: the Qwen3MoeForCausalLM .*cannot run"):
        load_model(_config({**CONFIGS["qwen3_moe"], **changes}), seed=0)


def test_directories_that_are_no_models_are_refused(tmp_path: Path) -> None:
    for prepare, message in (
        (lambda d: d / "absent", "no such directory"),
        (lambda d: d, "no config.json"),
    ):
        with pytest.raises(ConfigError, match=rf"policy\.model\.path=.*{message}"):
            load_model(_from(prepare(tmp_path)), seed=0, tokenizer=tiny_tokenizer())
    save_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights there"):
        load_model(_from(tmp_path), seed=0)


def test_missing_weights_are_refused_instead_of_drawn_at_random(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight \(1 in all\)"
    ):
        load_model(_from(tmp_path), seed=0)


def test_damaged_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"policy\.model") as caught:
        load_model(_from(tmp_path), seed=0)
    assert "\n" not in str(caught.value)


def test_cuda_where_there_is_none_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match=r"policy\.device=cuda.*set policy\.device=cpu"):
        resolve_device(tiny_policy_config("llama", device="cuda"))
    assert resolve_device(tiny_policy_config("llama", device="auto")).type == "cpu"


# Tokenizers.


def test_the_tokenizer_is_the_models_own_unless_another_is_named(tmp_path: Path) -> None:
    model_dir = save_tiny_model(tmp_path / "model", "llama")
    other = tmp_path / "other"
    load_tokenizer(_config(CONFIGS["llama"])).save_pretrained(other)
    assert len(load_tokenizer(_from(model_dir))) == VOCAB_SIZE
    assert len(load_tokenizer(_from(model_dir, tokenizer={"path": str(other)}))) == 8


def test_a_tokenizer_without_padding_pads_with_end_of_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    save = tiny_model("llama")
    save.save_pretrained(tmp_path)
    loaded = load_tokenizer(_from(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id


def test_a_missing_tokenizer_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.model\.path=.*set policy\.tokenizer\.path"):
        load_tokenizer(_from(tmp_path))
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.path=/nowhere: no such directory"):
        load_tokenizer(_from(tmp_path, tokenizer={"path": "/nowhere"}))
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.builder=characters"):
        load_tokenizer(_config(CONFIGS["llama"], tokenizer={}))


# Optimizer and schedule.


def test_weight_decay_is_on_matrices_and_expert_stacks_only() -> None:
    model = tiny_model("qwen3_moe")
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.5), name


@pytest.mark.parametrize(
    ("cfg", "factors"),
    [
        ({}, [1.0] * 4),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"kind": "linear", "warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"kind": "linear", "decay_steps": 2, "min_lr_ratio": 0.5}, [1, 0.75, 0.5, 0.5]),
        ({"kind": "cosine", "decay_steps": 2}, [1, 0.5, 0, 0]),
    ],
)
def test_schedules_warm_up_and_decay_as_declared(cfg: dict[str, Any], factors: list[float]) -> None:
    schedule = SchedulerConfig(**cfg)
    assert [lr_factor(u, schedule) for u in range(len(factors))] == pytest.approx(factors, abs=1e-12)


def test_a_resumed_schedule_continues_where_it_was() -> None:
    cfg, model = SchedulerConfig(kind="cosine", warmup_steps=3, decay_steps=10), tiny_model("llama")
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    schedule = build_scheduler(optimizer, cfg)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    again = build_optimizer(model, OptimizerConfig(lr=0.1))
    resumed = build_scheduler(again, cfg, updates_done=5)
    assert again.param_groups[0]["lr"] == rates[5]
    again.step()
    resumed.step()
    assert again.param_groups[0]["lr"] == rates[6]


# Activation checkpointing.


def _saved_and_gradients(model: Any) -> tuple[int, dict[str, Any]]:
    """Elements kept between forward and backward, and the gradients."""
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(input_ids=torch.arange(5, 45).view(4, 10), use_cache=False).logits
    logits.sum().backward()
    return sum(saved), {name: p.grad for name, p in model.named_parameters()}


def test_activation_checkpointing_keeps_gradients_bit_for_bit_and_saves_less() -> None:
    plain, checkpointed = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    enable_activation_checkpointing(checkpointed)
    assert not checkpointed.training
    all_saved, grads = _saved_and_gradients(plain)
    few_saved, again = _saved_and_gradients(checkpointed)
    assert few_saved < 0.6 * all_saved
    assert all(torch.equal(grads[n], again[n]) for n in grads)
