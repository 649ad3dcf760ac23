"""An adapter on two processes with FSDP2: the step of one process, and checkpoints that any number of ranks reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.models.policy.results import merge_rows
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen2", {"precision": "bfloat16", "activation_checkpointing": True}),
    ("llama", {"parallel": {"context": 2}}),
]
DROPPING: tuple[str, dict[str, Any]] = ("llama", {"lora": {"dropout": 0.3}})
"""Not the step of one process: each rank draws for its own rows."""


def make(name: str, changes: dict[str, Any]) -> AutomodelPolicyWorker:
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallel = changes.get("parallel", {}) if world > 1 else {}
    lora = {"rank": 4, "alpha": 8.0, **changes.get("lora", {})}
    options = {**changes, "parallel": parallel, "workers": world, "lora": lora}
    cfg = tiny_policy_config(name, **options, optimizer={"lr": 1e-3, "eps": 1e-5})
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )


def rows(worker: AutomodelPolicyWorker, seed: int) -> Any:
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    return tiny_batch(LENGTHS, seed=seed).shard_by_batch_size(worker.dp_size, batch_size=8)[own]


def train(worker: AutomodelPolicyWorker, seed: int) -> torch.Tensor:
    return worker.train(rows(worker, seed), PolicyGradient(), mbs=2)["grad_norm"]


def scores(worker: AutomodelPolicyWorker) -> list[torch.Tensor]:
    policy = worker.get_logprobs(rows(worker, 0))["logprobs"]
    return [policy, worker.get_reference_policy_logprobs(rows(worker, 0))["reference_logprobs"]]


def run(name: str, changes: dict[str, Any], folder: Path, tag: str) -> dict[str, Any]:
    worker = make(name, changes)
    first = scores(worker)
    norms = [train(worker, seed) for seed in range(2)]
    worker.save_checkpoint(folder / tag)
    worker.snapshot_reference()
    worker.save_reference(folder / f"{tag}-reference")
    again = make(name, changes)
    again.load_checkpoint(folder / tag)
    again.load_reference(folder / f"{tag}-reference")
    resumed = [torch.equal(train(worker, 5), train(again, 5))]
    resumed += [torch.equal(*pair) for pair in zip(scores(worker), scores(again))]
    sent = {n: t.clone() for n, t in worker.named_weights()}
    return {"first": first, "norms": norms, "scores": scores(worker), "resumed": resumed, "sent": sent}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        cases = enumerate([*CASES, DROPPING])
        results = [run(name, changes, Path(folder), f"two{i}") for i, (name, changes) in cases]
    finally:
        dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("gloo"))
    run_ranks(run_rank, (str(folder),), 2)
    return folder


@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_ranks_train_the_adapter_as_one_process_does(case: int, folder: Path) -> None:
    name, changes = CASES[case]
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True)[case] for rank in range(2)]
    alone = run(name, changes, folder, f"one{case}")
    assert all(all(r["resumed"]) for r in (*ranks, alone))
    half = changes.get("precision") == "bfloat16"
    close: Any = {"rtol": 5e-2, "atol": 5e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    for key in ("first", "scores"):
        for part in range(2):
            split = [{"logprobs": r[key][part]} for r in ranks]
            both = split[0]["logprobs"] if "parallel" in changes else merge_rows(split, None)["logprobs"]
            torch.testing.assert_close(both, alone[key][part], **close)
    torch.testing.assert_close(
        torch.cat(ranks[0]["norms"]), torch.cat(alone["norms"]), rtol=close["rtol"], atol=0
    )
    assert ranks[0]["sent"].keys() == alone["sent"].keys()
    assert not ranks[1]["sent"]
    assert all(".lora_" in name for name in alone["sent"])


def test_dropout_on_two_ranks_goes_on_from_a_checkpoint_bit_for_bit(folder: Path) -> None:
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True)[len(CASES)] for rank in range(2)]
    assert [all(r["resumed"]) for r in ranks] == [True, True]


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process_and_holds_no_other_weight(folder: Path) -> None:
    files = {f.relative_to(folder / "two0").as_posix() for f in (folder / "two0").rglob("*") if f.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "trainer.json",
    }
    name, changes = CASES[0]
    worker = make(name, changes)
    worker.load_checkpoint(folder / "two0")
    train(worker, 5)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True)[0] for rank in range(2)]
    both = merge_rows([{"logprobs": r["scores"][0]} for r in ranks], None)["logprobs"]
    torch.testing.assert_close(scores(worker)[0], both, rtol=1e-4, atol=1e-5)
