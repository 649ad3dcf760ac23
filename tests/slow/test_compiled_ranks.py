"""Data-parallel ranks whose layers run compiled train as one process does whose layers do not. A compiler at work."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import CONFIGS, tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
WORLD, STEPS = 2, 2
LLAMA = {"model": {"config": {**CONFIGS["llama"], "num_hidden_layers": 5}}}
CASES: dict[str, dict[str, Any]] = {
    "gathered once": LLAMA,
    "gathered by layer, recomputed": {
        **LLAMA,
        "parallel": {"gathered_gib": 0.0},
        "activation_checkpointing": True,
    },
}


def _train(workers: int, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each step, all ranks' together, and the gradient's norm."""
    cfg = tiny_policy_config("llama", workers=workers, optimizer={"lr": 1e-3, "eps": 1e-5}, **changes)
    worker = AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)
    own = dist.get_rank() if workers > 1 else 0
    steps = []
    for seed in range(STEPS):  # the second batch has other widths
        data = tiny_batch([length + seed for length in LENGTHS], seed=seed)
        shard = data.shard_by_batch_size(workers, batch_size=len(LENGTHS))[own]
        scored = worker.get_logprobs(shard)["logprobs"]
        result = worker.train(shard, PolicyGradient(), mbs=2)
        sums = torch.stack([result["loss"][0], scored.double().sum()])
        if workers > 1:
            dist.all_reduce(sums)
        steps.append(torch.stack([*sums, result["grad_norm"][0]]))
    return torch.stack(steps), torch.tensor(counters["stats"]["unique_graphs"])


def _run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    found = {}
    try:
        for name, changes in CASES.items():
            torch._dynamo.reset()
            counters.clear()
            found[name] = _train(WORLD, compile=True, **changes)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gloo")
    run_ranks(_run_rank, (str(folder),), WORLD)
    return torch.load(Path(folder, "found.pt"), weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_ranks_train_as_one_process_that_compiles_nothing(case: str, found: Any) -> None:
    compiled, graphs = found[case]
    alone, _ = _train(1, **LLAMA)
    torch.testing.assert_close(compiled, alone, rtol=1e-4, atol=1e-4)
    assert 0 < int(graphs) <= 8  # all layers share theirs: with and without gradients, by width
