"""Wrong uses of code and data of one's own: each is one line with key, value and remedy, before anything is trained."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app

RECIPE = """\
run_dir: run
overwrite: true
cpu_threads: 1
policy:
  model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
                   num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}}
  tokenizer: {builder: characters, characters: "0123456789+=?"}
  max_total_sequence_length: 16
  train_global_batch_size: 8
generation: {max_new_tokens: 3}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 1}
env: {kind: dataset}
data: {train: {path: sums.csv}, validation_size: 2}
"""
CODE = """
import time

number = 3
def one(completion): return 1.0
def positional(a, b): return 1.0
def mixed(prompt, completions): return 1.0
def raising(completion): return {}["solution"]
def text(completion): return "yes"
def nothing(completion): return None
def bare(completion): return {"score": 1.0}
def number_said(completion): return {"reward": 1.0, "answer": 3}
def nan(completion): return float("nan")
def short(completions): return []
def single(completions): return 1.0
def slow(completion): time.sleep(60)
async def slow_async(completion):
    import asyncio
    await asyncio.sleep(60)
def leaving(completion): raise SystemExit
class Rewarder: pass
def rows(): return {"prompt": "1", "answer": "1"}
def numbers(): return [1, 2, 3]
def broken_rows(): return open("nowhere.txt")
class NoStep: pass
class NeedsMore:
    def __init__(self, level): self.level = level
    def step(self, prompts): return []
class OddStep:
    def step(self, questions): return []
class OddPrompts:
    def step(self, prompts): return []
    def prompts(self, split): return ["1+1"]
class Failing:
    def step(self, prompts): return [1 / 0]
class Leaving:
    def step(self, prompts): raise SystemExit(0)
class NoText:
    def step(self, prompts):
        from headrace import Message, StepResult
        told = Message("user", chr(0xDCFF))  # a byte, by surrogateescape
        return [StepResult(0.0, done=False, observation=(told,)) for _ in prompts]
async def cancelled(completion):
    import asyncio
    raise asyncio.CancelledError
class TooFew:
    def step(self, prompts): return []
