"""What tensor parallelism splits, and what it refuses, before any process is started."""

from typing import Any

import pytest

from headrace.config import PolicyConfig
from headrace.distributed.topology import lay_out_ranks
from headrace.errors import ConfigError
from headrace.models.automodel.experts import GROUPED_EXPERTS
from headrace.models.automodel.tensor_parallel import FAMILY_PLAN, check_sizes, is_family, resolve_plan
from moe_families import tiny_moe
from tiny_models import tiny_model, tiny_policy_config


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "gemma2", "gemma3", "mistral_window"])
def test_a_family_splits_every_matrix_of_every_layer(name: str) -> None:
    model = tiny_model(name)
    plan = resolve_plan(model)
    assert is_family(model)
    for layer in range(2):
        for part in ("q_proj", "k_proj", "v_proj"):
            assert plan[f"layers.{layer}.self_attn.{part}"] == "colwise"
        assert plan[f"layers.{layer}.self_attn.o_proj"] == "rowwise"
        mlp = f"layers.{layer}.mlp"
        assert plan.get(f"{mlp}.experts", plan.get(f"{mlp}.down_proj")) in ("moe_tp_experts", "rowwise")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "gemma2", "gemma3"])
def test_the_plan_of_a_family_is_not_less_than_that_of_transformers(name: str) -> None:
    model = tiny_model(name)
    theirs = model.config.base_model_tp_plan
    inside_experts = {"layers.*.mlp.experts.gate_up_proj", "layers.*.mlp.experts.down_proj"}
    assert theirs.keys() - inside_experts <= FAMILY_PLAN.keys()


def test_other_models_take_the_plan_of_transformers() -> None:
    model = tiny_model("granite")
    assert not is_family(model)
    assert resolve_plan(model)["layers.1.mlp.down_proj"] == "rowwise"
    with pytest.raises(ConfigError, match=r"sequence_parallel: not for model_type=granite"):
        resolve_plan(model, sequence_parallel=True)


def test_a_norm_over_all_heads_leaves_attention_whole_and_splits_its_projections() -> None:
    plan = resolve_plan(tiny_moe("olmoe"))
    assert plan["layers.0.self_attn.q_proj"] == "colwise_gather_output"
    assert plan["layers.0.self_attn.o_proj"] == "rowwise_split_input"
    assert plan["layers.1.mlp.experts"] == "moe_tp_experts"


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_experts_are_shared_out_where_attention_has_no_plan(family: str) -> None:
    model = tiny_moe(family)
    plan = resolve_plan(model)
    assert plan["layers.1.mlp.experts"] == "moe_tp_experts"
    assert not any("self_attn" in name or "embed" in name for name in plan)
    with pytest.raises(ConfigError, match=f"sequence_parallel: not for model_type={family}"):
        resolve_plan(model, sequence_parallel=True)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no tensor-parallel plan for model_type=opt.*parallel\.tensor=1"):
        resolve_plan(tiny_model("opt"))


@pytest.mark.parametrize(
    ("ranks", "named"), [(4, "num_key_value_heads=2"), (3, "num_attention_heads=4")], ids=["kv", "heads"]
)
def test_sizes_that_the_ranks_do_not_divide_are_named(ranks: int, named: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=named):
        check_sizes(model, resolve_plan(model), ranks)


def test_experts_that_cannot_be_shared_out_are_refused() -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=r"experts_implementation=eager.*use grouped_mm"):
        check_sizes(model, resolve_plan(model), 2)
    model.set_experts_implementation(GROUPED_EXPERTS)
    check_sizes(model, resolve_plan(model), 2)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"workers": 3, "parallel": {"tensor": 2}}, "make workers a multiple of 2"),
    "expert": (
        {"workers": 4, "parallel": {"tensor": 2, "expert": 4}},
        "set tensor=4, or tensor=1, or expert=1",
    ),
    "expert_workers": ({"workers": 3, "parallel": {"expert": 2}}, "make workers a multiple of 2"),
    "sequence": ({"workers": 2, "parallel": {"sequence_parallel": True}}, "raise tensor, or switch it off"),
    "offload": ({"parallel": {"cpu_offload": True}, "lora": {"rank": 2}}, "adapter has few; switch it off"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_sizes_that_do_not_fit_together_are_refused(name: str) -> None:
    changes, remedy = MISTAKES[name]
    with pytest.raises(ValueError, match=remedy):
        tiny_policy_config("llama", **changes)


def test_experts_may_be_named_as_the_tensor_ranks() -> None:
    cfg = tiny_policy_config("qwen3_moe", workers=4, parallel={"tensor": 2, "expert": 2})
    assert isinstance(cfg, PolicyConfig)
    assert cfg.replicas == 2


def test_tensor_ranks_are_neighbours_and_replicas_are_whole() -> None:
    layout = lay_out_ranks(8, context=2, tensor=2)
    assert layout == (2, 2, 2)
    assert (layout.size, layout.replica_size) == (8, 4)
    assert layout.replicas == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match=r"make policy\.workers a multiple of 4"):
        lay_out_ranks(6, context=2, tensor=2)
