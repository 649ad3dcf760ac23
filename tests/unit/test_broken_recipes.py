"""Recipes and calls that cannot be right: each is one line with key, value and remedy, and exit code 2."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app

BASE = """\
run_dir: RUN_DIR
policy:
  model: {config: {model_type: llama}}
  train_global_batch_size: 16
  train_micro_batch_size: 4
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
env: {kind: reasoning_gym, task: spell_backward}
"""
ENV = "env: {kind: reasoning_gym, task: spell_backward}\n"
PACKING, DYNAMIC = "policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"

# Overrides, separated by spaces, over BASE; and what the line holds.
OVERRIDES: dict[str, tuple[str, ...]] = {
    # wrong types
    "policy.workers=two": ("policy.workers='two': expected a valid integer",),
    "policy.workers=1.5": ("policy.workers=1.5: expected a valid integer",),
    "policy.workers=1e3": ("policy.workers=1000.0: expected a valid integer",),
    "policy.workers=[1]": ("policy.workers=[1]: expected a valid integer",),
    "policy.workers={a:1}": ("policy.workers=", "expected a valid integer"),
    "policy.workers=": ("policy.workers=null: expected a valid integer",),
    "policy.workers=true": ("policy.workers=true: expected a valid integer",),
    "policy.workers==2": ("policy.workers='=2': expected a valid integer",),
    "policy.workers=٢": ("policy.workers='٢': expected a valid integer",),
    "policy.workers='2'": ("policy.workers='2': expected a valid integer; it is text: leave out the quotes",),
    "policy.optimizer.lr=1,5": ("policy.optimizer.lr='1,5': expected a valid number",),
    "policy.optimizer.lr='1e-5'": ("policy.optimizer.lr='1e-5'", "leave out the quotes"),
    "policy.optimizer.betas=0.9": ("betas=0.9: expected a list, for example [0.9, 0.95]",),
    "policy.optimizer.betas=0.9,0.95": ("betas='0.9,0.95': expected a list, for example [0.9, 0.95]",),
    "policy.optimizer.betas=[0.9]": ("policy.optimizer.betas=[0.9]: too few items",),
    "policy.optimizer.betas=[0.9,0.9,0.9]": ("policy.optimizer.betas=[0.9, 0.9, 0.9]", "at most 2"),
    "policy.optimizer.betas=[0.9,x]": ("policy.optimizer.betas.1='x': expected a valid number",),
    "policy.optimizer=adam": ("policy.optimizer='adam': expected a section, that is a mapping of keys",),
    "policy.optimizer=null": ("policy.optimizer=null: expected a section",),
    "policy.model=gpt2": ("policy.model='gpt2': expected a section",),
    "generation.stop_strings=</s>": ("generation.stop_strings='</s>': expected a list",),
    "generation.stop_strings=[1]": ("generation.stop_strings.0=1: expected a valid string",),
    "generation.stop_token_ids=2": ("generation.stop_token_ids=2: expected a list",),
    "generation.top_k=all": ("generation.top_k='all': expected a valid integer",),
    "grpo.reward.clip=1": ("grpo.reward.clip=1: expected a list",),
    "env.config=[]": ("env.config=[]: expected a mapping of keys to values",),
    "env.score=maybe": ("env.score='maybe': expected 'task', 'exact' or 'last_number'",),
    "env=null": ("env=null: expected a section",),
    "overwrite=1": ("overwrite=1: expected a valid boolean",),
    "seed=null": ("seed=null: expected a valid integer",),
    "seed=🙂": ("seed='🙂': expected a valid integer",),
    "seed.x=3": ("seed={'x': 3}: expected a valid integer",),
    # typos
    "policy.workerz=2": ("unknown key 'policy.workerz'; did you mean 'policy.workers'?",),
    "Policy.workers=2": ("unknown key 'Policy'; did you mean 'policy'?",),
    "POLICY.workers=2": ("unknown key 'POLICY'; did you mean 'policy'?",),
    "policy.optimizer.learning_rate=1": ("unknown key 'policy.optimizer.learning_rate'", "here: lr, betas"),
    "policy/workers=2": ("unknown key 'policy/workers'; did you mean 'policy'?",),
    "policy.workers:2": ("override 'policy.workers:2': expected key=value, for example ",),
    "--policy.workers=2": ("no such option: --policy.workers: keys of a recipe have no dashes; see ",),
    "lr=1e-5": ("unknown key 'lr'; did you mean 'policy.optimizer.lr' or 'warm_start.lr'?",),
    "défaut=1": ("unknown key 'défaut'; did you mean 'data'?",),
    "env.tsak=x": ("unknown key 'env.tsak'; did you mean 'env.task'?",),
    "env.kind=gsm8k": ("env.kind='gsm8k': expected one of 'reasoning_gym', 'math', 'dataset'",),
    "loss.kind=ppo": ("loss.kind='ppo': expected ", "'clipped_pg'"),
    "policy.precision=fp16": ("policy.precision='fp16': expected 'float32' or 'bfloat16'",),
    "policy.device=cuda:0": ("policy.device='cuda:0': expected 'auto', 'cpu' or 'cuda'",),
    "policy.sequence_packing.algorithm=first_fit_shuffle": (
        "algorithm='first_fit_shuffle': expected 'first",
    ),
    "policy.tokenizer.builder=words": ("policy.tokenizer.builder='words': expected 'characters'",),
    "logging.trackers=[jsonl,wandb,jsonl]": ("logging.trackers names jsonl twice", "name it once"),
    "logging.progress=loud": ("logging.progress='loud': expected 'auto', 'on' or 'off'",),
    "checkpointing.metric=loss": ("checkpointing.metric='loss': expected 'validation/accuracy', ",),
    "seed": ("override 'seed': expected key=value, for example ",),
    "=3": ("override '=3': expected key=value, for example ",),
    "seed.=3": ("override 'seed.=3': expected key=value",),
    "policy..workers=3": ("override 'policy..workers=3': expected key=value",),
    "seed=[1": ("override 'seed=[1': line ", "did not find expected ',' or ']'", "put the value in quotes"),
    "data.train.path=x.csv data.train.colums.prompt=task": (
        "'data.train.x.colums'; did you mean 'data.train.x.columns'?",
    ),
    "data.train.x.path=x.csv data.train.x.wieght=2": (
        "override 'data.train.x.wieght=2'",
        "'data.train.x.weight'?",
    ),
    "data.train.x.path=x.csv data.train.path=y.csv": (
        "data.train: path=y.csv",
        "sets by name (x)",
        "write y.path",
    ),
    "env.kind=by_column env.environments.a.kind=dataset env.environments.a.mtach=exact": (
        "unknown key 'env.environments.a.mtach'; did you mean 'env.environments.a.match'?",
    ),
    "env.kind=by_column env.environments.a.kind=dataset env.environments.a.match=x": (
        "override 'env.environments.a.match=x': env.environments.a.match='x': expected 'exact', 'contains'",
    ),
    "env.kind=by_column env.environments.a.match=exact": (
        "missing key 'env.environments.a.kind'; expected one of reasoning_gym, math",
    ),
    # out of range: negative, zero, huge, inf, nan
    "policy.workers=-1": ("policy.workers=-1: expected greater than 0",),
    "policy.workers=99999999999999999999": (
        "policy.train_global_batch_size=16 is not divisible by workers=9999",
    ),
    f"grpo.max_num_steps={'9' * 5000}": ("override 'grpo.max_num_steps=999", "...': ", "thousands of digits"),
    "policy.optimizer.lr=0": ("policy.optimizer.lr=0: expected greater than 0",),
    "policy.optimizer.lr=.nan": ("policy.optimizer.lr=nan: expected a finite number",),
    "policy.optimizer.lr=nan": ("policy.optimizer.lr='nan': expected a valid number",),
    "policy.optimizer.lr=-.inf": ("policy.optimizer.lr=-inf: expected a finite number",),
    "policy.optimizer.lr=1e400": ("policy.optimizer.lr=inf: expected a finite number",),
    "policy.optimizer.betas=[0.9,1.0]": ("policy.optimizer.betas.1=1.0: expected less than 1",),
    "policy.max_grad_norm=0": ("policy.max_grad_norm=0: expected greater than 0",),
    "policy.router_replay.max_missing_fraction=1.5": (
        "max_missing_fraction=1.5: expected less than or equal to 1",
    ),
    "generation.temperature=0": ("generation.temperature=0: expected greater than 0",),
    "generation.top_p=1.1": ("generation.top_p=1.1: expected less than or equal to 1",),
    "generation.max_new_tokens=0": ("generation.max_new_tokens=0: expected greater than 0",),
    "grpo.advantage.epsilon=0": ("grpo.advantage.epsilon=0: expected greater than 0",),
    "grpo.reward.scale=.inf": ("grpo.reward.scale=inf: expected a finite number",),
    "loss.clip_low=-0.1": ("loss.clip_low=-0.1: expected greater than or equal to 0",),
    "loss.dual_clip=1": ("loss.dual_clip=1: expected greater than 1",),
    "data.validation_size=0": ("data.validation_size=0: expected greater than 0",),
    "validation.period=-1": ("validation.period=-1: expected greater than or equal to 0",),
    "checkpointing.keep_top_k=0": ("checkpointing.keep_top_k=0: expected greater than 0",),
    "cluster.rollout_gpus=2": ("cluster.rollout_gpus=2: expected 0 or 1",),
    "cpu_threads=0": ("cpu_threads=0: expected greater than 0",),
    "seed=-1": ("seed=-1: expected greater than or equal to 0",),
    # contradictions
    "policy.train_micro_batch_size=5": (
        "policy.train_micro_batch_size=5 does not divide the 16 rows",
        "change one",
    ),
    "policy.train_global_batch_size=12": (
        "policy.train_global_batch_size=12",
        "the 16 samples",
        "change one",
    ),
    "policy.parallel.tensor=3 policy.workers=2": ("policy.workers=2", "parallel.tensor=3", "multiple of 3"),
    "policy.parallel.expert=2": ("policy.workers=1", "parallel.expert=2", "make workers a multiple of 2"),
    "policy.parallel.expert=4 policy.parallel.tensor=2 policy.workers=4": (
        "policy.parallel.expert=4",
        "tensor=2",
        "set tensor=4, or tensor=1, or expert=1",
    ),
    "policy.compile=true policy.parallel.tensor=2 policy.workers=2": (
        "compile=true",
        "parallel.tensor=2",
        "set one of them back",
    ),
    "policy.parallel.sequence_parallel=true": ("sequence_parallel=true", "tensor=1", "raise tensor"),
    "policy.parallel.cpu_offload=true policy.lora.rank=8": (
        "cpu_offload=true",
        "lora.rank=8",
        "switch it off",
    ),
    "policy.lora.rank=8 policy.parallel.tensor=2 policy.workers=2": (
        "lora.rank=8",
        "tensor=2",
        "set parallel",
    ),
    "policy.lora.rank=8 generation.backend=vllm": (
        "policy.lora.rank=8",
        "generation.backend=vllm",
        "whole weights",
        "set generation.backend=hf",
    ),
    "policy.lora.rank=8 generation.backend=sglang generation.sglang.weights=tensor": (
        "policy.lora.rank=8",
        "generation.sglang.weights=tensor",
        "whole weights",
        "set generation.sglang.weights=disk",
    ),
    "policy.lora.rank=8 policy.lora.targets=[]": (
        "policy.lora.targets=[] gives no layer an adapter",
        "or all",
    ),
    "policy.lora.rank=0": ("policy.lora.rank=0", "rank=0", "greater than 0"),
    "data_plane.enabled=true policy.workers=2": (
        "data_plane.impl=local",
        "policy.workers=2",
        "transfer_queue",
    ),
    f"{PACKING} {DYNAMIC}": (
        "policy.sequence_packing.enabled=true",
        "dynamic_batching.enabled=true",
        "switch one",
    ),
    f"{PACKING} policy.sequence_packing.logprob_mb_tokens=10": ("logprob_mb_tokens=10", "=1024", "raise"),
    f"{PACKING} policy.sequence_packing.train_mb_tokens=1029 policy.make_sequence_length_divisible_by=10": (
        "train_mb_tokens=1029",
        "=1024 (filled to 1030 by make_sequence_length_divisible_by=10)",
        "raise",
    ),
    f"{DYNAMIC} policy.dynamic_batching.logprob_mb_tokens=1029 policy.dynamic_batching.sequence_length_round=10": (
        "logprob_mb_tokens=1029",
        "=1024 (filled to 1030 by dynamic_batching.sequence_length_round=10)",
        "raise",
    ),
    "policy.model.path=/x": (
        "policy.model: set exactly one of path, gguf_package and config; got path, config",
    ),
    "policy.model.config=null": ("policy.model: set exactly one of path, ", "got none of them"),
    "policy.tokenizer.builder=characters policy.tokenizer.path=/x": (
        "policy.tokenizer.path=/x",
        "builder=null",
    ),
    "policy.scheduler.kind=cosine": ("policy.scheduler.kind=cosine needs decay_steps", "set it"),
    "generation.max_new_tokens=1024": (
        "max_new_tokens=1024",
        "max_total_sequence_length=1024",
        "raise the second",
    ),
    "grpo.reward.clip=[1,0]": ("grpo.reward.clip=[1.0, 0.0]", "swap them"),
    "grpo.reward.overlong_penalty=1": (
        "grpo.reward.overlong_penalty=1.0",
        "set overlong_buffer_tokens above 0",
    ),
    "grpo.advantage.estimator=reinforce_plus_plus grpo.advantage.leave_one_out=true": (
        "grpo.advantage.leave_one_out=true has no effect",
        "estimator=",
    ),
    "loss.kind=cispo loss.dual_clip=3": (
        "loss.dual_clip=3.0",
        "kind=cispo",
        "remove it or set kind=clipped_pg",
    ),
    "loss.importance_correction=tis loss.importance_low=0.1": ("importance_low=0.1", "remove the key"),
    "loss.importance_correction=icepop loss.importance_low=3": ("loss.importance_low=3.0", "swap them"),
    "env.kind=calculator": ("grpo.max_rollout_turns=1", "env.kind=calculator", "set it to 2 or more"),
    "env.kind=guess_number": ("grpo.max_rollout_turns=1", "env.kind=guess_number", "set it to 2 or more"),
    "env.kind=by_column env.environments.tool.kind=calculator": (
        "grpo.max_rollout_turns=1",
        "env.environments.tool.kind=calculator",
        "set it to 2 or more",
    ),
    "loss.max_sequence_logprob_error=0.9": (
        "loss.max_sequence_logprob_error=0.9",
        "at least 1",
        "set it above 1",
    ),
    "loss.max_sequence_logprob_error=1": ("loss.max_sequence_logprob_error=1.0", "set it above 1"),
    "data_plane.storage_capacity=8": ("data_plane.storage_capacity=8 cannot hold the 16 samples", "raise it"),
    "warm_start.enabled=true warm_start.batch_size=6": (
        "warm_start.batch_size=6 is not divisible by 4",
        "change",
    ),
    "validation.sampled=false checkpointing.metric=validation/sampled_accuracy": (
        "checkpointing.metric=validation/sampled_accuracy",
        "validation.sampled=false",
        "switch it on",
    ),
    "policy.device=cpu cluster.gpus_per_node=8": (
        "cluster.gpus_per_node=8",
        "policy.device=cpu",
        "set cluster.",
    ),
    "run_dir=": ("run_dir is empty; set it to a directory of its own",),
    "run_dir=\udce9": (
        "override 'run_dir=\\udce9': no text in UTF-8",
        "other characters",
    ),
    "generation.stop_strings=[\udce9]": ("no text in UTF-8",),
    "run_dir=/proc/x": ("run_dir=/proc/x: cannot write there", "set run_dir to a writable directory"),
}

# The recipe's text, in place of BASE or after it where it begins with "+"; and what the line holds.
TEXTS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("missing key 'run_dir'; set it in the recipe or with run_dir=...", "more: policy, env")),
    "a number": ("3", ("expected a mapping of sections at the top level",)),
    "a list": ("- 1", ("expected a mapping of sections at the top level",)),
    "two documents": ("+---\nseed: 1\n", ("line 8, column 1: expected a single document", "found another")),
    "a tab": (BASE.replace("  model", "\tmodel"), ("line 3, column 1", "there is a tab: indent with spaces")),
    "wrong indent": (
        BASE.replace("  train_g", "   train_g"),
        ("line 4, column 4: did not find expected key",),
    ),
    "a key twice": ("+seed: 1\nseed: 2\n", ("line 9, column 1: found duplicate key seed",)),
    "an open quote": ('+seed: "1\n', ("not valid YAML: line 9, column 1: found unexpected end",)),
    "an open brace": ("+data: {a: 1\n", ("line 9, column 1: did not find expected ',' or '}'",)),
    "an @": ("+seed: @x\n", ("line 8, column 7: found character that cannot start any token",)),
    "an alias of nothing": ("+data: *nope\n", ("line 8, column 7: found undefined alias",)),
    "an alias of itself": ("+data: &a {system_prompt: *a}\n", ("line 8, column 7", "recursive aliases")),
    "aliases that explode": (
        "+a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n",
        ("YAML aliases expand the document",),
    ),
    "brackets without end": (f"+data: {'[' * 2000}{']' * 2000}\n", ("exceeded maximum nesting depth",)),
    "a date": ("+seed: 2020-01-01\n", ("seed='2020-01-01': expected a valid integer",)),
    "yes": ("+seed: yes\n", ("seed=true: expected a valid integer",)),
    "not a number": ("+loss: {clip_low: .nan}\n", ("loss.clip_low=nan: expected a finite number",)),
    "infinity": ("+loss: {clip_low: .inf}\n", ("loss.clip_low=inf: expected a finite number",)),
    "beyond floats": ("+loss: {clip_low: 1e999}\n", ("loss.clip_low=inf: expected a finite number",)),
    "5,000 digits": (f"+seed: {'9' * 5000}\n", ("not valid YAML: a whole number of thousands of digits",)),
    "a long value": (f"+seed: {'x' * 5000}\n", ("seed='xxx", "...: expected a valid integer")),
    "code": ("+seed: !!python/object/apply:os.getcwd []\n", ("line 8, column 7: could not determine",)),
    "bytes": ("+seed: !!binary aGVsbG8=\n", ("seed=b'hello': expected a valid integer",)),
    "a number as key": ("+3: x\n", ("unknown key '3'; expected a name",)),
    "an empty key": ('+"": x\n', ("unknown key ''; known keys here: ",)),
    "a list as key": ("+[a]: 3\n", ("line 8, column 1: found unhashable key",)),
    "a dotted key": ("+policy.optimizer.lr: 1\n", ("keys nest in YAML: policy: {optimizer: {lr: ...}}",)),
    "NUL": (f'{BASE}seed: "\0"\n'.encode(), ("#x0000: control characters are not allowed",)),
    "Latin-1": (
        BASE.encode() + b"data: {system_prompt: caf\xe9}\n",
        ("not a text file; expected YAML in UTF-8",),
    ),
    "UTF-16": (BASE.encode("utf-16"), ("not a text file; expected YAML in UTF-8",)),
    "a lone surrogate": ('+data: {system_prompt: "\\ud800"}\n', ("line 8, column 26", "invalid Unicode")),
    "itself as default": ("defaults: case.yaml\n", ("form a circle (case.yaml -> case.yaml); remove one ",)),
    "a default that is missing": (
        "defaults: nope.yaml\n",
        ("nope.yaml: cannot read", "named by `defaults` in "),
    ),
    "a default that is a folder": (
        "defaults: .\n",
        ("Is a directory", "named by `defaults` in ", "check the path"),
    ),
    "a list of lists as defaults": (
        "defaults: [a, [b]]\n",
        ("defaults=['a', ['b']]: expected a file name or a list",),
    ),
    "a mapping as defaults": ("defaults: {a: 1}\n", ("defaults={'a': 1}: expected a file name or a list",)),
    "an interpolated default": ("defaults: ${x}\n", ("defaults: Interpolation key 'x' not found",)),
    "a list over a section": (
        "defaults: base.yaml\npolicy: [1]\n",
        ("policy is a list in one place", "one of the two"),
    ),
    "an interpolation of nothing": (
        '+data: {system_prompt: "${nope}"}\n',
        ("data.system_prompt: Inter", "'nope'"),
    ),
    "an interpolation of itself": (
        '+data: {system_prompt: "${data.system_prompt}"}\n',
        ("data.system_prompt: Recur",),
    ),
    "a key left open": (
        BASE.replace("spell_backward", '"???"'),
        ("env.task is left open (???); set it with ",),
    ),
    "no environment": (BASE.replace(ENV, ""), ("missing key 'env'; set it in the recipe or with env=...",)),
    "no kind": (
        BASE.replace("kind: reasoning_gym, ", ""),
        ("missing key 'env.kind'; expected one of reasoning_gym",),
    ),
    "a list as environment": (BASE.replace(ENV, "env: [1]\n"), ("env=[1]: expected a section",)),
    "null as kind": (
        BASE.replace("kind: reasoning_gym", "kind: null"),
        ("env.kind=null: expected one of 'reas",),
    ),
    "a key of another kind": (
        BASE.replace("reasoning_gym", "math"),
        ("unknown key 'env.task'", "here: chat_template_kwargs, path"),
    ),
    "blanks as run_dir": (
        BASE.replace("RUN_DIR", '" "'),
        ("run_dir is empty; set it to a directory of its own",),
    ),
    "a number for a name": (
        "+data: {train: {1: {path: x.csv}}}\n",
        ("unknown key 'data.train.1'; expected a name",),
    ),
    "many faults": (
        "run_dir: 3\npolicy: {workers: x}\nfoo: 1\n",
        ("unknown key 'foo'; known keys here: ", "(and 4 more: run_dir, policy.model, policy.workers, env)"),
    ),
}

CALLS: dict[str, tuple[str, ...]] = {
    "train": ("missing argument 'CONFIG'; see headrace train --help",),
    "train folder/x.yaml": (
        "folder/x.yaml: cannot read the recipe (No such file or directory); check the path",
    ),
    "train basee.yaml": ("basee.yaml: cannot read the recipe", "did you mean base.yaml?"),
    "train .": (".: cannot read the recipe (Is a directory); check the path",),
    "train base.yaml base.yaml": ("override 'base.yaml': expected key=value, for example ",),
    "train base.yaml --debugg": ("no such option: --debugg; see headrace train --help",),
    "train https://x.org/a.yaml": ("cannot read the recipe (No such file or directory); check the path",),
    "train binary": ("binary: not a text file; expected YAML in UTF-8",),
    "eval": ("missing argument 'RUN_OR_CONFIG'; see headrace eval --help",),
    "eval nope": ("nope: cannot read the recipe (No such file or directory); check the path",),
    "eval folder": (
        "folder/config.yaml: cannot read the recipe (No such file or directory); check the path",
    ),
    "eval base.yaml --checkpoint best": ("run: holds no checkpoint; train first, or give the path of one",),
    "eval base.yaml --checkpoint nope": (
        "--checkpoint nope: no checkpoint.json there; give best, latest or ",
    ),
    "eval base.yaml --checkpoint": ("option '--checkpoint' requires an argument",),
    "eval base.yaml seeed=1": ("unknown key 'seeed'; did you mean 'seed'?",),
    "eval base.yaml --chekpoint x": ("no such option: --chekpoint (Possible options: --checkpoint); see ",),
    "report": ("missing argument 'RUN'; see headrace report --help",),
    "report nope": ("nope/metrics.jsonl: cannot read it (No such file or directory); ",),
    "report base.yaml": ("base.yaml/metrics.jsonl: cannot read it (Not a directory); ",),
    "trace-check nope": ("nope: no run there", "give the directory of a run"),
    "trace-check folder": ("folder: no run there", "give the directory of a run"),
    "plan": ("missing argument 'LENGTHS'; see headrace plan --help",),
    "plan 1,x": ("LENGTHS '1,x': 'x' is not a whole number; expected numbers separated by commas",),
    "plan 1.5": ("LENGTHS '1.5': '1.5' is not a whole number; expected numbers",),
    "plan 10,20,-3": ("LENGTHS '10,20,-3' has a row of -3 tokens; expected 1 or more",),
    "plan 99999999999999999999": (
        "'99999999999999999999' is not a whole number of at most 12 digits; expected ",
    ),
    "plan 999999999999,1 --ranks 2 --budget 999999999999": (
        "LENGTHS '999999999999,1' has a row of 999999999999 tokens; expected 2147483647 at most",
    ),
    "plan uniform:99999999999:1:2": ("LENGTHS 'uniform:99999999999:1:2' are 99,999,999,999 rows; expected ",),
    "plan lognormal:5:9:3": ("LENGTHS 'lognormal:5:9:3': expected ", "the last two in order"),
    "plan 1,2 --budget 1": (
        "row 1 has 2 tokens, more than the 1 that --budget allows",
        "raise --budget to at least 2",
    ),
    "plan 1,2 --budget 0": ("'--budget': 0 is not a whole number from 1 to ", "see headrace plan --help"),
    "plan 1,2 --ranks 0": (
        "'--ranks': 0 is not a whole number from 1 to 1,000,000",
        "see headrace plan --help",
    ),
    "plan 1,2 --ranks 1e9": ("'--ranks': 1e9 is not a whole number from 1 to 1,000,000",),
    "plan 1,2 --pad-multiple -8": ("'--pad-multiple': -8 is not a whole number from 1",),
    "plan 1,2 --algorithm best": ("--algorithm best: expected one of first_fit_decreasing, ",),
    "doctor x": ("got unexpected extra argument(s) (x); see headrace doctor --help",),
    "trian": ("no such command 'trian'. Did you mean 'train'? See headrace --help",),
    "help nope": ("no such command 'nope'; see headrace --help",),
    "-v": ("no such option: -v; see headrace --help",),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE.replace("RUN_DIR", "run"))
    Path("folder").mkdir()
    Path("binary").write_bytes(b"\x1f\x8b\x08\x00abc\xff")


def call(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


def assert_one_line(result: Result, parts: tuple[str, ...]) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("headrace: error: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 500
    for part in parts:
        assert part in result.stderr
    assert not os.path.exists("run"), "nothing is made for a recipe that cannot run"


@pytest.mark.parametrize("overrides", OVERRIDES, ids=lambda text: text[:60])
def test_an_override_that_cannot_be_right_is_one_line(overrides: str) -> None:
    assert_one_line(call("train", "base.yaml", *overrides.split()), OVERRIDES[overrides])


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_that_cannot_be_right_is_one_line(name: str) -> None:
    text, parts = TEXTS[name]
    if isinstance(text, str):
        text = (BASE + text[1:] if text.startswith("+") else text).encode()
    Path("case.yaml").write_bytes(text)
    assert_one_line(call("train", "case.yaml"), parts)


@pytest.mark.parametrize("words", CALLS)
def test_a_call_that_cannot_be_right_is_one_line(words: str) -> None:
    assert_one_line(call(*words.split()), CALLS[words])


def test_there_are_hundreds_of_cases() -> None:
    assert len(OVERRIDES) + len(TEXTS) + len(CALLS) >= 180


@pytest.mark.parametrize(
    "words", ["train base.yaml policy.optimizer.betas=0.9", "plan 1,2 --ranks 0", "trian"]
)
def test_a_line_is_the_same_on_a_narrow_terminal(words: str) -> None:
    assert call(*words.split(), columns=60).stderr == call(*words.split(), columns=200).stderr
