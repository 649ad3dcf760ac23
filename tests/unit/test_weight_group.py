"""Weights by broadcast: several ranks as threads of this process, and engines in processes that break off."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from headrace.config import GenerationConfig
from headrace.errors import GenerationError, TransportError
from headrace.models.generation.build import build_generator
from headrace.models.generation.engine_generator import EngineGenerator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.weight_group import Meeting, WeightGroup, WeightRoute
from headrace.models.generation.weights import WeightStream
from headrace.utils.background import in_background
from tiny_models import tiny_model, tiny_tokenizer

Tensors = dict[str, torch.Tensor]
PARAMS = SamplingParams(6)
PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture(scope="module")
def meeting() -> Meeting:
    return Meeting("127.0.0.1")


_names = iter(range(99))


def route_of(meeting: Meeting, ranks: int, **keys: Any) -> WeightRoute:
    values = {
        "host": meeting.host,
        "port": meeting.port,
        "name": f"test-{next(_names)}",
        "ranks": ranks,
        "device": "cpu",
        "capacity": 2048,
        "dtype": torch.bfloat16,
        "splits_experts": False,
        "timeout_s": 20.0,
    }
    return WeightRoute(**{**values, **keys})


def weights_of(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (5,), (16, 9), (), (0, 4), *[(31, 31)] * 5]
    return {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def received(group: WeightGroup, route: WeightRoute, rank: int) -> "Future[Tensors]":
    def receive() -> Tensors:
        with group.receiving(route, rank) as weights:
            return {name: tensor.clone() for name, tensor in weights}

    return in_background(receive, f"rank {rank}")


def test_every_rank_gets_the_weights_of_each_update_over_several_buckets(meeting: Meeting) -> None:
    route, sender, receivers = route_of(meeting, 3), WeightGroup(), [WeightGroup(), WeightGroup()]
    for update in range(3):
        step = replace(route, update=update)
        arriving = [received(group, step, rank) for rank, group in enumerate(receivers, 1)]
        sent = weights_of(update)
        figures = sender.send(step, sent.items())
        for future, group in zip(arriving, receivers):
            arrived = future.result()
            assert list(arrived) == list(sent)
            for name, tensor in sent.items():
                kept = tensor.to(torch.bfloat16) if tensor.ndim > 1 else tensor
                assert torch.equal(arrived[name], kept)
                assert arrived[name].dtype == kept.dtype
            assert len(group.seconds) > 2
            assert min(group.seconds) > 0
        assert figures["weights_gb"] > sum(t.numel() for t in sent.values()) * 2 / 1e9
        meeting.forget(step)
    for group in (sender, *receivers):
        group.leave()


def test_every_lane_gets_the_weights_of_its_own_sender_through_memory(meeting: Meeting) -> None:
    route = route_of(meeting, 0, takers=(2, 0, 1))
    groups = [(lane, WeightGroup()) for lane in (0, 0, 2)]
    senders = [(lane, WeightGroup()) for lane in (0, 2)]
    assert [route.sends(rank) for rank in range(4)] == [True, False, True, False]
    for update in range(2):
        step = replace(route, update=update)
        arriving = [received(group, step, lane) for lane, group in groups]
        for lane, sender in senders:
            in_background(partial(sender.send, step, weights_of(lane + update).items(), lane), f"lane {lane}")
        for (lane, group), future in zip(groups, arriving):
            arrived = future.result(timeout=20)
            for name, tensor in weights_of(lane + update).items():
                assert torch.equal(arrived[name], tensor.to(arrived[name].dtype))
            assert len(group.seconds) > 2
        meeting.forget(step)


def test_a_receivers_error_in_one_lane_ends_the_update_for_the_other(meeting: Meeting) -> None:
    route = route_of(meeting, 0, timeout_s=5.0, takers=(1, 1))

    def fails() -> None:
        with WeightGroup().receiving(route, 1):
            raise GenerationError("no such name")

    sending = in_background(partial(WeightGroup().send, route, weights_of(0).items()), "lane 0")
    with pytest.raises(GenerationError, match="no such name"):
        fails()
    with pytest.raises(TransportError, match=r"given up: rank 1 \(pid \d+\) failed"):
        sending.result(timeout=10)


def test_a_receivers_error_ends_the_update_for_all(meeting: Meeting) -> None:
    route = route_of(meeting, 3, timeout_s=5.0)
    sender, good, bad = WeightGroup(), WeightGroup(), WeightGroup()

    def fails() -> None:
        with bad.receiving(route, 2) as weights:
            next(iter(weights))
            raise GenerationError("no such name")

    failing = in_background(fails, "rank 2")
    arriving = received(good, route, 1)
    with pytest.raises(TransportError, match=r"given up: rank 2 \(pid \d+\) failed"):
        sender.send(route, weights_of(0).items())
    with pytest.raises(GenerationError, match="no such name"):
        failing.result()
    with pytest.raises(TransportError):
        arriving.result()


def test_a_senders_error_ends_the_update_for_all(meeting: Meeting) -> None:
    route, sender, receiver = route_of(meeting, 2, timeout_s=5.0), WeightGroup(), WeightGroup()
    arriving = received(receiver, route, 1)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(30, 30)
        raise GenerationError("the policy failed")

    with pytest.raises(GenerationError, match="the policy failed"):
        sender.send(route, breaking())
    with pytest.raises(TransportError, match=r"given up: rank 0"):
        arriving.result()


@pytest.mark.parametrize("comes", [False, True], ids=["absent", "silent"])
def test_a_rank_that_does_not_come_or_goes_silent_is_not_waited_for_longer_than_the_limit(
    meeting: Meeting, comes: bool
) -> None:
    route, sender, receiver = route_of(meeting, 2, timeout_s=1.0), WeightGroup(), WeightGroup()
    held = threading.Event()

    def silent() -> None:
        with receiver.receiving(route, 1) as weights:
            next(iter(weights))
            held.wait(20)

    waiting = in_background(silent, "rank 1") if comes else None
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"waited 1 s for .*generation.weights_timeout_s|broke off"):
        sender.send(route, weights_of(0).items())
    assert time.monotonic() - started < 6
    held.set()
    if waiting is not None:
        waiting.result()


# Engines.


@pytest.fixture(scope="module")
def served() -> Iterator[EngineGenerator]:
    cfg = GenerationConfig(
        max_new_tokens=6, batch_size=2, placement="apart", engines=2, weights_timeout_s=6.0
    )
    generator = build_generator(cfg, tiny_model("llama"), tiny_tokenizer())
    assert isinstance(generator, EngineGenerator)
    yield generator
    generator.shutdown()


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightGroup]:
    """What another process has: a policy's first rank, the same for all updates."""
    group = WeightGroup()
    yield group
    group.leave()


