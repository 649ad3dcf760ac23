"""How long is a whole GRPO step with each engine, beside TRL's with vLLM in place?

256 completions of 512 tokens to prompts of 24, 8 per prompt, from a model with the sizes of Qwen3-0.6B and random
weights (`--moe`: 6 layers of 32 experts, top 4, with router replay). Every way generates, scores the old
log-probabilities, makes one update of float32 weights with bfloat16 products, and gives the engine the new weights.
Rewards depend on the text only. Each way runs in a process of its own, one after another, on the same GPU, or on two
where the engine is apart; the first two steps are left out. The file has each step as soon as it ends.

    python benchmarks/engines.py --out engines.json [--ways "headrace vllm;TRL vllm"] [--moe] [--steps 4]
    python benchmarks/engines.py --ways "headrace vllm apart;headrace vllm apart, async" --steps 8   # two GPUs
    python benchmarks/engines.py --tiny --ways "headrace hf"   # every line on a CPU; says nothing about speed
    python benchmarks/engines.py --way "headrace vllm" --profile step.txt   # the costliest ops of scoring and training
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "vllm", "trl")
PROMPT, GROUP = 24, 8
COLLECTORS_WAIT = "async/collectors_wait_s"
LINES_SHOWN = 60
WARM_UP = 2
"""Steps that are left out: what compiles does so in the first, and an asynchronous run is under way from the third."""
MICROBATCH, OF_TRL = 32, 16  # rows; TRL keeps all logits of a microbatch in float32, so that fewer fit


class Case:
    """The sizes of a run; `folder` has the model."""

    def __init__(self, folder: Path, *, tiny: bool, moe: bool, steps: int) -> None:
        self.folder, self.tiny, self.moe, self.steps = folder, tiny, moe, steps
        self.rows, self.new_tokens, self.vocabulary = (16, 12, 512) if tiny else (256, 512, 151_936)

    @property
    def length(self) -> int:
        return PROMPT + self.new_tokens

    def prompts(self) -> list[str]:
        """Return the texts of all steps, 24 words each."""
        draw = torch.Generator().manual_seed(1)
        count = self.steps * self.rows // GROUP
        ids = torch.randint(2, self.vocabulary, (count, PROMPT), generator=draw)
        return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]

    def save_model(self) -> None:
        """Write random weights and a tokenizer that knows every id."""
        from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self._config(), dtype=torch.bfloat16)
        model.generation_config.eos_token_id = 0
        model.save_pretrained(self.folder)
        words = {"<eos>": 0, "<pad>": 1, **{f"w{i}": i for i in range(2, self.vocabulary)}}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
        fast.chat_template = "{{ messages[0]['content'] }}"
        fast.save_pretrained(self.folder)

    def _config(self) -> Any:
        from transformers import Qwen3Config, Qwen3MoeConfig  # noqa: PLC0415

        layers, hidden, inner, heads = (2, 64, 128, 4) if self.tiny else (28, 1024, 3072, 16)
        common: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": 32 if self.tiny else 128,
            "max_position_embeddings": 2048,
            "eos_token_id": 0,
            "bos_token_id": None,
            "pad_token_id": 1,
        }
        if not self.moe:
            return Qwen3Config(**common, num_hidden_layers=layers, tie_word_embeddings=True)
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": inner // 4}
        return Qwen3MoeConfig(
            **common,
            **experts,
            num_hidden_layers=2 if self.tiny else 6,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )


def reward_of(completion: str) -> float:
    """Return a number that differs within a group."""
    return sum(completion.encode()) % 101 / 100


class TextRewards:
    """An environment of one turn."""

    def __init__(self, prompts: Sequence[str]) -> None:
        from headrace.environments.single_turn import conversation  # noqa: PLC0415
        from headrace.experience.types import Prompt  # noqa: PLC0415

        self._prompts = [Prompt(f"p{i}", conversation(text, None)) for i, text in enumerate(prompts)]

    def prompts(self, split: str) -> list[Any]:
        return self._prompts if split == "train" else self._prompts[:1]

    def step(self, prompts: Any, conversations: Any, truncated: Any) -> list[Any]:
        from headrace.environments.interfaces import StepResult  # noqa: PLC0415

        return [StepResult(reward_of(talk[-1].content)) for talk in conversations]


class Notebook:
    """Clocks the steps of a way from `begin` on, and writes what there is of them to `out` after each."""

    def __init__(self, case: Case, out: Path) -> None:
        self._case, self._out = case, out
        self._steps: list[dict[str, Any]] = []
        self._start_s, self._now = 0.0, time.perf_counter()

    def begin(self) -> None:
        self._start_s, self._now = self._lap(), time.perf_counter()

    def step(self, **told: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._steps.append({"s": self._lap(), **told})
        self._now = time.perf_counter()
        self._out.write_text(json.dumps(self._result()))

    def _lap(self) -> float:
        return time.perf_counter() - self._now

    def _result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"start_s": self._start_s, "steps": self._steps}
        if later := self._steps[WARM_UP:]:
            result["step_s"] = median(step["s"] for step in later)
            result["tokens_per_s"] = self._case.rows * self._case.new_tokens / result["step_s"]
            stages = dict.fromkeys(name for step in later for name in step.get("stages", ()))
            result["stages_s"] = {n: median(step["stages"].get(n, 0.0) for step in later) for n in stages}
            waits = [step["metrics"].get(COLLECTORS_WAIT) for step in later if "metrics" in step]
            if waits and None not in waits:
                result["collectors_wait_s"] = median(waits)
        if torch.cuda.is_available():
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return result


def headrace_recipe(
    case: Case, backend: str, *, on_policy: bool, compiled: bool, apart: bool, is_async: bool
) -> dict[str, Any]:
    tokens = MICROBATCH * case.length
    engine: dict[str, Any] = {"backend": backend, "precision": "bfloat16", "max_new_tokens": case.new_tokens}
    if apart:
        engine["placement"] = "apart"
    if backend == "vllm":
        engine["vllm"] = {"args": {"gpu_memory_utilization": 0.4, "max_model_len": case.length + 8}}
        engine["vllm"]["args"] |= {"enforce_eager": True} if case.tiny else {"async_scheduling": True}
    policy = {
        "model": {"path": str(case.folder)},
        "precision": "bfloat16",
        "compile": compiled,
        "max_total_sequence_length": case.length,
        "train_global_batch_size": case.rows,
        "sequence_packing": {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": 2 * tokens},
        "optimizer": {"lr": 1e-6},
        "router_replay": {"enabled": case.moe},
    }
    grpo = {
        "num_prompts_per_step": case.rows // GROUP,
        "num_generations_per_prompt": GROUP,
        "max_num_steps": case.steps,
    }
    loss = {"force_on_policy_ratio": True} if on_policy else {"importance_correction": "tis"}
    return {
        "run_dir": str(case.folder / "run"),
        "policy": policy,
        "generation": engine,
        "grpo": grpo,
        "loss": loss,
        "async": {"enabled": is_async, "max_lag": 1},
        "logging": {"progress": "off", "trackers": []},
        "overwrite": True,
        "data": {"validation_size": 1},
        "validation": {"at_start": False, "at_end": False},
        "checkpointing": {"enabled": False},
    }


def headrace_way(
    case: Case,
    notes: Notebook,
    profile: Path | None,
    backend: str,
    *,
    on_policy: bool = False,
    compiled: bool = False,
    apart: bool = False,
    is_async: bool = False,
) -> None:
    """Run the recipe; note the seconds of every step, by stage, and the step's own metrics."""
    import headrace  # noqa: PLC0415

    class Notes(headrace.RunObserver):
        trace: torch.profiler.profile | None = None

        def on_start(self, **_: Any) -> None:
            notes.begin()

        def on_stage(self, step: int, stage: str) -> None:
            made = stage not in ("rollout", "wait")
            if profile is not None and step == case.steps and made and self.trace is None:
                self.trace = torch.profiler.profile()
                self.trace.start()

        def on_step(self, record: Any) -> None:
            if self.trace is not None:  # the step is not one of the others' kind
                self.trace.stop()
                write_profile(self.trace, profile, backend)
                return
            notes.step(stages=dict(record.timings_s), metrics=dict(record.metrics))

    recipe = headrace_recipe(
        case, backend, on_policy=on_policy, compiled=compiled, apart=apart, is_async=is_async
    )
    headrace.train(recipe, environment=TextRewards(case.prompts()), observers=[Notes()])


