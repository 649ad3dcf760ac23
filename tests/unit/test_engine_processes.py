"""Engines in processes of their own, with the `hf` engine: what is dealt, drawn, sent, and what a death costs."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from group_worker import wait_until_gone
from headrace.config import GenerationConfig
from headrace.distributed.worker_groups import wire
from headrace.errors import ConfigError, GenerationError, GeneratorLost
from headrace.models.generation.build import build_generator
from headrace.models.generation.dealing import LengthBook, deal
from headrace.models.generation.engine_generator import EngineGenerator
from headrace.models.generation.engine_pool import EnginePool
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.weight_buckets import bucket_capacity, checksum, pack
from headrace.models.generation.weight_memory import HostMemory, Receiver
from headrace.models.generation.weights import WeightStream
from headrace.utils.background import in_background
from tiny_models import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13, 14], [8, 9], [20], [5, 6, 7]]


def build(**keys: Any) -> Any:
    cfg = GenerationConfig(**{"max_new_tokens": 6, "batch_size": 2, **keys})
    return build_generator(cfg, tiny_model("qwen3_moe"), TOKENIZER, record_routes=True)


@pytest.fixture(scope="module")
def served() -> Iterator[EngineGenerator]:
    generator = build(placement="beside", engines=2)
    yield generator
    generator.shutdown()


def pool_of(generator: EngineGenerator) -> EnginePool:
    assert isinstance(generator._engine, EnginePool)
    return generator._engine


# Dealing.


def test_equal_prompts_go_to_one_engine_and_the_longest_go_first() -> None:
    prompts = {0: [1], 1: [2], 2: [1], 3: [3, 3, 3]}
    assert deal(prompts, {0: 4.0, 1: 3.0, 2: 4.0, 3: 9.0}, 2) == [[3], [0, 2, 1]]


def test_a_group_that_is_more_than_an_engines_share_is_cut() -> None:
    dealt = deal({place: [1, 2] for place in range(8)}, {place: 10.0 for place in range(8)}, 4)
    assert sorted(map(len, dealt)) == [2, 2, 2, 2]
    assert sorted(place for part in dealt for place in part) == list(range(8))


def test_no_engine_has_more_than_a_third_above_the_least_where_prompts_differ() -> None:
    lengths = {place: float(1 + 37 * place % 101) for place in range(64)}
    dealt = deal({place: [place] for place in lengths}, lengths, 3)
    loads = [sum(lengths[place] for place in part) for part in dealt]
    assert max(loads) <= min(loads) * 4 / 3


def test_lengths_are_expected_as_seen_of_the_prompt_or_else_of_all() -> None:
    book = LengthBook()
    assert book.expected([1], 50) == 50
    book.note([[1], [1], [2]], [10, 20, 60])
    assert (book.expected([1], 50), book.expected([2], 50), book.expected([3], 50)) == (15, 50, 30)


# Weights.


def test_weights_arrive_as_they_were_sent_over_several_buckets() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = {
        f"w{i}": torch.randn(shape, generator=generator)
        for i, shape in enumerate([(7, 3), (5,), (64, 9), (), (0, 4), *[(33, 33)] * 5])
    }
    sent["ids"] = torch.arange(11)
    memory = HostMemory(bucket_capacity([4 * t.numel() for t in sent.values()], 1024))
    ours, theirs = Pipe()
    wire.send(ours, memory.handle())
    arrived: dict[str, torch.Tensor] = {}
    reader = Receiver(theirs, memory.file).tensors()
    buckets = 0
    for bucket in pack(sent.items(), memory.data, memory.capacity, torch.bfloat16):
        buckets += 1
        wire.send(ours, bucket)
        arrived.update(next(reader) for _ in bucket.entries)
        assert wire.receive(ours) == bucket.index
    wire.send(ours, None)
    assert list(reader) == []
    assert buckets > 2
    assert list(arrived) == list(sent)
    for name, tensor in sent.items():
        kept = tensor.to(torch.bfloat16) if tensor.ndim > 1 else tensor
        assert torch.equal(arrived[name], kept), name
        assert arrived[name].dtype == kept.dtype
    memory.close()


@pytest.mark.parametrize("at", [0, 1000, 40_007])
def test_a_changed_byte_and_swapped_words_show_in_the_checksum(at: int) -> None:
    data = torch.randint(256, (5 * 8192,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    changed = data.clone()
    changed[at] ^= 1
    assert checksum(changed) != checksum(data)
    words = data.clone().view(torch.int64)
    words[[at // 8, 17]] = words[[17, at // 8]]
    assert checksum(words.view(torch.uint8)) != checksum(data)
    assert checksum(data.clone()) == checksum(data)


def test_damaged_weights_are_refused_with_their_names() -> None:
    memory = HostMemory(4096)
    ours, theirs = Pipe()
    wire.send(ours, memory.handle())
    (bucket,) = pack([("a.weight", torch.ones(3, 3))], memory.data, memory.capacity, torch.float32)
    memory.data[5] ^= 1
    wire.send(ours, bucket)
    with pytest.raises(GenerationError, match=r"bucket 0 \(a.weight and 0 more\) arrived with checksum"):
        next(Receiver(theirs, memory.file).tensors())
    memory.close()


# Processes.


def test_two_processes_draw_what_one_generator_in_place_draws(served: EngineGenerator) -> None:
    in_place = build()
    for params in (
        SamplingParams(6),
        SamplingParams(6, temperature=1.3, top_k=9),
        SamplingParams(6, greedy=True),
    ):
        ours, truth = (g.generate(PROMPTS, params, seed=4) for g in (served, in_place))
        assert ours.token_ids == truth.token_ids
        assert ours.truncated == truth.truncated
        assert ours.stop_token_ids == truth.stop_token_ids
        for row, other in zip(ours.logprobs, truth.logprobs):
            assert row == pytest.approx(other, abs=1e-5)
        assert ours.routes is not None
        assert truth.routes is not None
        assert all(map(torch.equal, ours.routes, truth.routes))
    assert served.route_shape == in_place.route_shape


def test_an_engine_ends_completions_by_the_ids_of_the_trainers_model_alone() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = 7  # its config names another, which draws may hit
    assert model.config.eos_token_id == 2
    generator = build_generator(GenerationConfig(placement="beside"), model, tokenizer)
    try:
        output = generator.generate(PROMPTS * 8, SamplingParams(12), seed=0)
    finally:
        generator.shutdown()
    assert output.stop_token_ids == (7,)
    assert any(2 in new for new in output.token_ids)
    for new, truncated in zip(output.token_ids, output.truncated):
        assert (len(new), truncated) == ((new.index(7) + 1, False) if 7 in new else (12, True))


def test_metrics_tell_of_the_last_update(served: EngineGenerator) -> None:
    metrics = served.generate(PROMPTS, SamplingParams(6), seed=0).metrics
    whole = sum(tensor.nbytes for tensor in tiny_model("qwen3_moe").state_dict().values())
    assert whole / 1e9 <= metrics["weights_gb"] < 2 * whole / 1e9  # each tensor is aligned
    assert 0 < metrics["weights_copy_seconds"] < metrics["weights_seconds"]
    assert 0 < metrics["weights_pack_seconds"] < metrics["weights_seconds"]
    assert metrics["engines_lost"] == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_completion_without_routes_is_asked_for_once_more(
    served: EngineGenerator, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    params, whole = SamplingParams(6), pool_of(served).answer
    expected = served.generate(PROMPTS, params, seed=2).routes
    asked: list[list[int]] = []

    def answer(request: Any) -> Iterator[Any]:
        asked.append(list(request.places))
        for part in whole(request):
            if len(asked) <= times and 3 in part.places:
                assert part.routes is not None
                part.routes[part.places.index(3)] = None
            yield part

    monkeypatch.setattr(pool_of(served), "answer", answer)
    if times == 2:
        with pytest.raises(GenerationError, match="prompt 3: the engine returned no routes, asked twice"):
            served.generate(PROMPTS, params, seed=2)
    else:
        routes = served.generate(PROMPTS, params, seed=2).routes
        assert routes is not None
        assert expected is not None
        assert all(map(torch.equal, routes, expected))
    assert asked == [list(range(len(PROMPTS))), [3]]


def test_what_an_engine_refuses_is_the_callers_error_and_the_engines_go_on(served: EngineGenerator) -> None:
    with pytest.raises(ConfigError, match="token id 99, outside the model's vocabulary"):
        served.generate([[5], [99]], SamplingParams(6), seed=0)
    assert len(served.generate(PROMPTS, SamplingParams(6), seed=0).token_ids) == len(PROMPTS)
    assert len(served.pids) == 2


def test_an_engine_that_dies_in_the_middle_of_its_work_is_replaced(
    served: EngineGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(6)
    expected = served.generate(PROMPTS, params, seed=7)
    pool = pool_of(served)
    first, second = served.pids
    os.kill(first, signal.SIGSTOP)  # it has prompts, and answers none
    killed = False
    whole = pool.answer

    def answer(request: Any) -> Iterator[Any]:
        nonlocal killed
        for part in whole(request):
            if not killed:
                os.kill(first, signal.SIGKILL)
                killed = True
            yield part

    pool.answer = answer  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        output = served.generate(PROMPTS, params, seed=7)
    del pool.answer  # type: ignore[method-assign]
    assert killed
    assert output.token_ids == expected.token_ids
    assert output.metrics["engines_lost"] == 1
    assert [f"(pid {first}) was killed by SIGKILL" in said for said in caplog.messages] == [True]
    assert served.pids == [second]
    assert pool._starting[0].ready([pool._starting[0]], 240)
    model = tiny_model("qwen3_moe", seed=1)
    served.update_weights(model.state_dict().items(), 1)
    assert len(served.pids) == 2
    assert served.weight_version == 1
    in_place = build()
    in_place.update_weights(model.state_dict().items(), 1)
    assert (
        served.generate(PROMPTS, params, seed=8).token_ids
        == in_place.generate(PROMPTS, params, seed=8).token_ids
    )


def test_long_prompts_of_a_killed_engine_reach_one_whose_long_answers_nobody_reads_meanwhile() -> None:
    """Each way there is more than a socket holds."""
    config = LlamaConfig(
        **{"vocab_size": 1000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 1, "max_position_embeddings": 1024, "eos_token_id": None},
    )
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    cfg = GenerationConfig(placement="beside", engines=2)
    generator: Any = build_generator(cfg, AutoModelForCausalLM.from_config(config), tokenizer)
    try:
        prompts = [[300 + row] * 320 for row in range(512)]
        victim = generator.pids[0]
        os.kill(victim, signal.SIGSTOP)  # it has prompts, and answers none
        answering = in_background(lambda: generator.generate(prompts, SamplingParams(150), seed=0), "answers")
        time.sleep(0.5)  # the other one is at work
        os.kill(victim, signal.SIGKILL)
        output = answering.result(timeout=60)
        assert [len(new) for new in output.token_ids] == [150] * 512
        assert output.metrics["engines_lost"] == 1
    finally:
        for pid in generator.pids:
            os.kill(pid, signal.SIGKILL)
        generator.shutdown()


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"generation.python=/nowhere/python: cannot be run \(No such file"):
        build(placement="beside", python="/nowhere/python")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_what_an_engine_lacks_is_said_by_the_trainer() -> None:
    keys = {"backend": "vllm", "placement": "beside", "python": sys.executable}
    with pytest.raises(ConfigError, match=r"No module named 'vllm'.*generation.python"):
        build_generator(GenerationConfig(**keys), tiny_model("llama"), TOKENIZER)


TRAINER = """
import time
from test_engine_processes import build
generator = build(placement="beside")
print(generator.pids[0], flush=True)
time.sleep(100)
"""


def test_an_engine_ends_with_a_trainer_that_was_killed_and_its_folder_goes_with_it(tmp_path: Path) -> None:
    places = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER], env={**os.environ, **places}, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        engine = int(trainer.stdout.readline())
        assert list(tmp_path.iterdir())
        trainer.kill()
    assert wait_until_gone([engine])
    assert not list(tmp_path.iterdir())


def test_when_the_last_engine_dies_new_weights_start_those_again_that_may_be_and_else_the_cause_is_told(
    served: EngineGenerator,
) -> None:
    """The last test of the fixture."""

    def kill_all() -> None:
        for pid in served.pids:
            os.kill(pid, signal.SIGKILL)

    def ask() -> Any:
        return served.generate(PROMPTS, SamplingParams(6), seed=0)

    expected, weights = ask().token_ids, tiny_model("qwen3_moe", seed=1).state_dict()
    pool_of(served)._restarts[:] = [1, 0]
    kill_all()
    with pytest.raises(
        GenerationError, match=r"no engine is left: engine \d \(pid \d+\) was killed"
    ) as first:
        ask()
    assert first.type is GenerationError
    served.update_weights(weights.items(), 2)
    assert ask().token_ids == expected
    kill_all()
    with pytest.raises(GeneratorLost, match="no engine is left: engine 0"):
        ask()
    with pytest.raises(GeneratorLost, match="no engine is left"):
        served.update_weights(weights.items(), 3)
    served.shutdown()
    served.shutdown()
    with pytest.raises(GenerationError, match="after shutdown"):
        ask()


def test_an_update_whose_sender_breaks_off_leaves_engines_that_the_next_one_starts_again() -> None:
    generator, weights = build(placement="beside"), dict(tiny_model("qwen3_moe", seed=1).named_parameters())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        raise GenerationError("the sender is gone")

    try:
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        with pytest.raises(GenerationError, match="the sender is gone"):
            generator.update_weights(WeightStream(shapes, broken()), 1)
        with pytest.raises(GenerationError, match="an earlier call was broken off"):
            generator.generate(PROMPTS, SamplingParams(6), seed=0)
        generator.update_weights(weights.items(), 2)
        in_place = build()
        in_place.update_weights(weights.items(), 2)
        ours, truth = (each.generate(PROMPTS, SamplingParams(6), seed=0) for each in (generator, in_place))
        assert ours.token_ids == truth.token_ids
    finally:
        generator.shutdown()
