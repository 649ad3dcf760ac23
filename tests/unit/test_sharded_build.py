"""Several ranks build a model that only the first one loads whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from headrace.errors import ConfigError
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from moe_families import tiny_moe, tiny_sizes
from ranks import run_ranks
from tiny_models import CONFIGS, tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

WORLD = 2
LENGTHS = [9, 4, 12, 7]
# With tied weights, buffers that have values of their own, and buffers that a checkpoint has.
NAMES = ("llama", "qwen3_moe", "gemma3", "opt", "deepseek")
LARGE = {
    **CONFIGS["llama"],
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "head_dim": 192,
}
THREE = {"num_attention_heads": 3, "num_key_value_heads": 3}
HEADS = {
    "odd": {**CONFIGS["llama"], "hidden_size": 24, **THREE},
    "one_key": {**CONFIGS["llama"], "num_key_value_heads": 1},
    "latent": {"model_type": "deepseek_v3", **tiny_sizes("deepseek_v3", **THREE)},
}


def _worker(
    model: dict[str, Any], workers: int = WORLD, parallel: dict[str, int] | None = None, **options: Any
) -> AutomodelPolicyWorker:
    cfg = tiny_policy_config(
        "llama", model={"config": None, **model}, workers=workers, parallel=parallel or {}
    )
    return AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=3, **options)


def _model(name: str, folder: Path) -> dict[str, Any]:
    return {"config": CONFIGS[name]} if name in CONFIGS else {"path": str(folder / name)}


def _peak_bytes() -> int:
    # Not getrusage: what it counts begins with the size of the process that started this one.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak.group(1)) * 1024


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        torch.save(_build_all(Path(folder)), f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def _build_all(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"weights": {}, "logprobs": {}}
    for name in NAMES:
        worker = _worker(_model(name, folder), with_reference=True)
        results["weights"][name] = {n: t.clone() for n, t in worker.named_weights()}
        rows = tiny_batch(LENGTHS)
        results["logprobs"][name] = (
            worker.get_logprobs(rows)["logprobs"],
            worker.get_reference_policy_logprobs(rows)["reference_logprobs"],
        )
    before = _peak_bytes()
    worker = _worker({"config": LARGE})
    results["grown"], results["bytes"] = _peak_bytes() - before, 4 * worker.num_parameters()
    results["damaged"] = _refusal(_model("damaged", folder))
    for name, heads in HEADS.items():
        results[name] = _refusal({"config": heads}, parallel={"context": WORLD})
    results["by_layer"] = _refusal(_model("by_layer", folder), parallel={"context": WORLD})
    return results


def _refusal(model: dict[str, Any], **changes: Any) -> str:
    try:
        _worker(model, **changes)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("build"))
    # Its selection biases are buffers, drawn here, and zero in a model that is built anew.
    tiny_moe("deepseek_v3").save_pretrained(folder / "deepseek")
    layers = {"1": {"num_key_value_heads": 3}}
    tiny_moe("gemma4_text", num_attention_heads=6, per_layer_config=layers).save_pretrained(
        folder / "by_layer"
    )
    values = dict(CONFIGS["llama"])
    AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"not weights")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    run_ranks(_run_rank, (str(folder),), WORLD)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_weights_that_one_process_draws_bit_for_bit(
    name: str, folder: Path, ranks: Any
) -> None:
    alone = dict(_worker(_model(name, folder), workers=1).named_weights())
    assert ranks[0]["weights"][name].keys() == alone.keys()
    assert all(torch.equal(weight, alone[key]) for key, weight in ranks[0]["weights"][name].items())


@pytest.mark.parametrize("name", NAMES)
def test_ranks_and_their_reference_score_as_one_process_does(name: str, folder: Path, ranks: Any) -> None:
    expected = _worker(_model(name, folder), workers=1).get_logprobs(tiny_batch(LENGTHS))["logprobs"]
    for rank in ranks:
        policy, reference = rank["logprobs"][name]
        torch.testing.assert_close(policy, expected, rtol=0, atol=1e-5)
        assert torch.equal(policy, reference)


def test_a_rank_beside_the_first_never_holds_the_whole_model(ranks: Any) -> None:
    size = ranks[1]["bytes"]
    assert ranks[0]["grown"] > size
    # Its half, the largest matrix while that is whole, and what a forward and its messages take.
    assert ranks[1]["grown"] < 0.8 * size


def test_files_that_the_first_rank_cannot_read_end_all_ranks_with_one_message(ranks: Any) -> None:
    assert "cannot build this model" in ranks[0]["damaged"]
    assert ranks[0]["damaged"] == ranks[1]["damaged"]


def test_heads_that_the_context_ranks_cannot_share_out_end_all_ranks_at_the_start(ranks: Any) -> None:
    for rank in ranks:
        for name, heads in (("odd", "query"), ("latent", "query"), ("by_layer", "key-value")):
            assert re.search(rf"policy\.parallel\.context=2 and 3 {heads} heads", rank[name]), name
            assert rank[name] == ranks[0][name]
        assert rank["one_key"] == ""
