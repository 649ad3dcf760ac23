"""The client of SGLang servers: weights by tensors, routes, and what it says when a server does other than expected."""

import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.algorithms.run import build_session, start_loop
from headrace.config import GenerationConfig, SGLangConfig
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation import sglang_server
from headrace.models.generation.build import build_generator
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.sglang import SGLangGenerator
from headrace.models.generation.sglang_server import SGLangServer
from headrace.models.tokenizers import build_character_tokenizer
from recorder import NeverStop, Recorder
from sglang_path import sglang_on_path
from tiny_recipe import MODEL, tiny_recipe

TOKENIZER = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz")
PROMPTS = [TOKENIZER.encode(text) for text in ("ab", "hello", "x", "hello")]
SAMPLED, GREEDY = SamplingParams(6), SamplingParams(6, greedy=True)


def model_of(seed: int) -> Any:
    values = {**MODEL, "initializer_range": 0.3, "eos_token_id": TOKENIZER.eos_token_id}
    config = AutoConfig.for_model(**values, vocab_size=len(TOKENIZER))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that the user has started."""
    folder = tmp_path_factory.mktemp("server")
    model_of(0).config.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    server = SGLangServer(SGLangConfig())
    with sglang_on_path():
        server.start({"model_path": str(folder), "enable_return_routed_experts": True}, folder)
    yield server.url
    server.close()


def generation(**sglang: Any) -> GenerationConfig:
    return GenerationConfig(backend="sglang", max_new_tokens=6, sglang=SGLangConfig(**sglang))


def connect(url: str, *, seed: int = 0, routes: bool = False, **sglang: Any) -> SGLangGenerator:
    generator = build_generator(
        generation(url=url, **sglang), model_of(seed), TOKENIZER, record_routes=routes
    )
    assert isinstance(generator, SGLangGenerator)
    return generator


@pytest.fixture
def generator(url: str) -> Iterator[SGLangGenerator]:
    made = connect(url, timeout_s=20.0)
    yield made
    made.shutdown()


def go_wrong(url: str, path: str, **fault: Any) -> None:
    """Have the server's next call of `path` go wrong."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/fault", json.dumps({"path": path, **fault}))
    assert connection.getresponse().status == 200
    connection.close()


def hf(seed: int, *, routes: bool = False) -> HFGenerator:
    return HFGenerator(model_of(seed), TOKENIZER, GenerationConfig(), record_routes=routes)


@pytest.mark.parametrize("weights", ["disk", "tensor"])
def test_weights_get_there_as_files_and_as_tensors(url: str, weights: str) -> None:
    generator = connect(url, weights=weights)
    for seed in (0, 3):
        if seed:
            generator.update_weights(model_of(seed).state_dict().items(), seed)
        output = generator.generate(PROMPTS, GREEDY, seed=0)
        expected = hf(seed).generate(PROMPTS, GREEDY, seed=0)
        assert output.token_ids == expected.token_ids
        flat = [x for row in output.logprobs for x in row]
        assert flat == pytest.approx([x for row in expected.logprobs for x in row], abs=1e-5)
    assert generator.weight_version == 3


def test_files_of_weights_go_to_a_named_folder_and_do_not_stay(url: str, tmp_path: Path) -> None:
    generator = connect(url, weights_dir=str(tmp_path))
    generator.update_weights(model_of(1).state_dict().items(), 1)
    assert (
        generator.generate(PROMPTS, GREEDY, seed=0).token_ids
        == hf(1).generate(PROMPTS, GREEDY, seed=0).token_ids
    )
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_goes_there_as_files_and_is_refused_as_tensors(url: str) -> None:
    name, a, b = "model.layers.0.self_attn.q_proj", torch.randn(2, 32), torch.randn(32, 2)
    adapter = [(f"{name}.lora_A.weight", a), (f"{name}.lora_B.weight", b)]
    own = hf(0)
    own.update_weights(iter(adapter), 1)
    generator = connect(url)
    generator.update_weights(iter(adapter), 1)
    assert (
        generator.generate(PROMPTS, GREEDY, seed=0).token_ids
        == own.generate(PROMPTS, GREEDY, seed=0).token_ids
    )
    with pytest.raises(GenerationError, match=r"whole weights, .*lora_A.*set generation.sglang.weights=disk"):
        connect(url, weights="tensor").update_weights(iter(adapter), 1)


