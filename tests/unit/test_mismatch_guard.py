"""The mismatch guard stops a run whose generator is not its trainer, and names first what is really wrong."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headrace.algorithms.grpo import Session
from headrace.algorithms.observer import BEST_BY, RunObserver
from headrace.algorithms.resume import restore
from headrace.algorithms.run import build_session, start_loop, train
from headrace.config import RecipeConfig
from headrace.errors import GenerationError
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import GenerationOutput
from headrace.models.sampling import filter_logits, gather_logprobs
from headrace.models.tokenizers import build_character_tokenizer
from headrace.utils.checkpoints import CheckpointManager
from recorder import NeverStop, Recorder
from tiny_recipe import MODEL, tiny_recipe

DENSE = {
    **{k: v for k, v in MODEL.items() if "exp" not in k and "moe" not in k},
    "model_type": "qwen3",
    "initializer_range": 0.3,
}
STEPS = 2


def recipe(folder: Path, **changes: Any) -> RecipeConfig:
    """Two steps of large updates, with a check after each; `generation` and `policy` are merged."""
    model = changes.pop("model", DENSE)
    policy = {"model": {"config": model}, "optimizer": {"lr": 3e-3}, **changes.pop("policy", {})}
    guard = {"enabled": True, "every_n_steps": 1, "max_logprob_gap": 1e-3, **changes.pop("guard", {})}
    return tiny_recipe(
        folder,
        policy=policy,
        generation={"guard": guard, **changes.pop("generation", {})},
        grpo={"max_num_steps": STEPS},
        checkpointing=changes.pop("checkpointing", {"enabled": False}),
        validation={"at_start": False, "at_end": False},
        **changes,
    )


def replaying(folder: Path, **sections: Any) -> RecipeConfig:
    model = {**MODEL, "initializer_range": 0.3}
    return recipe(folder, model=model, policy={"router_replay": {"enabled": True}}, **sections)


def run(given: RecipeConfig, spoil: Callable[[Session], None] = lambda session: None) -> Recorder:
    session, recorder = build_session(given), Recorder()
    try:
        spoil(session)
        start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    return recorder


def refusal(given: RecipeConfig, spoil: Callable[[Session], None] = lambda session: None) -> str:
    with pytest.raises(GenerationError) as caught:
        run(given, spoil)
    return str(caught.value)


def first_cause(message: str) -> str:
    """Return what a message names first, which has to explain most of the gap."""
    print(message)
    assert "\n" not in message
    found = re.search(r"\(1\) ([a-z ,-]+) \((\d+)%\)", message)
    assert found is not None, message
    assert int(found[2]) >= 50, message
    return found[1]


def generator_of(session: Session) -> HFGenerator:
    generator: HFGenerator = session.rollouts.worker.generator
    return generator


def test_a_healthy_run_is_not_stopped_and_reports_what_was_measured(tmp_path: Path) -> None:
    recorder = run(recipe(tmp_path))
    assert len(recorder.steps) == STEPS
    for record in recorder.steps:
        found = {
            name.removeprefix("mismatch/guard_"): v for name, v in record.metrics.items() if "guard_" in name
        }
        assert found["gap_worst"] < 1e-4
        assert found["gap_mean"] <= found["gap_max"] < 1e-3
        assert found["greedy_agreement"] == 1
        assert {"gap_part_1", "gap_part_4", "s"} <= found.keys()


def keep_old_weights(session: Session) -> None:
    generator_of(session).update_weights = lambda tensors, version: [None for _ in tensors]


def test_old_weights_are_named_first(tmp_path: Path) -> None:
    assert first_cause(refusal(recipe(tmp_path), keep_old_weights)) == "weights not updated"


def test_weights_that_stopped_coming_after_a_good_check_are_named_first(tmp_path: Path) -> None:
    given = recipe(tmp_path, guard={"every_n_steps": 2})

    def spoil(session: Session) -> None:
        update, generator = generator_of(session).update_weights, generator_of(session)
        versions = iter((True, False, False))
        generator.update_weights = lambda tensors, version: (
            update(tensors, version) if next(versions) else None
        )

    message = refusal(given, spoil)
    assert "after step 2" in message
    assert first_cause(message) == "weights not updated"


def test_weights_of_half_precision_that_the_recipe_does_not_ask_for_are_named_first(tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        generator_of(session)._model.bfloat16()

    assert first_cause(refusal(recipe(tmp_path), spoil)) == "precision"


def test_half_precision_that_the_recipe_asks_for_passes_above_the_bound_too(tmp_path: Path) -> None:
    given = recipe(tmp_path, generation={"precision": "bfloat16"}, guard={"max_logprob_gap": 1e-4})
    found = [record.metrics["mismatch/guard_gap_worst"] for record in run(given).steps]
    assert len(found) == STEPS
    assert min(found) > 1e-4


def test_old_weights_beside_half_precision_are_named_first(tmp_path: Path) -> None:
    given = recipe(tmp_path, generation={"precision": "bfloat16"})
    assert first_cause(refusal(given, keep_old_weights)) == "weights not updated"


def test_half_precision_within_the_bound_passes(tmp_path: Path) -> None:
    given = recipe(tmp_path, generation={"precision": "bfloat16"}, guard={"max_logprob_gap": 0.1})
    found = [record.metrics["mismatch/guard_gap_worst"] for record in run(given).steps]
    assert len(found) == STEPS
    assert all(0.001 < gap < 0.1 for gap in found)


def sampling_otherwise(**filters: Any) -> Callable[[Session], None]:
    """The engine overrides how it is asked to sample, as by defaults of its own."""

    def spoil(session: Session) -> None:
        generator = generator_of(session)
        generate = generator.generate
        generator.generate = lambda prompts, params, seed: generate(
            prompts, replace(params, **filters), seed=seed
        )

    return spoil


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"temperature": 0.6}, "those of temperature=0.6, not of generation's temperature=1.0 ("),
        ({"temperature": 1.35}, "those of temperature=1.3, not of generation's temperature=1.0 ("),
        ({"top_k": 10}, "those of top_k=10, not of generation's top_k=null ("),
        ({"top_p": 0.7}, "those of top_p=0.7, not of generation's top_p=1.0 ("),
    ],
    ids=str,
)
def test_filters_of_the_generator_alone_are_named_first(
    tmp_path: Path, filters: dict[str, Any], said: str
) -> None:
    message = refusal(recipe(tmp_path), sampling_otherwise(**filters))
    assert first_cause(message) == "sampling filters"
    assert said in message


def test_filters_of_the_trainer_alone_are_named_first(tmp_path: Path) -> None:
    message = refusal(
        recipe(tmp_path, generation={"top_k": 4, "temperature": 1.5}),
        sampling_otherwise(top_k=None, temperature=1.0),
    )
    assert first_cause(message) == "sampling filters"
    assert "those of temperature=1.0, top_k=null, not of generation's temperature=1.5, top_k=4 (" in message


def test_logprobs_of_the_trainer_that_are_not_numbers_stop_the_run(tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        score = session.policy.score_under

        def broken(*args: Any, **options: Any) -> Any:
            columns, stats = score(*args, **options)
            columns[0][-1] = torch.nan  # the last sampled answer
            return columns, stats

        session.policy.score_under = broken

    assert "the mean logprob gap is inf" in refusal(recipe(tmp_path), spoil)


def other_template(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")


def test_another_template_is_named_first_although_the_logprobs_agree(tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        actor = session.rollouts.worker
        actor.tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz")
        other_template(actor.tokenizer)

    message = refusal(recipe(tmp_path), spoil)
    assert first_cause(message) == "template or tokenizer"
    assert "first different at token 0" in message


def test_another_tokenizer_is_named_first(tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        session.rollouts.worker.tokenizer = build_character_tokenizer("zyxwvutsrqponmlkjihgfedcba")

    assert first_cause(refusal(recipe(tmp_path), spoil)) == "template or tokenizer"


@pytest.mark.parametrize(("by", "precision"), [(1, "float32"), (-1, "float32"), (1, "bfloat16")])
def test_routes_moved_by_one_token_are_named_first_with_their_direction(
    tmp_path: Path, by: int, precision: str
) -> None:
    def spoil(session: Session) -> None:
        generator = generator_of(session)
        generate = generator.generate

        def moved(prompts: Any, params: Any, *, seed: int) -> GenerationOutput:
            output = generate(prompts, params, seed=seed)
            output.routes = [rows.roll(by, dims=0) for rows in output.routes or ()] or None
            return output

        generator.generate = moved

    # Rounding may explain a gap, and never routes of another token.
    message = refusal(replaying(tmp_path, generation={"precision": precision}), spoil)
    assert first_cause(message) == "shifted routes"
    assert f"of the token {'before' if by > 0 else 'after'} their own" in message


def test_routes_of_a_healthy_run_agree_without_a_lag_in_every_layer(tmp_path: Path) -> None:
    (_, record) = run(replaying(tmp_path)).steps
    found = {
        name.removeprefix("mismatch/guard_routes_"): v
        for name, v in record.metrics.items()
        if "guard_routes" in name
    }
    assert found.pop("lag_0") == 1
    assert found.pop("lag_1") < 0.8
    assert found.pop("lag_-1") < 0.8
    assert found == {"layer_0": 1, "layer_1": 1}


class Cached(HFGenerator):
    """Keeps the keys and values of prompts over weight updates, as an engine with a prefix cache can."""

    kept: dict[tuple[int, ...], DynamicCache]

    @torch.inference_mode()
    def generate(self, prompts: Any, params: Any, *, seed: int) -> GenerationOutput:
        output = GenerationOutput([], [], [])
        random = torch.Generator().manual_seed(seed)
        for prompt in prompts:
            if tuple(prompt[:-1]) not in self.kept:
                cache = DynamicCache(config=self._model.config)
                self._model(torch.tensor([prompt[:-1]]), **{self._cache_keyword: cache}, use_cache=True)
                self.kept[tuple(prompt[:-1])] = cache
            cache, new, logprobs = copy.deepcopy(self.kept[tuple(prompt[:-1])]), list(prompt[-1:]), []
            for _ in range(params.limit(len(prompt))):
                logits = self._model(
                    torch.tensor([new[-1:]]), **{self._cache_keyword: cache}, use_cache=True
                ).logits[0, -1]
                scores = filter_logits(logits, unknown_ids=self._unknown_ids)
                drawn = (
                    scores.argmax()
                    if params.greedy
                    else scores.softmax(-1).multinomial(1, generator=random)[0]
                )
                new.append(int(drawn))
                logprobs.append(float(gather_logprobs(scores, drawn)))
            output.token_ids.append(new[1:])
            output.logprobs.append(logprobs)
            output.truncated.append(True)
        return output


def test_keys_and_values_of_old_weights_are_named_first(tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        generator = generator_of(session)
        generator.__class__ = Cached
        generator.kept = {}

    assert first_cause(refusal(recipe(tmp_path), spoil)) == "stale prefix cache"


def test_a_resumed_run_whose_generator_keeps_its_first_weights_is_stopped_at_the_start(
    tmp_path: Path,
) -> None:
    given = recipe(tmp_path, checkpointing={"enabled": True})
    train(given, tmp_path, RunObserver(), NeverStop())
    longer = given.model_copy(update={"grpo": given.grpo.model_copy(update={"max_num_steps": 3})})
    session = build_session(longer)
    try:
        progress = restore(
            session,
            CheckpointManager(tmp_path / "checkpoints", keep_top_k=None, metric=BEST_BY),
            tmp_path / "reference",
        )
        assert progress.step == STEPS
        keep_old_weights(session)
        with pytest.raises(GenerationError, match="at the start") as caught:
            start_loop(session, Recorder(), NeverStop(), progress=progress).run()
    finally:
        session.close()
    assert first_cause(str(caught.value)) == "weights not updated"


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_a_healthy_run_passes_with_every_kind_of_batching_and_filters(tmp_path: Path, batching: str) -> None:
    generation = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}
    assert len(run(recipe(tmp_path, batching=batching, generation=generation)).steps) == STEPS


def test_the_guard_is_on_by_default_where_generator_and_trainer_are_different_code(tmp_path: Path) -> None:
    given = tiny_recipe(tmp_path)
    assert not given.generation.guarded
    assert given.generation.model_copy(update={"backend": "vllm"}).guarded
    assert not any("guard" in name for record in run(given).steps for name in record.metrics)