def answers(generator: Any) -> Any:
    return generator.generate(PROMPTS, PARAMS, seed=3).token_ids


def in_place(seed: int) -> Any:
    cfg = GenerationConfig(max_new_tokens=6, batch_size=2)
    generator = build_generator(cfg, tiny_model("llama"), tiny_tokenizer())
    generator.update_weights(tiny_model("llama", seed=seed).state_dict().items(), 1)
    return answers(generator)


def test_another_process_sends_by_the_route_and_the_generator_waits(
    served: EngineGenerator, sender: WeightGroup
) -> None:
    route, weights = served.weight_route(), tiny_model("llama", seed=1).state_dict()
    assert route is not None

    def figures() -> Iterator[dict[str, float]]:
        yield sender.send(route, weights.items())

    shapes = {name: tensor.shape for name, tensor in weights.items()}
    served.update_weights(WeightStream(shapes, figures(), is_routed=True), 1)
    assert served.weight_version == 1
    assert answers(served) == in_place(1)
    metrics = served.generate(PROMPTS, PARAMS, seed=0).metrics
    assert 0 < metrics["weights_copy_seconds"] < metrics["weights_seconds"]
    assert metrics["weights_gb"] > 0


def test_an_update_that_does_not_fit_ends_the_sender_of_a_route_too(
    served: EngineGenerator, sender: WeightGroup
) -> None:
    route, weights = served.weight_route(), tiny_model("llama", seed=1).state_dict()
    assert route is not None
    sending = in_background(lambda: sender.send(route, weights.items()), "sender")
    with pytest.raises(GenerationError, match="unknown: another"):
        served.update_weights(WeightStream({"another": (1,)}, iter(()), is_routed=True), 2)
    with pytest.raises(TransportError, match="given up: the weights do not fit"):
        sending.result(timeout=10)


def test_an_engine_that_died_meanwhile_is_left_out_of_the_next_update(
    served: EngineGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = served.pids
    os.kill(first, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        served.update_weights(tiny_model("llama", seed=2).state_dict().items(), 2)
    assert served.pids == [second]
    assert f"(pid {first}) was killed by SIGKILL" in caplog.text
    assert answers(served) == in_place(2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_dies_during_an_update_ends_it_with_its_name_and_the_next_one_is_whole(
    served: EngineGenerator, number: int
) -> None:
    """The last test of the fixture: engines are started again."""
    pool: Any = served._engine
    assert all(engine.ready([engine], 240) for engine in pool._starting.values())
    served.update_weights(tiny_model("llama", seed=2).state_dict().items(), 2)
    victim, weights = served.pids[0], tiny_model("llama", seed=3).state_dict()

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        for count, item in enumerate(weights.items()):
            if count == 3:
                os.kill(victim, number)
            yield item

    shapes = {name: tensor.shape for name, tensor in weights.items()}
    pattern = "was killed by SIGKILL" if number == signal.SIGKILL else "did not answer"
    started = time.monotonic()
    with pytest.raises(TransportError, match=rf"engine \d.*{pattern}.*while weights were on their way"):
        served.update_weights(WeightStream(shapes, breaking()), 3)
    assert time.monotonic() - started < 30
    with pytest.raises(GenerationError, match="parts of old and new weights"):
        answers(served)
    assert victim not in served.pids
    served.update_weights(weights.items(), 3)
    assert answers(served) == in_place(3)
