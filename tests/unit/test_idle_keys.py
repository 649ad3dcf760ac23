"""A key that is set and has no effect is refused or said; one that has an effect passes without a word."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.utils.algorithm_presets import PRESETS
from headrace.utils.idle_keys import EFFECTS, idle_lines
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.shipped import shipped_recipes

BASE = """\
run_dir: RUN_DIR
policy:
  model: {config: {model_type: llama}}
  max_total_sequence_length: 512
  train_global_batch_size: 16
  train_micro_batch_size: 4
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
env: {kind: reasoning_gym, task: spell_backward}
"""
PACKED = "policy.sequence_packing.enabled=true policy.train_micro_batch_size=8"
DYNAMIC = "policy.dynamic_batching.enabled=true policy.train_micro_batch_size=8"
REMOTE = "data_plane.impl=transfer_queue"
JOURNAL = "data_plane.journal.enabled=true"
MOONCAKE = f"{REMOTE} data_plane.backend=mooncake_cpu"
DATASET = "env.kind=dataset env.path=x.csv"
CALCULATOR = "env.kind=calculator grpo.max_rollout_turns=2"
ASYNC = "async.enabled=true loss.importance_correction=tis"
NO_VALIDATION = "validation.period=0 validation.at_start=false validation.at_end=false"

# The key that is set; where it has no effect; where it has one.
SAID = {
    "data_plane.impl=transfer_queue": ("data_plane.enabled=false", ""),
    "data_plane.storage_capacity=99": ("data_plane.enabled=false", ""),
    "data_plane.observability.enabled=true": ("data_plane.enabled=false", ""),
    "data_plane.journal.enabled=true": ("data_plane.enabled=false", ""),
    "data_plane.journal.folder=j": ("", JOURNAL),
    "data_plane.journal.segment_bytes=99": ("", JOURNAL),
    "data_plane.journal.max_bytes=999999999999": ("", JOURNAL),
    "data_plane.journal.fsync=never": ("", JOURNAL),
    "data_plane.backend=mooncake_cpu": ("", REMOTE),
    "data_plane.num_storage_units=2": ("", REMOTE),
    "data_plane.indexes=2": ("", REMOTE),
    "data_plane.store_name=mine": ("", REMOTE),
    "data_plane.ray_address=10.0.0.1:6379": ("", REMOTE),
    "data_plane.timeout_s=5.0": ("", REMOTE),
    "data_plane.startup_timeout_s=5.0": ("", REMOTE),
    "data_plane.claim_meta_poll_interval_s=1.0": (REMOTE, None),
    "data_plane.global_segment_size=9": (REMOTE, MOONCAKE),
    "data_plane.local_buffer_size=9": (REMOTE, MOONCAKE),
    "data_plane.mooncake_master_port=9": (REMOTE, MOONCAKE),
    "policy.sequence_packing.algorithm=concatenative": ("", PACKED),
    "policy.sequence_packing.train_mb_tokens=999": ("", PACKED),
    "policy.sequence_packing.logprob_mb_tokens=999": ("", PACKED),
    "policy.sequence_packing.microbatch_order=longest_first": ("", PACKED),
    "policy.dynamic_batching.train_mb_tokens=999": ("", DYNAMIC),
    "policy.dynamic_batching.logprob_mb_tokens=999": ("", DYNAMIC),
    "policy.dynamic_batching.sequence_length_round=8": ("", DYNAMIC),
    "policy.train_micro_batch_size=2": ("policy.sequence_packing.enabled=true", ""),
    "policy.logprob_batch_size=2": (DYNAMIC, ""),
    "policy.scheduler.decay_steps=9": ("", "policy.scheduler.kind=cosine"),
    "policy.scheduler.min_lr_ratio=0.5": ("", "policy.scheduler.kind=linear policy.scheduler.decay_steps=9"),
    "policy.model.revision=v1": ("", "policy.model.path=a/b policy.model.config=null"),
    "policy.model.trust_remote_code=true": ("", "policy.model.path=a/b policy.model.config=null"),
    "policy.tokenizer.revision=v1": ("", "policy.tokenizer.path=a/b"),
    "policy.lora.alpha=8.0": ("", "policy.lora.rank=8"),
    "policy.lora.targets=[q_proj]": ("", "policy.lora.rank=8"),
    "policy.lora.dropout=0.1": ("", "policy.lora.rank=8"),
    "policy.lora.base=nf4": ("", "policy.lora.rank=8"),
    "policy.tokenizer.characters=abc": ("", "policy.tokenizer.builder=characters"),
    "policy.model.cache_dir=/tmp/x": ("", "policy.model.gguf_package=x policy.model.config=null"),
    "policy.router_replay.max_missing_fraction=0.5": ("", "policy.router_replay.enabled=true"),
    "policy.router_replay.min_exact_fraction=0.5": ("", "policy.router_replay.enabled=true"),
    "policy.router_replay.on_excess=mask": ("", "policy.router_replay.enabled=true"),
    "policy.router_replay.trace=true": ("", "policy.router_replay.enabled=true"),
    "generation.vllm.args={'max_model_len': 99}": ("", "generation.backend=vllm"),
    "generation.vllm.sleep_level=1": ("", "generation.backend=vllm"),
    "generation.static_cache=true": ("generation.backend=vllm", ""),
    "generation.sglang.url=http://h:1": ("", "generation.backend=sglang"),
    "generation.sglang.weights=tensor": ("", "generation.backend=sglang"),
    "generation.sglang.sleep=all": ("generation.backend=vllm", "generation.backend=sglang"),
    "generation.sglang.timeout_s=5.0": ("", "generation.backend=sglang"),
    "generation.sglang.startup_timeout_s=5.0": ("", "generation.backend=sglang"),
    "generation.sglang.weights_dir=/x": (
        "generation.backend=sglang generation.sglang.weights=tensor",
        "generation.backend=sglang",
    ),
    "generation.sglang.args={'tp_size': 2}": (
        "generation.backend=sglang generation.sglang.url=http://h:1",
        "generation.backend=sglang",
    ),
    "generation.sglang.python=/x/python": (
        "generation.backend=sglang generation.sglang.url=http://h:1",
        "generation.backend=sglang",
    ),
    "generation.guard.every_n_steps=7": ("", "generation.guard.enabled=true"),
    "generation.guard.max_logprob_gap=0.5": ("", "generation.backend=vllm"),
    "generation.guard.num_prompts=7": (
        "generation.backend=vllm generation.guard.enabled=false",
        "generation.backend=vllm",
    ),
    "generation.guard.max_new_tokens=7": ("", "generation.guard.enabled=true"),
    "generation.python=/x/python": ("", "generation.placement=beside"),
    "generation.weights_timeout_s=9.0": ("generation.placement=beside", "generation.placement=apart"),
    "generation.vllm.tensor_parallel=2": (
        "generation.placement=apart",
        "generation.backend=vllm generation.placement=apart",
    ),
    "grpo.advantage.leave_one_out=true": ("grpo.advantage.estimator=rloo", ""),
    "grpo.advantage.normalize_std=false": ("grpo.advantage.estimator=rloo", ""),
    "grpo.advantage.epsilon=0.1": ("grpo.advantage.normalize_std=false", ""),
    "grpo.reward.overlong_buffer_tokens=9": ("", "grpo.reward.overlong_penalty=1.0"),
    "grpo.reward.kl_kind=k3": ("", "grpo.reward.kl_coefficient=0.1"),
    "grpo.dynamic_sampling.max_refills=3": ("", "grpo.dynamic_sampling.enabled=true"),
    "grpo.dynamic_sampling.target=my.code:differ": ("", "grpo.dynamic_sampling.enabled=true"),
    "grpo.max_rollout_turns=3": ("", None),
    "env.reward_timeout_s=5.0": (DATASET, f"{DATASET} env.rewards=[exact]"),
    "env.reward_workers=2": (f"{DATASET} env.rewards=[exact] env.reward_timeout_s=null", None),
    "env.question_key=q": ("env.kind=dataset data.train=x.csv", DATASET),
    "env.answer_key=a": ("env.kind=math data.train=x.csv", DATASET),
    "env.terms=4": (f"{CALCULATOR} data.train=x.csv", CALCULATOR),
    "env.largest=9": (f"{CALCULATOR} data.train=x.csv", CALCULATOR),
    "data.validation_size=9": (f"{DATASET} data.validation=v.csv", DATASET),
    "loss.kl_gradient=score_function": ("", "loss.kl_coefficient=0.1"),
    "loss.kl_kind=k2": ("", "loss.kl_coefficient=0.1"),
    "loss.clip_low=0.1": ("loss.force_on_policy_ratio=true", ""),
    "loss.clip_high=0.1": ("loss.force_on_policy_ratio=true", ""),
    "loss.dual_clip=3.0": ("loss.force_on_policy_ratio=true", ""),
    "loss.importance_low=0.1": ("", "loss.importance_correction=icepop"),
    "loss.importance_high=9.0": ("", "loss.importance_correction=tis"),
    "async.max_lag=0": ("", ASYNC),
    "async.sampler=a:b": ("", ASYNC),
    "async.collectors=2": ("", ASYNC),
    "async.prompts_per_call=2": ("", ASYNC),
    "async.room=9": ("", ASYNC),
    "async.on_update=resume": ("", ASYNC),
    "async.max_failures=9": ("", ASYNC),
    "async.lease_s=9.0": ("", ASYNC),
    "async.validation=beside": ("", ASYNC),
    "async.micro_steps=2": ("", ASYNC),
    "async.on_stale=drop": (f"{ASYNC} async.sampler=a:b", ASYNC),
    "async.order=freshest": (ASYNC, f"{ASYNC} async.on_stale=drop"),
    "async.piece_tokens=9": (ASYNC, f"{ASYNC} async.on_update=resume"),
    "async.kv_cache=keep": (ASYNC, f"{ASYNC} async.on_update=resume generation.backend=vllm"),
    "logging.tokens_of_samples=3": ("logging.samples_per_step=0", ""),
    "logging.tokens_per_sample=9": ("logging.tokens_of_samples=0", ""),
    "logging.detail_mb=9": ("logging.detail_every=0", ""),
    "logging.wandb.project=x": ("", "logging.trackers=[wandb]"),
    "logging.wandb.name=x": ("", "logging.trackers=[wandb]"),
    "logging.wandb.entity=x": ("", "logging.trackers=[wandb]"),
    "logging.wandb.group=x": ("", "logging.trackers=[wandb]"),
    "logging.wandb.tags=[x]": ("", "logging.trackers=[wandb]"),
    "logging.wandb.mode=offline": ("", "logging.trackers=[wandb]"),
    "logging.mlflow.tracking_uri=x": ("", "logging.trackers=[mlflow]"),
    "logging.mlflow.experiment=x": ("", "logging.trackers=[mlflow]"),
    "logging.mlflow.name=x": ("", "logging.trackers=[mlflow]"),
    "logging.trackio.project=x": ("", "logging.trackers=[trackio]"),
    "logging.trackio.name=x": ("", "logging.trackers=[trackio]"),
    "logging.trackio.space_id=x": ("", "logging.trackers=[trackio]"),
    "logging.prometheus_address=0.0.0.0": ("", "logging.prometheus_port=0"),
    "logging.jsonl.path=x": ("", "logging.trackers=[jsonl]"),
    "warm_start.steps=9": ("", "warm_start.enabled=true"),
    "warm_start.batch_size=16": ("", "warm_start.enabled=true"),
    "warm_start.lr=0.1": ("", "warm_start.enabled=true"),
    "warm_start.warmup_steps=9": ("", "warm_start.enabled=true"),
    "warm_start.copy_fraction=0.1": ("", "warm_start.enabled=true"),
    "validation.batch_size=9": (NO_VALIDATION, f"{NO_VALIDATION} validation.period=5"),
    "validation.max_samples=9": (NO_VALIDATION, f"{NO_VALIDATION} validation.at_start=true"),
    "validation.sampled=false": (NO_VALIDATION, f"{NO_VALIDATION} validation.at_end=true"),
    "checkpointing.save_period=9": ("checkpointing.enabled=false", ""),
    "checkpointing.keep_top_k=9": ("checkpointing.enabled=false", ""),
    "checkpointing.metric=validation/sampled_accuracy": ("checkpointing.enabled=false", ""),
    "checkpointing.higher_is_better=false": ("checkpointing.enabled=false", ""),
    "checkpointing.save_optimizer=false": ("checkpointing.enabled=false", ""),
    "cluster.rollout=driver": ("", f"{REMOTE} policy.workers=2"),
    "cluster.num_nodes=2": ("", f"{REMOTE} policy.workers=2"),
    "cluster.gpus_per_node=1": ("", f"{REMOTE} policy.parallel.launcher=ray"),
    "cluster.rollout_gpus=1": (f"{REMOTE} policy.workers=1", f"{REMOTE} policy.workers=2"),
    "cluster.startup_timeout_s=9.0": ("", f"{REMOTE} policy.parallel.launcher=ray"),
    "cluster.autoscales=true": (f"{REMOTE} policy.workers=1", f"{REMOTE} policy.workers=2"),
    "resume=false": ("overwrite=true", ""),
    "allow_changes=true": ("resume=false", ""),
}
REFUSED = {
    "policy.optimizer.stochastic_rounding=true": (
        "policy.optimizer.kind=adamw",
        "policy.optimizer.kind=adamw_8bit policy.precision=bfloat16",
    ),
    "policy.tokenizer.path=/x": ("policy.tokenizer.builder=characters", ""),
    "grpo.advantage.leave_one_out=true": ("grpo.advantage.estimator=reinforce_plus_plus", ""),
    "loss.importance_low=0.1": ("loss.importance_correction=tis", "loss.importance_correction=icepop"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idle") / "recipe.yaml"
    path.write_text(BASE.replace("RUN_DIR", str(path.parent / "run")))
    return path


@pytest.mark.parametrize("setting", SAID)
def test_a_key_without_effect_is_said_with_what_it_needs_and_one_with_an_effect_is_not(
    recipe: Path, setting: str
) -> None:
    idle, active = SAID[setting]
    lines = idle_lines(load_recipe(recipe, [*idle.split(), setting]))
    (line,) = (line for line in lines if setting.removesuffix(".0") in line.replace(".0 ", " "))
    assert line.startswith("no effect: ")
    assert "(needs " in line
    if active is not None:
        assert idle_lines(load_recipe(recipe, [*active.split(), setting])) == []


@pytest.mark.parametrize("setting", REFUSED)
def test_a_key_that_the_run_would_train_without_is_refused_by_both_keys(recipe: Path, setting: str) -> None:
    contrary, active = REFUSED[setting]
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [contrary, setting])
    other = contrary.partition("=")[0].rpartition(".")[2]
    assert f"{setting} has no effect" in str(caught.value)
    assert f"{other}=" in str(caught.value)
    load_recipe(recipe, [*active.split(), setting])


def test_every_key_of_the_table_is_one_of_the_recipe_and_has_a_case() -> None:
    cases = {setting.partition("=")[0] for setting in (*SAID, *REFUSED)}
    assert {key for effect in EFFECTS for key in effect.keys} == cases


def test_keys_that_need_the_same_share_a_line(recipe: Path) -> None:
    tokens = ["policy.sequence_packing.train_mb_tokens=600", "policy.sequence_packing.logprob_mb_tokens=700"]
    assert idle_lines(load_recipe(recipe, tokens)) == [
        f"no effect: {tokens[0]}, {tokens[1]} (needs policy.sequence_packing.enabled=true)"
    ]


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_and_its_resolved_form_have_no_key_without_effect(name: str, tmp_path: Path) -> None:
    loaded = load_recipe(name)
    assert idle_lines(loaded) == []
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_recipe(loaded))
    assert idle_lines(load_recipe(resolved)) == []


@pytest.mark.parametrize("algorithm", PRESETS)
def test_what_a_named_algorithm_sets_is_no_key_without_effect(recipe: Path, algorithm: str) -> None:
    assert idle_lines(load_recipe(recipe, [f"algorithm={algorithm}"])) == []


def test_a_recipe_turns_an_inherited_feature_off_by_one_key_and_the_run_says_what_waits(recipe: Path) -> None:
    child = recipe.with_name("child.yaml")
    child.write_text("defaults: recipe.yaml\nwarm_start: {enabled: true, steps: 9}\n")
    # The run ends when it looks for its model; what has no effect is said before.
    overrides = ["warm_start.enabled=false", "policy.model.config=null", "policy.model.path=/nowhere"]
    result = CliRunner().invoke(app, ["train", str(child), *overrides])
    assert result.exit_code == 2
    assert result.stdout == "no effect: warm_start.steps=9 (needs warm_start.enabled=true)\n"


def test_several_workers_have_their_rows_in_memory_unless_a_store_reaches_them(recipe: Path) -> None:
    def uses_store(*overrides: str) -> bool:
        loaded: RecipeConfig = load_recipe(recipe, overrides)
        return loaded.uses_store

    assert uses_store()
    assert not uses_store("policy.workers=2")
    assert uses_store("policy.workers=2", REMOTE)
    assert not uses_store("data_plane.enabled=false")