def sum_loss(inputs): return inputs.logprobs.sum()
def dead_loss(inputs): return 0 * inputs.logprobs.detach()
def odd_loss(x): return x
def misnamed(inputs): return inputs["advantage"]
def one_value(rewards): return rewards.mean()
def keep_all(rewards): return "all"
def two_places(prompts): return [0, 1]
def many(inputs): return -inputs.logprobs * inputs["reward"]
many.required_columns = "reward"
def unknown(inputs): return -inputs.logprobs * inputs["hardness"]
unknown.required_columns = ["hardness"]
"""
ENV = "env={{kind: python, target: 'byo_code:{}'}}"
# Overrides, and what the line says of key, value and remedy.
MISTAKES = {
    "no such module": (
        ["env.rewards=[nowhere:one]"],
        "env.rewards=nowhere:one: there is no module",
        "code_path",
    ),
    "no such name": (["env.rewards=[byo_code:onne]"], "there is no 'onne' in", "did you mean 'one'?"),
    "no function": (["env.rewards=[byo_code:number]"], "byo_code:number is a int", "expected a function"),
    "no colon": (["env.rewards=[byo_code.one]"], "target=byo_code.one", "package.module:function"),
    "a module that fails": (["env.rewards=[byo_bad:one]"], "importing byo_bad fails: SyntaxError", "line 2"),
    "a module that leaves": (
        ["env.rewards=[byo_leaves:one]"],
        "importing byo_leaves fails: SystemExit: 0",
        "mend it",
    ),
    "a module that lacks another": (["env.rewards=[byo_lacks:one]"], "imports 'notinstalled'", "install it"),
    "a class for a reward": (
        ["env.rewards=[byo_code:Rewarder]"],
        "byo_code:Rewarder is a class",
        "(prompt, completion",
    ),
    "other parameters": (
        ["env.rewards=[byo_code:positional]"],
        "a parameter 'a', which nothing",
        "(prompt, completion",
    ),
    "both forms": (["env.rewards=[byo_code:mixed]"], "takes completions, prompt", "(prompts, completions"),
    "a reward that raises": (
        ["env.rewards=[byo_code:raising]"],
        "raised KeyError: 'solution' (byo_code.py",
        "mend it",
    ),
    "a reward of text": (
        ["env.rewards=[byo_code:text]"],
        "returned 'yes' of type str",
        "expected a finite number",
    ),
    "a reward of None": (
        ["env.rewards=[byo_code:nothing]"],
        "returned None of type NoneType",
        "a finite number",
    ),
    "a dict without reward": (["env.rewards=[byo_code:bare]"], "without 'reward' (it has 'score')", "add it"),
    "an answer that is no text": (
        ["env.rewards=[byo_code:number_said]"],
        "env.rewards=byo_code:number_said: tried on prompt",
        "a dict with 'answer': 3 of type int; expected text or None",
    ),
    "a reward's key that is misspelt": (
        ["env.rewards=[{target: 'byo_code:one', wieght: 2}]"],
        "unknown key 'env.rewards.0.wieght'",
        "did you mean 'env.rewards.0.weight'?",
    ),
    "a name with a slash": (
        ["env.rewards=[{target: 'byo_code:one', name: a/b}]"],
        "name=a/b: expected no slash",
        "set name to another",
    ),
    "a reward that is not finite": (
        ["env.rewards=[byo_code:nan]"],
        "returned nan",
        "expected a finite number",
    ),
    "too few rewards": (
        ["env.rewards=[byo_code:short]"],
        "returned 0 values for 1 completions",
        "one for each",
    ),
    "one number for a batch": (
        ["env.rewards=[byo_code:single]"],
        "returned 1.0 of type float",
        "a list of 1",
    ),
    "a reward that takes too long": (
        ["env.rewards=[byo_code:slow]", "env.reward_timeout_s=0.3"],
        "byo_code:slow: tried on prompt",
        "took more than 0.3 s",
    ),
    "an asynchronous one that does": (
        ["env.rewards=[byo_code:slow_async]", "env.reward_timeout_s=0.3"],
        "byo_code:slow_async",
        "took more than 0.3 s",
    ),
    "a reward that leaves": (["env.rewards=[byo_code:leaving]"], "byo_code:leaving", "SystemExit"),
    "a reward that leaves the rollout's process": (
        ["env.rewards=[byo_code:leaving]", "env.reward_timeout_s=null"],
        "byo_code:leaving: tried on prompt",
        "raised SystemExit",
    ),
    "an asynchronous one that was cancelled": (
        ["env.rewards=[byo_code:cancelled]", "env.reward_timeout_s=null"],
        "byo_code:cancelled: tried on prompt",
        "raised CancelledError",
    ),
    "two of a name": (
        ["env.rewards=[byo_code:one, byo_code:one]"],
        "two are called 'one'",
        "{target: ..., name: ...}",
    ),
    "a name that is taken": (
        ["env.rewards=[{target: 'byo_code:one', name: mean}]"],
        "reward/mean is a metric of its own",
        "set name to another",
    ),
    "rewards and a match": (
        ["env.rewards=[byo_code:one]", "env.match=contains"],
        "match=contains has no effect with rewards",
        "remove it",
    ),
    "no such file": (["data.train=nowhere.csv"], "data.train.nowhere.path=nowhere.csv", "check the path"),
    "no network": (
        ["data.train=org/name"],
        "data.train.name.path=org/name",
        "hf download org/name --repo-type dataset",
    ),
    "a file of another kind": (
        ["data.train=notes.txt"],
        "data.train.notes.path=notes.txt",
        ".jsonl, .json, .csv",
    ),
    "a missing column": (
        ["data.train.columns={prompt: task}"],
        "missing key 'task' (keys there: prompt, answer)",
        "set data.train.sums.columns.prompt",
    ),
    "a row of fewer cells": (
        ["data.train=cells.csv"],
        "line 3: fewer cells than the header's 2",
        "double quotes",
    ),
    "no parquet": (
        ["data.train=bad.parquet"],
        "data.train.bad.path=bad.parquet",
        "cannot read it as Parquet",
    ),
    "rows that are a dict": (["data.train='byo_code:rows'"], "expected a list of rows", "returned a dict"),
    "rows that are numbers": (["data.train='byo_code:numbers'"], "row 0: expected a mapping", "got int"),
    "rows that raise": (["data.train='byo_code:broken_rows'"], "raised FileNotFoundError", "mend it"),
    "messages without roles": (
        ["data.train=talks.jsonl"],
        "line 1: key 'prompt' is",
        "a list of {role: ..., content",
    ),
    "no answers": (
        ["data.train=bare.jsonl"],
        "there is no answer, which exact compares with",
        "columns: {answer: ...}",
    ),
    "no questions at all": (
        ["empty"],
        "missing key 'env.path', or 'data.train'",
        "set one to a file",
    ),
    "two files of questions": (["env.path=sums.csv"], "env.path=sums.csv and data.train=sums", "remove one"),
    "k of too few samples": (
        ["data.validation={more: {path: more.csv, samples: 2, pass_at: [4]}}"],
        "pass_at=[4]: 4 of samples=2",
        "raise samples",
    ),
    "a metric of no set": (
        ["checkpointing.metric=validation/x/pass@4"],
        "metric=validation/x/pass@4",
        "it has none",
    ),
    "an order of too few": (["data.order=byo_code:two_places"], "returned 2 places", "expected 4 of 0 to 3"),
    "a switch that no template reads": (
        ["env.chat_template_kwargs={enable_thinking: false}"],
        "env.chat_template_kwargs.enable_thinking",
        "remove it",
    ),
    "an environment without step": ([ENV.format("NoStep")], "made a NoStep without step(", "add it"),
    "a factory that wants more": ([ENV.format("NeedsMore")], "raised TypeError", "'level'"),
    "a step of other parameters": (
        [ENV.format("OddStep")],
        "a parameter 'questions'",
        "(prompts, conversations",
    ),
    "prompts that are none": (
        ["empty", ENV.format("OddPrompts")],
        "returned a str",
        "expected a list of headrace.Prompt",
    ),
    "a loss of one number": (["loss.target=byo_code:sum_loss"], "a tensor of shape ()", "the loss per token"),
    "a loss without gradient": (["loss.target=byo_code:dead_loss"], "without gradient", "on the logprobs"),
    "a loss of other parameters": (["loss.target=byo_code:odd_loss"], "a parameter 'x'", "(inputs, cfg)"),
    "a loss of a column that is misspelt": (
        ["loss.target=byo_code:misnamed"],
        "raised KeyError: 'advantage'",
        "mend",
    ),
    "columns that are text": (["loss.target=byo_code:many"], "required_columns='reward'", "a list of names"),
    "one advantage for all": (
        ["grpo.advantage.target=byo_code:one_value"],
        "a tensor of shape ()",
        "each of the 4",
    ),
    "a filter of text": (
        ["grpo.dynamic_sampling={enabled: true, target: 'byo_code:keep_all'}"],
        "returned 'all' of type str",
        "expected True or False",
    ),
}
# What shows when the first completions are there.
LATE = {
    "a step that raises": (
        [ENV.format("Failing")],
        "step() of env.target=byo_code:Failing raised ZeroDivision",
        "mend it",
    ),
    "a step that leaves": ([ENV.format("Leaving")], "byo_code:Leaving raised SystemExit: 0", "mend it"),
    "an observation that is no text": (
        [ENV.format("NoText"), "grpo.max_rollout_turns=2"],
        r"a message holds '\udcff', half a surrogate pair",
        "errors='replace'",
    ),
    "a step of too few results": ([ENV.format("TooFew")], "returned 0 results for", "has none"),
    "a column that nobody has": (
        ["loss.target=byo_code:unknown", "validation.at_start=false"],
        "loss.target asks for column 'hardness'",
        "have the reward return it",
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    sums = "".join(f"{n}+1=,{n + 1}\n" for n in range(6))
    files = {
        "recipe.yaml": RECIPE,
        "empty.yaml": RECIPE.rpartition("data:")[0],
        "byo_code.py": CODE,
        "byo_bad.py": "x = 1\ndef one(:\n",
        "byo_lacks.py": "import notinstalled\n",
        "byo_leaves.py": "import sys\nsys.exit(0)\n",
        "sums.csv": f"prompt,answer\n{sums}",
        "more.csv": "prompt,answer\n9+9=,18\n",
        "cells.csv": "prompt,answer\n1,2\n3\n",
        "notes.txt": "1+1=2\n",
        "bad.parquet": "no Parquet",
        "talks.jsonl": '{"prompt": [{"content": "1"}], "answer": "1"}\n' * 4,
        "bare.jsonl": "".join(f'{{"prompt": "{n}"}}\n' for n in range(4)),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder / "recipe.yaml"


@pytest.fixture
def folder(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(recipe.parent)
    before = list(sys.path)
    yield recipe
    sys.path[:] = before


def line_of(recipe: Path, overrides: list[str]) -> str:
    if overrides[0] == "empty":
        recipe, overrides = recipe.with_name("empty.yaml"), overrides[1:]
    result = CliRunner().invoke(app, ["train", str(recipe), *overrides])
    assert result.exit_code in (1, 2), result.stdout
    assert result.stderr.startswith("headrace: error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_trained(folder: Path, name: str) -> None:
    overrides, what, remedy = MISTAKES[name]
    line = line_of(folder, overrides)
    assert what in line
    assert remedy in line


@pytest.mark.parametrize("name", LATE)
def test_a_mistake_that_shows_with_the_first_completions_is_one_line(folder: Path, name: str) -> None:
    overrides, what, remedy = LATE[name]
    line = line_of(folder, overrides)
    assert what in line
    assert remedy in line
