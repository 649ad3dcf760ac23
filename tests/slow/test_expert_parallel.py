"""Data and context ranks that share experts train as one process does, on gloo, in float32. A minute or two."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError
from headrace.models.automodel.data import valid_counts
from headrace.models.automodel.sharding import whole_tensor
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from moe_families import tiny_sizes
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import CONFIGS, tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
STEPS = 2
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 1e-5}
# AdamW moves a weight by the sign of its gradient, so that its rounding noise grows with the learning rate.
COMMON: dict[str, Any] = {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "train_micro_batch_size": 2}
REPLAY = {"router_replay": {"enabled": True, "min_exact_fraction": 0.0}}


@dataclass(frozen=True)
class Case:
    """A layout; `experts` are the ids that routes are drawn from, None: the routers choose themselves."""

    parallel: dict[str, Any]
    experts: tuple[int, ...] | None = None
    family: str = "qwen3_moe"
    changes: dict[str, Any] = field(default_factory=dict)


# transformers has no SDPA for attention sinks.
MODEL = {"gpt_oss": {"attn_implementation": "eager"}}
RECOMPUTE = {"activation_checkpointing": True}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "own_choice": Case({"expert": 2}),
        "replay": Case({"expert": 2}, tuple(range(8))),
        "replay_recomputed": Case({"expert": 2}, tuple(range(8)), changes=RECOMPUTE),
        "second_rank_gets_no_token": Case({"expert": 2}, (0, 1, 2, 3), changes=RECOMPUTE),
        "experts_without_a_token": Case({"expert": 2}, (0, 2, 5, 7)),
        "context": Case({"expert": 2, "context": 2}, tuple(range(8))),
        "clipped": Case({"expert": 2}, changes={"max_grad_norm": 0.05}),
        "adapter": Case({"expert": 2}, changes={"lora": {"rank": 4}}),
        **{f: Case({"expert": 2}, family=f) for f in ("mixtral", "deepseek_v3", "gpt_oss", "gemma4_text")},
    },
    4: {
        "own_choice": Case({"expert": 2}),
        "replay": Case({"expert": 4}, tuple(range(8))),
        "two_ranks_get_no_token": Case({"expert": 4}, (0, 1, 4, 5)),
        "only_one_rank_gets_tokens": Case({"expert": 2}, (4, 5, 6, 7), changes=RECOMPUTE),
        "context": Case({"expert": 4, "context": 2}),
        "deepseek_v3": Case({"expert": 4}, family="deepseek_v3"),
    },
}
GATHERED = {2: {"expert": 2}, 4: {"expert": 4}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dense": (
        CONFIGS["llama"],
        {},
        "policy.parallel.expert=2: not for model_type=llama: it has no experts that run through",
    ),
    "odd": (
        {**CONFIGS["qwen3_moe"], "num_experts": 7},
        {},
        "policy.parallel.expert=2 does not divide the 7 experts of model.layers.0.mlp.experts",
    ),
    "eager": (
        CONFIGS["qwen3_moe"],
        {"experts_implementation": "eager"},
        "policy.parallel.expert=2: policy.model.experts_implementation=eager cannot share them out; use grouped_mm",
    ),
    "other_experts": (
        {"model_type": "jetmoe", **tiny_sizes("jetmoe")},
        {},
        "model_type=jetmoe: model.layers.0.self_attention.experts does not run through",
    ),
}


def _worker(case: Case) -> AutomodelPolicyWorker:
    sizes = {"model_type": case.family, **tiny_sizes(case.family)}
    model = {"config": CONFIGS.get(case.family, sizes), **MODEL.get(case.family, {})}
    changes = {**COMMON, **case.changes, **({} if case.experts is None else REPLAY)}
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallel = case.parallel if world > 1 else {}
    cfg = tiny_policy_config("llama", **changes, model=model, parallel=parallel, workers=world)
    return AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)


def _rows(case: Case, worker: AutomodelPolicyWorker) -> BatchedDataDict:
    """Return this rank's rows."""
    data = tiny_batch(LENGTHS)
    if case.experts is not None:
        places = torch.rand(
            len(LENGTHS), max(LENGTHS), 2, len(case.experts), generator=torch.Generator().manual_seed(0)
        )
        data["routed_experts"] = torch.tensor(case.experts)[places.topk(3).indices].to(torch.uint8)
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    return data.shard_by_batch_size(worker.dp_size, batch_size=len(LENGTHS))[own]


