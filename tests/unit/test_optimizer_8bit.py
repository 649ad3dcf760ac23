"""AdamW with 8-bit moments and chance rounding: against naive references, in checkpoints, and on two ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.config import OptimizerConfig, PolicyConfig
from headrace.errors import ConfigError
from headrace.models.automodel.optimizer_8bit import build_adamw_8bit, state_bytes
from headrace.models.automodel.setup import build_optimizer, build_scheduler
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from ranks import run_ranks
from reference_training import PolicyGradient
from tiny_models import CONFIGS, tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer
from torchao_path import need_torchao

need_torchao()

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
# Large enough for moments in 8 bits, also where two ranks share a matrix.
SIZES = {**CONFIGS["llama"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
EIGHT = {"kind": "adamw_8bit", "lr": 1e-2}
ROUNDED = {**EIGHT, "stochastic_rounding": True}


def worker(optimizer: dict[str, Any], **changes: Any) -> AutomodelPolicyWorker:
    world = dist.get_world_size() if dist.is_initialized() else 1
    cfg = tiny_policy_config("llama", model={"config": SIZES}, optimizer=optimizer, workers=world, **changes)
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )


def train(policy: AutomodelPolicyWorker, seed: int = 0) -> torch.Tensor:
    rank = dist.get_rank(policy.dp_group) if policy.dp_group else 0
    rows = tiny_batch(LENGTHS, seed=seed).shard_by_batch_size(policy.dp_size, batch_size=8)[rank]
    return policy.train(rows, PolicyGradient(), mbs=2)["grad_norm"]


def weights(policy: AutomodelPolicyWorker) -> dict[str, torch.Tensor]:
    return {n: t.clone().float() for n, t in policy.named_weights()}


def moments(policy: AutomodelPolicyWorker) -> dict[str, str]:
    names = {id(p): n for n, p in policy.model.named_parameters()}
    states = policy.optimizer.state.items()
    return {
        names[id(p)]: type(getattr(s["exp_avg"], "_local_tensor", s["exp_avg"])).__name__ for p, s in states
    }


# Against naive references.


def naive_8bit(values: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    """Return values as the nearest code of their block of 256 gives them."""
    rows = []
    for block in values.flatten().split(256):
        scale = block.abs().max().clamp(min=1e-12)
        rows.append(qmap[(block[:, None] / scale - qmap).abs().argmin(1)] * scale)
    return torch.cat(rows).view_as(values)


def test_steps_are_adamw_s_with_moments_rounded_to_the_nearest_code_in_between() -> None:
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator) for shape in ((64, 128), (64, 16), (64,))]
    model = torch.nn.ParameterList([torch.nn.Parameter(w.clone()) for w in first])
    cfg = OptimizerConfig(kind="adamw_8bit", lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(model, cfg)
    qmaps: list[Any] = [None, None]
    naive = [(w.clone(), torch.zeros_like(w), torch.zeros_like(w)) for w in first]
    for step in range(1, 5):
        for index, parameter in enumerate(model):
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad
            w, m, v = naive[index]
            m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
            w = w * (1 - 1e-2 * (0.1 if w.dim() > 1 else 0))
            w = w - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
            naive[index] = (w, m, v)
        optimizer.step()
        large = optimizer.state[model[0]]
        qmaps = [large[name].qmap for name in ("exp_avg", "exp_avg_sq")]
        w, m, v = naive[0]
        v = naive_8bit(v, qmaps[1])
        naive[0] = (w, naive_8bit(m, qmaps[0]) * (v > 0), v)
    assert [type(optimizer.state[p]["exp_avg"]).__name__ for p in model] == [
        "OptimState8bit",
        "Tensor",
        "Tensor",
    ]
    for parameter, (expected, m, _) in zip(model, naive):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-4)
        found = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(getattr(found, "dequantize", lambda f=found: f)(), m, rtol=0.02, atol=1e-3)


def test_a_gradient_that_is_far_smaller_next_time_moves_no_weight_far() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 256))
    optimizer = build_optimizer(torch.nn.ParameterList([weight]), OptimizerConfig(kind="adamw_8bit", lr=1e-2))
    weight.grad = torch.logspace(0, -8, 256).repeat(16, 1)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert float((weight.detach() - before).abs().max()) < 1.5e-2


def test_updates_below_half_a_unit_move_bfloat16_weights_on_average_and_are_lost_without() -> None:
    means = []
    for stochastic in (True, False):
        weight = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        cfg = OptimizerConfig(kind="adamw_8bit", lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        optimizer = build_optimizer(torch.nn.ParameterList([weight]), cfg)
        torch.manual_seed(0)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        means.append(float(weight.detach().double().mean()))
    # Each step takes lr from each weight; bfloat16 below 1 has steps of 2^-8.
    assert means[0] == pytest.approx(1 - 20 * 1e-4, abs=2e-4)
    assert means[1] == 1.0


def test_the_schedule_moves_the_rate_from_its_peak() -> None:
    cfg = tiny_policy_config(scheduler={"kind": "linear", "warmup_steps": 2, "decay_steps": 2}).scheduler
    rates = []
    for done in range(4):
        optimizer = build_optimizer(torch.nn.Linear(4, 4), OptimizerConfig(kind="adamw_8bit", lr=1.0))
        schedule = build_scheduler(optimizer, cfg, updates_done=done)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
        rates.append(float(schedule.get_last_lr()[0]))
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.0]


# In a policy.


@pytest.mark.parametrize("optimizer", [EIGHT, ROUNDED], ids=["8bit", "rounded"])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    policy = worker(optimizer, precision="bfloat16")
    before = weights(policy)
    for seed in range(2):
        train(policy, seed)
    assert set(moments(policy).values()) == {"OptimState8bit", "Tensor"}
    policy.save_checkpoint(tmp_path)
    again = worker(optimizer, precision="bfloat16")
    again.load_checkpoint(tmp_path)
    norms = []
    for one in (policy, again):
        torch.manual_seed(5)
        norms.append([train(one, seed) for seed in (7, 8)])
    assert norms[0] == norms[1]
    ours, theirs = weights(policy), weights(again)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert not any(torch.equal(ours[n], before[n]) for n in ours if "proj" in n)


def test_rounded_weights_are_bfloat16_alone_and_the_first_scores_those_of_float32_ones() -> None:
    plain, rounded = (worker(o, precision="bfloat16") for o in (EIGHT, ROUNDED))
    kinds = {n.split(".")[-2]: p.dtype for n, p in rounded.model.named_parameters()}
    assert kinds["q_proj"] == kinds["lm_head"] == torch.bfloat16
    assert kinds["embed_tokens"] == kinds["input_layernorm"] == torch.float32
    scores = [one.get_logprobs(tiny_batch(LENGTHS))["logprobs"] for one in (plain, rounded)]
    assert torch.equal(*scores)
    assert torch.equal(train(plain), train(rounded))
    train(rounded, 1)
    rounded.snapshot_reference()
    reference = rounded.get_reference_policy_logprobs(tiny_batch(LENGTHS))["reference_logprobs"]
    assert torch.equal(reference, rounded.get_logprobs(tiny_batch(LENGTHS))["logprobs"])


def test_a_run_goes_on_with_the_other_kind_of_moments(tmp_path: Path) -> None:
    found = {}
    for kind in ("adamw", "adamw_8bit"):
        policy = worker({**EIGHT, "kind": kind})
        train(policy)
        policy.save_checkpoint(tmp_path / kind)
        found[kind] = policy
    for kind, other in (("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")):
        again = worker({**EIGHT, "kind": other})
        again.load_checkpoint(tmp_path / kind)
        for one in (again, found[kind]):
            train(one, 1)
        ours, theirs = weights(again), weights(found[kind])
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-2)


def test_the_plan_of_memory_counts_what_the_moments_take() -> None:
    for optimizer, precision in ((EIGHT, "float32"), (ROUNDED, "bfloat16")):
        policy = worker(optimizer, precision=precision)
        train(policy)
        assert len(policy.optimizer.state) == len(list(policy.model.parameters()))
        for parameter, slots in policy.optimizer.state.items():
            held = 0
            for name in ("exp_avg", "exp_avg_sq"):
                parts = [getattr(slots[name], part, None) for part in ("codes", "scale")]
                held += slots[name].nbytes if parts[0] is None else sum(part.nbytes for part in parts)
            assert held == state_bytes(parameter)


# Two ranks.


def run(folder: Path, tag: str) -> dict[str, Any]:
    policy = worker(EIGHT)
    norms = [train(policy, seed) for seed in range(2)]
    kinds = moments(policy)
    policy.save_checkpoint(folder / tag)
    again = worker(EIGHT)
    again.load_checkpoint(folder / tag)
    resumed = [torch.equal(train(policy, 7), train(again, 7))]
    ours, theirs = weights(policy), weights(again)
    resumed += [torch.equal(ours[n], theirs[n]) for n in ours]
    return {"norms": norms, "kinds": kinds, "resumed": resumed, "weights": ours}


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    need_torchao()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        result = run(Path(folder), "two")
        torch.save(result, f"{folder}/rank{rank}.pt")
        other = worker(EIGHT)
        other.load_checkpoint(Path(folder) / "one")
        train(other, 7)
        torch.save(weights(other), f"{folder}/from_one{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_train_as_one_and_read_each_other_s_checkpoints(tmp_path: Path) -> None:
    alone = run(tmp_path, "one")
    run_ranks(run_rank, (str(tmp_path),), 2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for one in (alone, *ranks):
        assert all(one["resumed"])
        assert one["kinds"]["model.layers.0.mlp.up_proj.weight"] == "OptimState8bit"
    torch.testing.assert_close(ranks[0]["norms"], alone["norms"], rtol=1e-4, atol=1e-6)
    from_two = worker(EIGHT)
    from_two.load_checkpoint(tmp_path / "two")
    train(from_two, 7)
    from_one = torch.load(tmp_path / "from_one0.pt", weights_only=True)
    for name, expected in alone["weights"].items():
        for found in (ranks[0]["weights"], weights(from_two), from_one):
            # In three steps of 1e-2, by blocks that are cut otherwise.
            torch.testing.assert_close(found[name], expected, rtol=0, atol=3e-2)
            assert float((found[name] - expected).abs().mean()) < 1e-3


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": {"rank": 4}}, r"optimizer.kind=adamw_8bit and lora.rank=4 do not go together"),
        ({"parallel": {"cpu_offload": True}}, r"adamw_8bit and parallel.cpu_offload=true"),
        ({"parallel": {"tensor": 2}, "workers": 2}, r"adamw_8bit and parallel.tensor=2"),
        ({"parallel": {"expert": 2}, "workers": 2}, r"adamw_8bit and parallel.expert=2"),
        ({"optimizer": ROUNDED}, r"stochastic_rounding=true with precision=float32.*need precision=bfloat16"),
        ({"optimizer": ROUNDED, "precision": "bfloat16", "workers": 2}, r"need workers=1"),
    ],
)
def test_what_does_not_go_together_names_both_keys(changes: dict[str, Any], told: str) -> None:
    values = {"model": {"config": SIZES}, "optimizer": EIGHT, **changes}
    with pytest.raises(ValueError, match=told):
        PolicyConfig.model_validate(values)


def test_a_missing_torchao_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        ConfigError, match=r"adamw_8bit needs torchao .*pip install 'headrace\[torchao\]', or set"
    ):
        build_adamw_8bit([], OptimizerConfig())