def test_routes_of_the_server_are_those_of_the_model(url: str) -> None:
    output = connect(url, routes=True).generate(PROMPTS, GREEDY, seed=0)
    expected = hf(0, routes=True).generate(PROMPTS, GREEDY, seed=0)
    assert output.routes is not None
    assert expected.routes is not None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(output.routes, expected.routes, strict=True))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no logprobs": (
        {"without": ["output_token_logprobs"]},
        r"prompt 0: .* no meta_info.output_token_logprobs \(there are: .*prompt_tokens.*\); look at the server's",
    ),
    "fewer logprobs": (
        {"meta": {"output_token_logprobs": [[-1.0, 5, None]], "completion_tokens": 2}},
        "prompt 0: SGLang returned 1 output_token_logprobs for 2 new tokens",
    ),
    "no reason": ({"without": ["finish_reason"]}, "no meta_info.finish_reason"),
    "aborted": (
        {"meta": {"finish_reason": {"type": "abort", "message": "out of memory"}}},
        "prompt 0: SGLang gave the request up: out of memory; look at the server's log",
    ),
    "other prompt": ({"meta": {"prompt_tokens": 99}}, "read 99 prompt tokens; expected the 2 that were sent"),
    "other weights": (
        {"meta": {"weight_version": "default"}},
        "weights of version 'default'; expected '0': the server was restarted",
    ),
    "fewer results": ({"kind": "fewer"}, "SGLang returned 3 results for 4 prompts"),
    "one result": ({"kind": "raw", "text": '{"text": ""}'}, "SGLang returned dict for 4 prompts"),
    "no json": (
        {"kind": "raw", "text": "<html>proxy</html>"},
        r"other than JSON \('<html>proxy</html>'\); is generation.sglang.url the address",
    ),
    "refused": (
        {"kind": "raw", "status": 400, "text": '{"error": {"message": "too long"}}'},
        "refused POST /generate with status 400: too long",
    ),
    "breaks twice": (
        {"kind": "break", "again": 1},
        r"does not answer POST /generate \(.*\); start the server",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_is_wrong_is_refused_in_one_line(
    url: str, generator: SGLangGenerator, fault: str
) -> None:
    given, said = FAULTS[fault]
    go_wrong(url, "/generate", **given)
    with pytest.raises(GenerationError, match=said) as caught:
        generator.generate(PROMPTS, SAMPLED, seed=0)
    assert "\n" not in str(caught.value)
    assert len(generator.generate(PROMPTS, SAMPLED, seed=0).token_ids) == len(PROMPTS)


def test_logprobs_after_top_k_that_the_server_does_not_know_are_refused(
    url: str, generator: SGLangGenerator
) -> None:
    go_wrong(url, "/generate", without=["output_token_sampling_logprobs"])
    with pytest.raises(GenerationError, match=r"return_sampling_mask is needed, or generation.top_k=null"):
        generator.generate(PROMPTS, SamplingParams(6, top_k=3), seed=0)


def test_metrics_count_tokens_and_what_the_server_says_of_its_cache(generator: SGLangGenerator) -> None:
    output = generator.generate(PROMPTS, SAMPLED, seed=0)
    metrics = output.metrics
    assert metrics["generated_tokens"] == sum(map(len, output.token_ids))
    assert metrics["tokens_per_s"] == pytest.approx(metrics["generated_tokens"] / metrics["generate_s"])
    assert metrics["truncated_fraction"] == sum(output.truncated) / len(PROMPTS)
    # One cached token and one retraction for each prompt, as the server has it.
    assert metrics["cached_prompt_fraction"] == len(PROMPTS) / sum(map(len, PROMPTS))
    assert metrics["preemptions"] == len(PROMPTS)


def test_a_connection_that_breaks_once_is_made_again(url: str, generator: SGLangGenerator) -> None:
    expected = generator.generate(PROMPTS, SAMPLED, seed=0).token_ids
    go_wrong(url, "/generate", kind="break")
    assert generator.generate(PROMPTS, SAMPLED, seed=0).token_ids == expected


def test_a_call_that_takes_too_long_names_the_key(url: str) -> None:
    generator = connect(url)
    generator._server._cfg = SGLangConfig(timeout_s=0.3)  # type: ignore[union-attr]
    go_wrong(url, "/generate", kind="hang", s=1.5)
    started = time.monotonic()
    with pytest.raises(
        GenerationError, match=r"POST /generate within generation.sglang.timeout_s=0.3; raise it"
    ):
        generator.generate(PROMPTS, SAMPLED, seed=0)
    assert time.monotonic() - started < 1.2


def test_weights_that_the_server_does_not_take_are_an_error(url: str, generator: SGLangGenerator) -> None:
    go_wrong(
        url,
        "/update_weights_from_disk",
        kind="raw",
        text='{"success": false, "message": "repository not found"}',
    )
    with pytest.raises(
        GenerationError, match=r"refused the weights of version 4: repository not found; .*weights_dir"
    ):
        generator.update_weights(model_of(1).state_dict().items(), 4)
    assert generator.weight_version == 0
    go_wrong(url, "/flush_cache", kind="raw", status=400, text="requests are running")
    with pytest.raises(
        GenerationError, match="refused POST /flush_cache with status 400: requests are running"
    ):
        generator.update_weights(model_of(1).state_dict().items(), 4)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("10.0.0.2:30000", "expected an address such as http://"),
        (
            "http://127.0.0.1:1",
            r"at http://127.0.0.1:1 does not answer GET /health \(ConnectionRefused.*start the server",
        ),
    ],
)
def test_an_address_without_a_server_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        connect(address)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"exit code 1, and said last: .*No module named .*sglang.*generation.sglang.python"
    ):
        build_generator(generation(), model_of(0), TOKENIZER)
    with pytest.raises(ConfigError, match=r"generation.sglang.python=/no/python: No such file"):
        build_generator(generation(python="/no/python"), model_of(0), TOKENIZER)