def _step(case: Case, worker: AutomodelPolicyWorker) -> dict[str, Any]:
    """Take an optimizer step; return loss, norm and whole gradients."""
    rows, loss = _rows(case, worker), PolicyGradient()
    worker.begin_train_step(*valid_counts(rows, loss.loss_type, worker.dp_group))
    worker.train_microbatches(rows, loss, mbs=2)
    gradients = {
        name: whole_tensor(p.grad, worker.device).clone()
        for name, p in worker.model.named_parameters()
        if p.grad is not None
    }
    done = worker.finish_train_step()
    total = torch.tensor(done.loss)
    if worker.dp_group:
        dist.all_reduce(total, group=worker.dp_group)
    return {"loss": total, "grad_norm": torch.tensor(done.grad_norm), "gradients": gradients}


def _run(case: Case) -> dict[str, Any]:
    worker = _worker(case)
    scored = worker.get_logprobs(_rows(case, worker))["logprobs"]
    steps = [_step(case, worker) for _ in range(STEPS)]
    weights = {name: weight.clone() for name, weight in worker.named_weights()}
    own = dist.get_rank(worker.dp_group) if worker.dp_group else 0
    return {"steps": steps, "weights": weights, "scored": scored, "replica": own}


def _run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    try:
        results: dict[str, Any] = {name: _run(case) for name, case in CASES[world].items()}
        results["checkpoint"] = _store(Path(folder), world)
        if world == 2:
            results["refused"] = {
                name: _refusal(config, model) for name, (config, model, _) in REFUSED.items()
            }
    finally:
        dist.destroy_process_group()
    torch.save(results, f"{folder}/rank{rank}of{world}.pt")


def _store(folder: Path, world: int) -> dict[str, Any]:
    """Save after a step and go on, in this and in other layouts; go on from what others have saved."""
    case = Case(GATHERED[world])
    worker = _worker(case)
    _step(case, worker)
    worker.save_checkpoint(folder / f"shared{world}")
    found = {"on": _step(case, worker)}
    for name, layout in (("same", case.parallel), ("data", {})):
        found[name] = _go_on(Case(layout), folder / f"shared{world}")
    found["from_one"] = _go_on(case, folder / "one")
    if world == 4:
        found["from_two"] = _go_on(Case({"expert": 2}), folder / "shared2")
    return found


def _go_on(case: Case, checkpoint: Path) -> dict[str, Any]:
    worker = _worker(case)
    worker.load_checkpoint(checkpoint)
    return _step(case, worker)


def _refusal(config: dict[str, Any], model: dict[str, Any]) -> str:
    cfg = tiny_policy_config("llama", workers=2, parallel={"expert": 2}, model={"config": config, **model})
    try:
        AutomodelPolicyWorker(cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    worker = _worker(Case({}))
    _step(Case({}), worker)
    worker.save_checkpoint(folder / "one")
    for world in CASES:
        run_ranks(_run_rank, (world, str(folder)), world)
    return {
        world: [torch.load(folder / f"rank{rank}of{world}.pt", weights_only=True) for rank in range(world)]
        for world in CASES
    }


def _check_steps(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    torch.testing.assert_close(found["loss"], expected["loss"], **CLOSE)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], **CLOSE)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            found["gradients"][name], gradient, **CLOSE, msg=partial("{} {}: {}".format, what, name)
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases]
)
def test_ranks_that_share_experts_take_the_steps_of_one_process(world: int, name: str, ranks: Any) -> None:
    alone = _run(CASES[world][name])
    results = [r[name] for r in ranks[world]]
    for result in results:
        for step, (found, expected) in enumerate(zip(result["steps"], alone["steps"])):
            _check_steps(found, expected, f"step {step}")
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(results[0]["weights"][key], weight, **CLOSE)
    replicas = {r["replica"]: r["scored"] for r in results}
    scored = torch.cat([replicas[i] for i in sorted(replicas)])
    torch.testing.assert_close(scored, alone["scored"], **CLOSE)
    assert alone["steps"][0]["grad_norm"] > 1e-3, "a gradient of zero proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_a_checkpoint_goes_on_in_every_layout(world: int, ranks: Any, folder: Path) -> None:
    expected = _go_on(Case({}), folder / "one")
    from_shared = _go_on(Case({}), folder / f"shared{world}")
    _check_steps(from_shared, expected, "one process")
    for result in ranks[world]:
        found = result["checkpoint"]
        assert all(torch.equal(found["same"]["gradients"][n], g) for n, g in found["on"]["gradients"].items())
        for name, step in found.items():
            _check_steps(step, expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_experts_cannot_be_shared_is_refused_on_every_rank(name: str, ranks: Any) -> None:
    for result in ranks[2]:
        assert REFUSED[name][2] in result["refused"][name]
