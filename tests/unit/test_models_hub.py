"""Models and tokenizers by their names on the hub, from a cache that the tests make; no network is touched."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from headrace.config import PolicyConfig
from headrace.errors import ConfigError
from headrace.models.automodel.setup import build_skeleton, load_model, load_tokenizer
from headrace.models.hub import model_directory
from hub_cache import publish
from tiny_models import save_tiny_model, tiny_model

NAME = "some-team/tiny-qwen"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("hub")
    for seed, revision in ((0, "main"), (1, "v1")):
        publish(
            cache,
            NAME,
            save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", seed=seed),
            revision=revision,
        )
    return cache


@pytest.fixture(autouse=True)
def _only_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def policy(path: str = NAME, tokenizer: dict[str, Any] | None = None, **model: Any) -> PolicyConfig:
    values = {"model": {"path": path, **model}, "tokenizer": tokenizer or {}, "device": "cpu"}
    return PolicyConfig.model_validate({**values, "max_total_sequence_length": 64})


def test_a_name_finds_model_and_tokenizer_in_the_cache() -> None:
    cfg = policy()
    assert load_tokenizer(cfg).encode("ab")
    expected = tiny_model("qwen2", seed=0).state_dict()
    loaded = load_model(cfg, seed=9).state_dict()
    assert all(torch.equal(loaded[n], expected[n]) for n in expected)


def test_a_revision_is_another_snapshot() -> None:
    loaded = load_model(policy(revision="v1"), seed=9).state_dict()
    first, second = (tiny_model("qwen2", seed=seed).state_dict()["model.norm.weight"] for seed in (0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(loaded[name], tiny_model("qwen2", seed=1).state_dict()[name])
    assert first.shape == second.shape


def test_a_tokenizer_has_a_name_and_a_revision_of_its_own() -> None:
    cfg = policy(tokenizer={"path": NAME, "revision": "v1"})
    assert load_tokenizer(cfg).encode("ab") == load_tokenizer(policy()).encode("ab")


def test_a_directory_goes_before_a_name(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / NAME, "llama")
    assert load_model(policy(), seed=0).config.model_type == "llama"
    with pytest.raises(ConfigError, match=r"policy.model.revision=v1: .* is a directory here, .*; remove it"):
        load_model(policy(revision="v1"), seed=0)


def test_a_skeleton_needs_no_weights(cache: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", "qwen2")
    (tmp_path / "source" / "model.safetensors").unlink()
    publish(cache, "some-team/bare", tmp_path / "source")
    assert build_skeleton(policy("some-team/bare")).config.model_type == "qwen2"
    with pytest.raises(ConfigError, match=r"policy.model.path=some-team/bare: no weights there"):
        model_directory(policy("some-team/bare").model)


def test_older_weights_are_read_where_there_are_no_safetensors(cache: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "source", "llama")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), tmp_path / "source" / "pytorch_model.bin")
    publish(cache, "some-team/old", tmp_path / "source")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(
        load_model(policy("some-team/old"), seed=3).state_dict()[name], tiny_model("llama").state_dict()[name]
    )


# A hub that answers.


class _Answer(BaseHTTPRequestHandler):
    status, code = 404, "RepoNotFound"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Answer]]:
    handler = type("Answer", (_Answer,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (
            404,
            "RepoNotFound",
            r"policy.model.path=no/such: .*the hub has no such model, .*; check the name, or set HF_TOKEN",
        ),
        (403, "GatedRepo", r"policy.model.path=no/such: its owner has to let you in; .*set HF_TOKEN"),
        (
            404,
            "RevisionNotFound",
            r"policy.model.revision=v7: no/such on the hub has no such branch, tag or commit",
        ),
        (
            500,
            "",
            r"policy.model.path=no/such: .*cannot be reached \(no answer\); .*hf download no/such --revision v7",
        ),
    ],
)
def test_what_a_hub_refuses_is_one_line(hub: type[_Answer], status: int, code: str, told: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(ConfigError, match=told):
        load_model(policy("no/such", revision="v7"), seed=0)


def test_a_hub_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"policy.model.path=no/such: .*cannot be reached \(no answer\)"):
        load_model(policy("no/such"), seed=0)
    # What is in the cache is found all the same.
    assert load_model(policy(), seed=0).config.model_type == "qwen2"


# Mistakes.


def _without(file: str) -> Any:
    return lambda folder: (folder / file).unlink()


def _config(**values: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def _weights_of_another(folder: Path) -> None:
    save_tiny_model(folder / "other", "llama")
    (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")


BROKEN: dict[str, tuple[Any, str]] = {
    "no config": (_without("config.json"), r"policy.model.path=.*: no config.json there; give"),
    "no weights": (_without("model.safetensors"), r"policy.model.path=.*: no weights there .*; copy them"),
    "a classifier": (
        _config(architectures=["Qwen2ForSequenceClassification"]),
        r"policy.model.path=.*: its config.json is of Qwen2ForSequenceClassification, which is no causal .*; give one",
    ),
    "code of its own": (
        _config(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}),
        r"policy.model.path=.*: .*Python files of its own; .*policy.model.trust_remote_code=true",
    ),
    "another type": (_config(model_type="nonsense"), r"policy.model.path=.*nonsense"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), r"policy.model.path="),
    "weights of another": (_weights_of_another, r"no weights for .*; the files must be whole"),
    "weights of another size": (
        _config(intermediate_size=24),
        r"policy.model.path=.*: [\w.]+ has the shape \([\d, ]+\), and \([\d, ]+\) by the config \(\d+ such",
    ),
    "a torn file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 20),
        r"policy.model.path=.*: transformers cannot build this model",
    ),
    "no tokenizer": (
        _no_tokenizer,
        r"policy.model.path=.*: no tokenizer can be read there .*; set policy.tokenizer.path",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_directory_is_one_line(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    change, told = BROKEN[name]
    change(folder)
    cfg = policy(str(folder))
    with pytest.raises(ConfigError, match=told) as error:
        load_model(cfg, seed=0, tokenizer=load_tokenizer(cfg))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        (
            policy("no/such"),
            r"policy.model.path=no/such: .*\(HF_HUB_OFFLINE is set\); .*hf download no/such, and copy",
        ),
        (
            policy("/no/such/model"),
            r"policy.model.path=/no/such/model: no such directory, .*OWNER/NAME; give",
        ),
        (policy("nonsense"), r"policy.model.path=nonsense: no such directory, .*OWNER/NAME; give"),
        (policy(tokenizer={"path": "no/such"}), r"policy.tokenizer.path=no/such: .*hf download no/such"),
        (
            policy(revision="v9"),
            r"policy.model.path=some-team/tiny-qwen: .*hf download some-team/tiny-qwen --revision v9",
        ),
    ],
)
def test_a_name_that_finds_nothing_is_one_line(cfg: PolicyConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        load_tokenizer(cfg)
    assert "\n" not in str(error.value)


def test_python_files_of_a_model_run_only_where_they_are_trusted(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    (folder / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class Config(Qwen2Config):\n    model_type = 'own'\n"
        "class Model(Qwen2ForCausalLM):\n    config_class = Config\n"
    )
    _config(
        model_type="own",
        architectures=["Model"],
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )(folder)
    cfg = policy(str(folder), trust_remote_code=True)
    model = load_model(cfg, seed=0)
    assert type(model).__module__.startswith("transformers_modules")
    with pytest.raises(ConfigError, match=r"trust_remote_code=true"):
        load_model(policy(str(folder)), seed=0)
