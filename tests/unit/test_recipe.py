"""Reading recipes: inheritance, overrides, and one line for every mistake."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from headrace.config import DatasetConfig, MathConfig, ReasoningGymConfig, RecipeConfig
from headrace.errors import ConfigError
from headrace.utils.recipe import changed_keys, dump_recipe, key_origins, load_recipe
from tiny_recipe import tiny_recipe

BASE = """\
run_dir: /tmp/run
policy:
  model: {config: {model_type: qwen3_moe, hidden_size: 32}}
  train_global_batch_size: 16
  train_micro_batch_size: 4
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
env: {kind: reasoning_gym, task: spell_backward}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_recipe_is_read_with_its_defaults(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert loaded.policy.model.config == {"model_type": "qwen3_moe", "hidden_size": 32}
    assert loaded.samples_per_step == 16
    assert loaded.generation.temperature == 1.0


def test_overrides_apply_in_order_and_keep_their_types(recipe: Path) -> None:
    loaded = load_recipe(
        recipe,
        [
            "seed=3",
            "seed=4",
            "policy.optimizer.lr=1e-5",
            "policy.optimizer.betas=[0.8,0.9]",
            'generation.stop_strings=["=", "a b"]',
            "policy.max_grad_norm=null",
            "env.task=a=b",
            "policy.model.config.num_hidden_layers=2",
        ],
    )
    assert loaded.seed == 4
    assert loaded.policy.optimizer.lr == 1e-5
    assert loaded.policy.optimizer.betas == (0.8, 0.9)
    assert loaded.generation.stop_strings == ("=", "a b")
    assert loaded.policy.max_grad_norm is None
    assert loaded.env.task == "a=b"  # type: ignore[union-attr]
    assert loaded.policy.model.config is not None
    assert loaded.policy.model.config["hidden_size"] == 32
    assert loaded.policy.model.config["num_hidden_layers"] == 2


def test_defaults_are_read_first_and_the_file_wins(tmp_path: Path, recipe: Path) -> None:
    (tmp_path / "more.yaml").write_text("seed: 1\ngeneration: {temperature: 0.5, max_new_tokens: 7}\n")
    child = tmp_path / "sub" / "child.yaml"
    child.parent.mkdir()
    child.write_text("defaults: [../recipe.yaml, ../more.yaml]\ngeneration: {max_new_tokens: 9}\n")
    loaded = load_recipe(child)
    assert (loaded.seed, loaded.generation.temperature, loaded.generation.max_new_tokens) == (1, 0.5, 9)


def test_interpolations_are_resolved(recipe: Path) -> None:
    recipe.write_text(BASE + "seed: 5\ndata: {train_size: '${seed}'}\n")
    assert load_recipe(recipe, ["seed=7"]).data.train_size == 7


MISTAKES = {
    "unknown key": ("policy.wrokers=2", ["unknown key 'policy.wrokers'", "did you mean 'policy.workers'?"]),
    "unknown section": ("polcy.workers=2", ["unknown key 'polcy'", "did you mean 'policy'?"]),
    "a key of another section": ("lr=1e-5", ["unknown key 'lr'", "'policy.optimizer.lr' or 'warm_start.lr'"]),
    "unknown key, nothing like it": ("data.zzz=2", ["unknown key 'data.zzz'", "known keys here: train_size"]),
    "unknown key named like a task kind": ("data.math=2", ["unknown key 'data.math'"]),
    "unknown key of a tagged section": ("env.tsak=2", ["unknown key 'env.tsak'", "did you mean 'env.task'?"]),
    "unknown key far down": ("grpo.reward.scael=2", ["'grpo.reward.scael'", "'grpo.reward.scale'"]),
    "text for a number": ("policy.workers=two", ["policy.workers='two'", "expected a valid integer"]),
    "a number out of range": ("policy.workers=0", ["policy.workers=0", "expected greater than 0"]),
    "a fraction for an integer": ("policy.workers=1.5", ["policy.workers=1.5", "integer"]),
    "not one of the choices": ("loss.kind=ppo", ["loss.kind='ppo'", "expected 'clipped_pg' or 'cispo'"]),
    "a value for a section": ("policy=3", ["policy=3", "expected a section"]),
    "null for a section": ("env=null", ["env=null", "expected a section"]),
    "too few items": ("policy.optimizer.betas=[0.9]", ["policy.optimizer.betas=[0.9]", "too few items"]),
    "too many items": ("policy.optimizer.betas=[0.9,0.9,0.9]", ["policy.optimizer.betas", "at most 2"]),
    "a wrong item": ("policy.optimizer.betas=[0.9,x]", ["policy.optimizer.betas.1='x'"]),
    "an unknown environment": ("env.kind=chess", ["env.kind='chess'", "'reasoning_gym', 'math', 'dataset'"]),
    "a kind that lacks its keys": ("env.kind=math", ["missing key 'env.path'"]),
    "a key of another kind": ("env.path=x", ["unknown key 'env.path'"]),
    "a key of a key": ("env.task.x=3", ["env.task={'x': 3}", "expected a valid string"]),
    "null where a number has to be": ("seed=null", ["seed=null", "expected a valid integer"]),
    "a key left open": ("run_dir=???", ["leaves the key open"]),
    "no equals sign": ("seed", ["override 'seed'", "expected key=value"]),
    "no key": ("=3", ["override '=3'", "expected key=value"]),
    "an empty part in a key": ("policy..workers=3", ["override 'policy..workers=3'"]),
    "a value that is not YAML": ("seed=@x", ["override 'seed=@x'", "put the value in quotes"]),
    "an epsilon that float32 lacks": (
        "policy.optimizer.eps=1e-50",
        ["policy.optimizer.eps=1e-50", "greater than or equal"],
    ),
    "a part of a list": ("policy.optimizer.betas[0]=3", ["policy.optimizer.betas={'0': 3}"]),
    "more threads than any machine has": ("cpu_threads=100000", ["cpu_threads=100000", "equal to 1024"]),
    "an unfinished list": ("policy.optimizer.betas=[1", ["override 'policy.optimizer.betas=[1'"]),
    "an interpolation of nothing": ("run_dir=${nope}", ["run_dir: Interpolation key 'nope' not found"]),
    "two sources of weights": ("policy.model.path=x", ["policy.model", "exactly one of", "path, config"]),
    "no source of weights": ("policy.model.config=null", ["policy.model", "none of them"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(recipe: Path, name: str) -> None:
    override, expected = MISTAKES[name]
    message = error_of(recipe, override)
    for part in expected:
        assert part in message
    assert message.startswith(f"override '{override}': ")
    assert str(recipe) not in message


CONTRADICTIONS = {
    "batch and workers": (["policy.workers=3"], ["train_global_batch_size=16", "workers=3"]),
    "batch and microbatch": (["policy.train_micro_batch_size=5"], ["train_micro_batch_size=5", "16"]),
    "a metric that is not measured": (
        ["checkpointing.metric=validation/sampled_accuracy", "validation.sampled=false"],
        ["checkpointing.metric=validation/sampled_accuracy", "validation.sampled=false"],
    ),
    "samples and batch": (["grpo.num_prompts_per_step=5"], ["train_global_batch_size=16", "20 samples"]),
    "packing and dynamic batching": (
        ["policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"],
        ["sequence_packing.enabled", "dynamic_batching.enabled", "switch one off"],
    ),
    "token budget and length": (
        ["policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=100"],
        ["sequence_packing.train_mb_tokens=100", "max_total_sequence_length=1024"],
    ),
    "answer and length": (
        ["generation.max_new_tokens=1024"],
        ["generation.max_new_tokens=1024", "policy.max_total_sequence_length=1024"],
    ),
    "one update and two": (
        ["grpo.num_prompts_per_step=8", "loss.force_on_policy_ratio=true"],
        ["loss.force_on_policy_ratio", "policy.train_global_batch_size=32"],
    ),
    "capacity and samples": (
        ["data_plane.storage_capacity=8"],
        ["data_plane.storage_capacity=8", "16 samples"],
    ),
    "GPUs for a policy on the CPU": (
        ["policy.device=cpu", "cluster.gpus_per_node=8"],
        ["cluster.gpus_per_node=8", "policy.device=cpu"],
    ),
    "a GPU for rollouts on the CPU": (
        ["policy.device=cpu", "cluster.rollout_gpus=1"],
        ["cluster.rollout_gpus=1", "policy.device=cpu"],
    ),
    "a decay without an end": (["policy.scheduler.kind=cosine"], ["policy.scheduler", "decay_steps"]),
    "a penalty without a buffer": (["grpo.reward.overlong_penalty=1"], ["overlong_buffer_tokens"]),
    "a baseline without peers": (
        [
            "grpo.num_generations_per_prompt=1",
            "grpo.num_prompts_per_step=16",
            "grpo.advantage.estimator=rloo",
        ],
        ["num_generations_per_prompt"],
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_names_both_keys(recipe: Path, name: str) -> None:
    overrides, expected = CONTRADICTIONS[name]
    message = error_of(recipe, *overrides)
    for part in expected:
        assert part in message
    assert message.startswith(tuple(f"override '{override}': " for override in overrides))


def test_a_mistake_in_the_file_names_the_file_whatever_was_overridden(recipe: Path) -> None:
    recipe.write_text(BASE + "seed: x\n")
    assert error_of(recipe, "run_dir=y", "policy.workers=1").startswith(f"{recipe}: seed='x'")
    recipe.write_text(BASE.replace("num_prompts_per_step: 4", "num_prompts_per_step: 5"))
    assert error_of(recipe, "grpo.max_num_steps=3").startswith(f"{recipe}: policy.train_global_batch_size=16")


TYPED = [
    "/data/run #2",
    "  two spaces ",
    "null",
    "a\nb",
    "3",
    "1e5",
    "'quoted'",
    "a: b",
    "[x",
    "@x",
    "",
    "tab\tand \u2028 end",
]


@pytest.mark.parametrize("typed", TYPED)
def test_a_key_of_text_takes_what_was_typed(recipe: Path, typed: str) -> None:
    if typed:
        assert load_recipe(recipe, [f"run_dir={typed}"]).run_dir == typed
    prompt = load_recipe(recipe, [f"data.system_prompt={typed}"]).data.system_prompt
    assert prompt == (None if typed == "null" else typed), "text that may be absent is absent for null"


@pytest.mark.parametrize(
    ("typed", "value"), [("a #2", "a #2"), (" 'a #2'", "a #2"), ("3 # three", 3), ("", None)]
)
def test_text_under_a_free_key_keeps_what_looks_like_a_comment(recipe: Path, typed: str, value: Any) -> None:
    loaded = load_recipe(recipe, [f"policy.model.config.x={typed}"])
    assert loaded.policy.model.config is not None
    assert loaded.policy.model.config["x"] == value


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.kind=dataset", "env.path=x"],
        ["env.path=x", "env.kind=dataset"],
        ["env={kind: dataset, path: x}"],
    ],
)
def test_an_override_of_the_kind_replaces_what_the_file_says_of_another(
    recipe: Path, overrides: list[str]
) -> None:
    assert load_recipe(recipe, overrides).env == DatasetConfig(path="x")


def test_a_file_of_another_kind_than_its_defaults_inherits_nothing_of_that_section(
    tmp_path: Path, recipe: Path
) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("defaults: recipe.yaml\nenv: {kind: math, path: x}\n")
    assert load_recipe(child).env == MathConfig(path="x")
    assert load_recipe(child, ["env.answer_key=a"]).env == MathConfig(path="x", answer_key="a"), (
        "the same kind inherits"
    )
    child.write_text("defaults: recipe.yaml\nenv: {lowercase: true}\n")
    assert load_recipe(child).env == ReasoningGymConfig(task="spell_backward", lowercase=True)


@pytest.mark.parametrize(
    ("env", "settings", "name"),
    [
        ("{kind: reasoning_gym, task: spell_backward, config: {min_word_len: 3}}", "config", "task"),
        ("{kind: python, target: a:b, args: {n: 3}}", "args", "target"),
        ("{kind: verifiers, id: a, args: {n: 3}}", "args", "id"),
    ],
)
def test_settings_of_a_task_are_not_those_of_another(
    tmp_path: Path, env: str, settings: str, name: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE.replace("{kind: reasoning_gym, task: spell_backward}", env))
    own = getattr(load_recipe(path).env, settings)
    assert len(own) == 1

    def left(*overrides: str) -> Any:
        origins = [key for key in key_origins(path, overrides) if key.startswith(f"env.{settings}.")]
        found = getattr(load_recipe(path, overrides).env, settings)
        assert sorted(origins) == sorted(f"env.{settings}.{key}" for key in found)
        return found

    assert left("seed=3") == own
    assert left(f"env.{name}={getattr(load_recipe(path).env, name)}") == own, "nothing changed"
    assert left(f"env.{name}=c:d") == {}
    assert left(f"env.{settings}.m=5", f"env.{name}=c:d") == {"m": 5}
    child = tmp_path / "child.yaml"
    child.write_text(f"defaults: recipe.yaml\nenv: {{{name}: 'c:d'}}\n")
    assert getattr(load_recipe(child).env, settings) == {}


def test_a_mistyped_key_is_named_before_the_key_that_it_leaves_missing(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE.replace("run_dir:", "run_dirr:"))
    message = error_of(path)
    assert "unknown key 'run_dirr'; did you mean 'run_dir'?" in message
    assert "and 1 more" in message


def test_a_long_value_is_cut_in_the_message(recipe: Path) -> None:
    message = error_of(recipe, f"policy.workers={'x' * 500}")
    assert len(message) < 300


def test_a_section_left_open_is_named(recipe: Path) -> None:
    recipe.write_text(BASE.replace("/tmp/run", "???"))
    assert "run_dir is left open (???); set it with run_dir=..." in error_of(recipe)
    assert load_recipe(recipe, ["run_dir=/tmp/x"]).run_dir == "/tmp/x"


FILES: dict[str, tuple[str | bytes | None, list[str]]] = {
    "missing": (None, ["No such file or directory", "check the path"]),
    "empty": ("", ["missing key 'run_dir'; set it in the recipe or with run_dir=..."]),
    "an environment without a kind": (BASE.replace("kind: reasoning_gym, ", ""), ["missing key 'env.kind'"]),
    "not YAML": ("a: 1\nb: [2", ["not valid YAML: line 3, column 1"]),
    "a tab": ("a:\n\tb: 1", ["not valid YAML: line 2, column 1"]),
    "a key twice": ("seed: 1\nseed: 2", ["not valid YAML", "duplicate key seed"]),
    "a list": ("- 1", ["expected a mapping of sections"]),
    "code": ("seed: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    "not text": (b"\xff\xfe\x00", ["not a text file"]),
    "a default that is missing": ("defaults: nope.yaml", ["nope.yaml: cannot read", "case.yaml"]),
    "defaults of a wrong type": ("defaults: {a: 1}", ["expected a file name or a list of them"]),
    "a number as defaults": ("defaults: 3", ["defaults=3: expected a file name or a list of them"]),
    "a list of lists as defaults": ("defaults: [[a.yaml]]", ["expected a file name or a list of them"]),
    "itself as default": ("defaults: case.yaml", ["form a circle (case.yaml -> case.yaml)"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    content, expected = FILES[name]
    path = tmp_path / "case.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error_of(path)
    assert "case.yaml" in message
    for part in expected:
        assert part in message


def test_a_circle_of_defaults_is_drawn(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {parent}.yaml")
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in error_of(tmp_path / "a.yaml")


def test_a_mistyped_file_name_finds_the_right_one(recipe: Path) -> None:
    assert f"did you mean {recipe}?" in error_of(recipe.with_name("recipes.yml"))


def test_a_directory_is_not_a_recipe(tmp_path: Path) -> None:
    assert "Is a directory" in error_of(tmp_path)


# Text that YAML or OmegaConf could take for something else: numbers, null, comments, interpolations. `???` is the mark
# of a key that is left open, and no text.
TEXTS = st.text(alphabet=st.sampled_from(list("ab0159e.-+:#'\"\\${}[]~?!&*%@ \néß")), max_size=12).filter(
    lambda text: text != "???"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXTS, stops=st.lists(TEXTS, max_size=3), lr=st.floats(1e-12, 1e3), seed=st.integers(0, 2**40))
def test_a_resolved_recipe_reads_back_equal(
    tmp_path: Path, prompt: str, stops: list[str], lr: float, seed: int
) -> None:
    values: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(BASE))  # type: ignore[assignment]
    values["seed"] = seed
    values["data"] = {"system_prompt": prompt}
    values["generation"] = {"stop_strings": stops}
    values["policy"]["optimizer"] = {"lr": lr}
    original = RecipeConfig.model_validate(values)
    path = tmp_path / "config.yaml"
    path.write_text(dump_recipe(original), encoding="utf-8")
    assert load_recipe(path) == original


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("010", "010 is 8 to YAML (octal); write 8, or text in quotes"),
        ("-0_7", "-0_7 is -7 to YAML (octal)"),
        ("1:30", "1:30 is 90 to YAML (base 60)"),
        ("1:30.5", "1:30.5 is 90.5 to YAML (base 60)"),
    ],
)
def test_a_number_that_yaml_reads_as_another_is_refused_wherever_it_stands(
    recipe: Path, written: str, told: str
) -> None:
    for key in ("seed", "grpo.max_num_steps", "env.config.a"):
        assert f"{key}={told}" in error_of(recipe, f"{key}={written}")
    assert f"env.config.a={told}" in error_of(recipe, f"env.config.a=[1, {written}]")
    recipe.write_text(f"{BASE}seed: {written}\n")
    assert error_of(recipe).startswith(f"{recipe}: seed={told}")
    recipe.write_text(BASE.replace("spell_backward", f"spell_backward, config: {{a: [{written}]}}"))
    assert error_of(recipe).startswith(f"{recipe}: env.config.a={told}")


def test_text_that_looks_like_such_a_number_stays_what_it_is(recipe: Path) -> None:
    texts = ["010", "1:30", "0x1F", "1_0", "1e5", "09", "1:30.5"]
    recipe.write_text(
        BASE.replace("spell_backward", f"spell_backward, config: {{a: {texts!r}, b: 0x1F, c: 0}}")
    )
    loaded = load_recipe(recipe, ["policy.tokenizer.path=010"])
    recipe.write_text(dump_recipe(loaded))
    again = load_recipe(recipe)
    assert again == loaded
    assert isinstance(again.env, ReasoningGymConfig)
    assert again.env.config == {"a": texts, "b": 31, "c": 0}
    assert again.policy.tokenizer.path == "010"


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_that_the_files_of_a_run_cannot_hold_is_refused_among_free_settings(
    recipe: Path, value: str
) -> None:
    message = error_of(recipe, f"env.config.a={{b: [1, {value}]}}")
    assert f"env.config: a.b.1={value.replace('.', '')}: expected a finite number" in message


def test_question_marks_in_a_list_are_text_and_read_back_equal(recipe: Path) -> None:
    loaded = load_recipe(recipe, ['generation.stop_strings=["???"]'])
    assert loaded.generation.stop_strings == ("???",)
    recipe.write_text(dump_recipe(loaded))
    assert load_recipe(recipe) == loaded
    recipe.write_text(f'{BASE}generation:\n  stop_strings: ["???"]\ndata:\n  train: {{a: {{path: "???"}}}}\n')
    assert "data.train.a.path is left open (???)" in error_of(recipe)


def test_an_empty_run_dir_is_no_valid_recipe(recipe: Path) -> None:
    assert (
        error_of(recipe, "run_dir=")
        == "override 'run_dir=': run_dir is empty; set it to a directory of its own"
    )


def test_changed_keys_are_dotted_sorted_and_both_ways() -> None:
    old = {"seed": 0, "a": {"b": {"c": 1, "d": [1, 2]}}, "gone": 1}
    new = {"seed": 0, "a": {"b": {"c": 2, "d": [1, 3]}}, "new": 1}
    assert changed_keys(old, new) == [
        ("a.b.c", 1, 2),
        ("a.b.d", [1, 2], [1, 3]),
        ("gone", 1, None),
        ("new", None, 1),
    ]
    assert changed_keys(old, old) == []


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_progress_is_switched_with_the_word_that_the_help_names(tmp_path: Path, word: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(tiny_recipe(tmp_path / "run")))
    assert load_recipe(path, [f"logging.progress={word}"]).logging.progress == word
