"""Named algorithms set what their papers define, let their numbers be changed, and refuse what contradicts them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.algorithms.run import build_session, start_loop, train
from headrace.config import AdvantageConfig, GRPOConfig, LossConfig
from headrace.errors import ConfigError
from headrace.utils.algorithm_presets import PRESETS, describe_preset
from headrace.utils.recipe import dump_recipe, load_recipe
from recorder import NeverStop, Recorder
from tiny_recipe import bare_recipe, tiny_recipe

# kind, ratio level, aggregation, constant tokens, clips; estimator, divided by the standard deviation. 20 new tokens.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "grpo": ("clipped_pg", "token", "sequence_mean", None, 0.2, 0.2, "grpo", True),
    "dr_grpo": ("clipped_pg", "token", "constant", 20, 0.2, 0.2, "grpo", False),
    "dapo": ("clipped_pg", "token", "token_mean", None, 0.2, 0.28, "grpo", True),
    "gspo": ("clipped_pg", "sequence", "sequence_mean", None, 3e-4, 4e-4, "grpo", True),
    "cispo": ("cispo", "token", "token_mean", None, 1.0, 4.0, "grpo", True),
    "rloo": ("clipped_pg", "token", "constant", 20, 0.2, 0.2, "rloo", False),
    "reinforce_plus_plus": (
        "clipped_pg",
        "token",
        "token_mean",
        None,
        0.2,
        0.2,
        "reinforce_plus_plus",
        True,
    ),
}


@pytest.mark.parametrize("algorithm", EXPECTED)
def test_a_named_algorithm_sets_its_keys(algorithm: str) -> None:
    made = bare_recipe(algorithm)
    loss, advantage = made.loss, made.grpo.advantage
    assert EXPECTED[algorithm] == (
        loss.kind,
        loss.ratio_level,
        loss.aggregation,
        loss.constant_tokens,
        loss.clip_low,
        loss.clip_high,
        advantage.estimator,
        advantage.normalize_std,
    )
    PolicyGradientLoss(loss)
    assert not made.needs_reference, "no algorithm asks for a reference of its own accord"
    dapo = algorithm == "dapo"
    assert made.grpo.dynamic_sampling.enabled is dapo
    assert (made.grpo.reward.overlong_penalty, made.grpo.reward.overlong_buffer_tokens) == (
        (1.0, 4) if dapo else (0.0, 0)
    )


def test_every_name_that_a_recipe_takes_has_a_preset() -> None:
    assert PRESETS.keys() == EXPECTED.keys()
    with pytest.raises(ValidationError, match=r"dr_grpo.*reinforce_plus_plus"):
        bare_recipe("ppo")


def test_without_a_name_sections_are_as_they_are() -> None:
    made = bare_recipe(None)
    assert made.loss == LossConfig()
    assert made.grpo.advantage == AdvantageConfig()


def test_the_numbers_of_a_preset_may_be_changed() -> None:
    made = bare_recipe(
        "dapo",
        loss={"clip_high": 0.4, "kl_coefficient": 0.01},
        grpo={"dynamic_sampling": {"enabled": False}, "reward": {"overlong_penalty": 0.5}},
    )
    assert (made.loss.clip_low, made.loss.clip_high, made.loss.aggregation) == (0.2, 0.4, "token_mean")
    assert not made.grpo.dynamic_sampling.enabled
    assert (made.grpo.reward.overlong_penalty, made.grpo.reward.overlong_buffer_tokens) == (0.5, 4)
    said = describe_preset("dapo", made.model_dump())
    assert said == (
        "dapo (loss.clip_high=0.4, not 0.28; grpo.dynamic_sampling.enabled=False, not True; "
        "grpo.reward.overlong_penalty=0.5, not 1.0)"
    )


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (
            "gspo",
            {"loss": {"aggregation": "token_mean"}},
            "algorithm=gspo contradicts loss.aggregation=token_mean; it means loss.aggregation=sequence_mean",
        ),
        ("cispo", {"loss": {"ratio_level": "sequence"}}, "contradicts loss.ratio_level=sequence"),
        (
            "dr_grpo",
            {"grpo": {"advantage": {"normalize_std": True}}, "loss": {"kind": "cispo"}},
            "contradicts grpo.advantage.normalize_std=true, loss.kind=cispo",
        ),
        ("reinforce_plus_plus", {"grpo": {"advantage": {"estimator": "grpo"}}}, "estimator=grpo"),
        ("rloo", {"loss": {"aggregation": "token_mean"}}, "means loss.aggregation=constant"),
        ("gspo", {"loss": LossConfig(aggregation="token_mean")}, "contradicts loss.aggregation=token_mean"),
        (
            "grpo",
            {"grpo": {"advantage": {"leave_one_out": True}}},
            "contradicts grpo.advantage.leave_one_out=true",
        ),
        (
            "rloo",
            {"grpo": {"advantage": {"leave_one_out": True}}},
            "contradicts grpo.advantage.leave_one_out=true",
        ),
        (
            "dapo",
            {"grpo": {"advantage": {"target": "my:code"}}},
            "contradicts grpo.advantage.target=my:code; it means grpo.advantage.target=null: set that",
        ),
        ("gspo", {"loss": {"target": "my:code"}}, "contradicts loss.target=my:code"),
    ],
)
def test_a_key_that_contradicts_the_algorithm_is_refused_by_name(
    algorithm: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        bare_recipe(algorithm, **sections)


def test_sections_may_be_models() -> None:
    made = bare_recipe("gspo", loss=LossConfig(clip_low=0.1))
    assert (made.loss.ratio_level, made.loss.clip_low, made.loss.clip_high) == ("sequence", 0.1, 4e-4)
    with pytest.raises(ValidationError, match=r"loss\n.*valid dictionary or instance of LossConfig"):
        bare_recipe("gspo", loss=3)


def test_a_file_takes_an_algorithm_and_the_resolved_recipe_shows_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(bare_recipe(None)))
    with pytest.raises(
        ConfigError, match=r"^override 'algorithm=gspo': algorithm=gspo contradicts .*loss.ratio_level=token"
    ):
        load_recipe(path, ["algorithm=gspo"])
    path.write_text(
        "run_dir: r\npolicy: {model: {path: m}, train_global_batch_size: 256}\nenv: {kind: dataset, path: d}\n"
    )
    made = load_recipe(path, ["algorithm=dr_grpo", "generation.max_new_tokens=512"])
    text = dump_recipe(made)
    assert "constant_tokens: 512" in text
    assert "algorithm: dr_grpo" in text
    path.write_text(text)
    assert load_recipe(path) == made


def test_the_group_baseline_of_reinforce_plus_plus_needs_a_group() -> None:
    alone = {"num_generations_per_prompt": 1, "advantage": {"estimator": "reinforce_plus_plus"}}
    GRPOConfig.model_validate(alone)
    alone["advantage"] = {"estimator": "reinforce_plus_plus", "minus_baseline": True}
    with pytest.raises(ValidationError, match=r"num_generations_per_prompt=1.*minus_baseline"):
        GRPOConfig.model_validate(alone)


class Listener(Recorder):
    """Keeps what a run says of itself."""

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        self.info = info


def test_a_run_says_which_algorithm_it_is_with_whose_numbers(tmp_path: Path) -> None:
    short: dict[str, Any] = {
        "algorithm": "gspo",
        "loss": {"clip_high": 0.28},
        "grpo": {"max_num_steps": 1},
        "validation": {"at_start": False, "at_end": False},
        "checkpointing": {"enabled": False},
        "data": {"train_size": 8, "validation_size": 2},
    }
    listener = Listener()
    train(tiny_recipe(tmp_path, **short), tmp_path, listener, NeverStop())
    assert listener.info["algorithm"] == "gspo (loss.clip_high=0.28, not 0.0004)"


@pytest.mark.parametrize("algorithm", ["dr_grpo", "reinforce_plus_plus"])
def test_a_preset_trains(tmp_path: Path, algorithm: str) -> None:
    made = tiny_recipe(
        tmp_path, algorithm=algorithm, grpo={"max_num_steps": 1}, checkpointing={"enabled": False}
    )
    session = build_session(made)
    try:
        recorder = Recorder()
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    assert recorder.steps[0].metrics["train/grad_norm"] > 0