ENDS = """
import sys
from pathlib import Path
from headrace.config import SGLangConfig
from headrace.errors import ConfigError
from headrace.models.generation.sglang_server import SGLangServer

try:
    SGLangServer(SGLangConfig(python=sys.argv[1])).start({}, Path(sys.argv[2]))
except ConfigError as error:
    print(ascii(str(error)))
"""


def test_what_a_server_said_last_is_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '\\303\\274ber\\n'\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    command = [sys.executable, "-c", ENDS, str(python), str(tmp_path)]
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=True)
    assert r"has ended with exit code 3, and said last: \xfcber; it was started with" in said.stdout


@pytest.mark.parametrize("key", ["model_path", "dtype", "port"])
def test_an_argument_that_headrace_sets_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"generation.sglang.args.{key}=1: headrace sets it"):
        build_generator(generation(args={key: 1}), model_of(0), TOKENIZER)


def test_a_server_of_our_own_that_dies_is_told_apart_and_one_that_lives_ends_with_the_generator() -> None:
    with sglang_on_path():
        generator = build_generator(
            generation(python=sys.executable, sleep="kv_cache"), model_of(0), TOKENIZER
        )
    assert isinstance(generator, SGLangGenerator)
    server = generator._server
    assert server is not None
    assert server.pid is not None
    assert len(generator.generate(PROMPTS, GREEDY, seed=0).token_ids) == len(PROMPTS)
    generator.release()
    go_wrong(server.url, "/generate", kind="die")
    with pytest.raises(GenerationError, match="the SGLang server has ended with exit code 7"):
        generator.generate(PROMPTS, GREEDY, seed=0)
    pid = server.pid
    generator.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_port_that_somebody_takes_before_the_server_does_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(0).config.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    server = SGLangServer(SGLangConfig())
    with socket.socket() as other, sglang_on_path():
        other.bind(("127.0.0.1", 0))
        ports = iter([other.getsockname()[1], sglang_server._free_port()])
        monkeypatch.setattr(sglang_server, "_free_port", lambda: next(ports))
        server.start({"model_path": str(tmp_path)}, tmp_path)
    try:
        assert server.get("/get_server_info")
    finally:
        server.close()


def test_a_server_of_the_user_stays(url: str) -> None:
    connect(url).shutdown()
    assert connect(url).generate(PROMPTS, GREEDY, seed=0).token_ids


def test_ids_without_a_token_are_said(url: str, caplog: pytest.LogCaptureFixture) -> None:
    few = build_character_tokenizer("abcdefghijklmnopqrstuvwxy")
    with caplog.at_level(logging.WARNING):
        build_generator(generation(url=url), model_of(0), few)
    assert "scores for ids without a token" in caplog.text


def test_a_run_trains_on_a_servers_completions_and_the_guard_finds_them_right(
    url: str, tmp_path: Path
) -> None:
    model = {**MODEL, "initializer_range": 0.3}
    recipe = tiny_recipe(
        tmp_path,
        policy={
            "model": {"config": model, "experts_implementation": "grouped_mm"},
            "tokenizer": {"builder": "characters", "characters": "abcdefghijklmnopqrstuvwxyz"},
            "router_replay": {"enabled": True},
        },
        env={"lowercase": True},
        generation={
            "backend": "sglang",
            "sglang": {"url": url},
            "guard": {"every_n_steps": 1, "max_logprob_gap": 1e-4},
        },
        grpo={"max_num_steps": 2},
        checkpointing={"enabled": False},
        validation={"at_start": False, "at_end": False},
    )
    session, recorder = build_session(recipe), Recorder()
    try:
        start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    assert len(recorder.steps) == 2
    for record in recorder.steps:
        assert record.metrics["mismatch/guard_routes_lag_0"] == 1
        assert record.metrics["generator/cached_prompt_fraction"] > 0