def write_profile(trace: torch.profiler.profile, path: Path | None, name: str) -> None:
    assert path is not None
    table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60)
    with path.open("a") as out:
        out.write(f"===== {name}: a step after its rollout\n{table}\n")


def trl_way(case: Case, notes: Notebook) -> None:
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoTokenizer, TrainerCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            notes.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step()

    accumulate = max(1, case.rows // OF_TRL)
    args = GRPOConfig(
        output_dir=str(case.folder / "trl"),
        per_device_train_batch_size=min(OF_TRL, case.rows),
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_generations=GROUP,
        max_completion_length=case.new_tokens,
        max_steps=case.steps,
        bf16=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=case.length + 8,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = GRPOTrainer(
        model=str(case.folder),
        args=args,
        reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": case.prompts()}),
        processing_class=AutoTokenizer.from_pretrained(case.folder, padding_side="left"),
        callbacks=[Notes()],
    )
    trainer.train()


_VLLM_APART = partial(headrace_way, backend="vllm", apart=True)
WAYS: dict[str, Callable[[Case, Notebook, Path | None], None]] = {
    "headrace vllm": partial(headrace_way, backend="vllm"),
    "headrace vllm, ratio 1": partial(headrace_way, backend="vllm", on_policy=True),
    "headrace vllm, compiled": partial(headrace_way, backend="vllm", compiled=True),
    "headrace vllm, compiled, ratio 1": partial(headrace_way, backend="vllm", on_policy=True, compiled=True),
    "headrace vllm apart": _VLLM_APART,
    "headrace vllm apart, async": partial(_VLLM_APART, is_async=True),
    "headrace vllm apart, compiled": partial(_VLLM_APART, compiled=True),
    "headrace vllm apart, compiled, async": partial(_VLLM_APART, compiled=True, is_async=True),
    "TRL vllm": lambda case, notes, _: trl_way(case, notes),
    "headrace hf": partial(headrace_way, backend="hf"),
    "headrace hf, compiled": partial(headrace_way, backend="hf", compiled=True),
    "headrace hf apart": partial(headrace_way, backend="hf", apart=True),
    "headrace hf apart, async": partial(headrace_way, backend="hf", apart=True, is_async=True),
}


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("engines.json"))
    parser.add_argument("--ways", default="headrace vllm;headrace vllm, ratio 1;TRL vllm;headrace hf")
    parser.add_argument("--way", help="run this one here, and print its result")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a way at most")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="engines-"))
    case = Case(folder, tiny=args.tiny, moe=args.moe, steps=args.steps)
    if not (folder / "config.json").exists():
        case.save_model()
    if args.way:
        WAYS[args.way](case, Notebook(case, args.out), args.profile)
        return 0
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report: dict[str, Any] = {
        "device": device,
        "versions": versions(),
        "case": {"rows": case.rows, "prompt": PROMPT, "new_tokens": case.new_tokens, "moe": case.moe},
        "ways": {},
    }
    for name in args.ways.split(";"):
        report["ways"][name] = in_a_process(sys.argv[0], folder, name, args)
        args.out.write_text(json.dumps(report, indent=1))
        print(name, {k: v for k, v in report["ways"][name].items() if k != "steps"}, flush=True)
    return 0


def in_a_process(script: str, folder: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    out = folder / "way.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, script, "--way", name, "--folder", str(folder), "--out", str(out)]
    command += ["--steps", str(args.steps)] + ["--tiny"] * args.tiny + ["--moe"] * args.moe
    if args.profile:
        command += ["--profile", str(args.profile)]
    env = {"PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    failed: str | None = None
    # A file: engines, which a way that is cut leaves behind for a moment, would keep a pipe open.
    with (folder / "way.log").open("w+") as log:
        try:
            subprocess.run(
                command,
                env={**os.environ, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=args.limit,
            )
        except subprocess.TimeoutExpired:
            failed = f"took longer than {args.limit:.0f} s"
        except subprocess.CalledProcessError as error:
            failed = f"exit code {error.returncode}"
        if failed:
            log.seek(0)
            print(*log.read().splitlines()[-LINES_SHOWN:], sep="\n", flush=True)
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return {"failed": failed, **result} if failed else result


if __name__ == "__main__":
    sys.exit(main())
