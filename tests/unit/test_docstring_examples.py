"""Examples in docstrings, which the pages of the API show, print what they say."""

import doctest
import importlib.util
import io
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from docs_pages import ROOT
from headrace.utils.checkpoints import CheckpointManager
from tiny_models import tiny_model

SOURCE = ROOT / "src" / "headrace"
FILES = sorted(file for file in SOURCE.rglob("*.py") if ">>> " in file.read_text(encoding="utf-8"))


def fresh(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module of its own for a file, so that an example changes no table of this process."""
    spec = importlib.util.spec_from_file_location("fresh", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fresh", module)
    spec.loader.exec_module(module)
    return module


def names_for(file: Path, folder: Path) -> dict[str, Any]:
    """Return what examples leave to the reader: a model, a checkpoint's folder, a step that Ctrl-C interrupts."""
    names: dict[str, Any] = {"torch": torch}
    if "router_replay" in str(file):
        names |= {"model": tiny_model("qwen3_moe"), "ids": torch.arange(6)[None]}
    if file.stem == "checkpoints":
        manager = CheckpointManager(folder, keep_top_k=1, metric="validation/accuracy")
        names |= {"manager": manager, "policy": SimpleNamespace(save=lambda draft: None)}
    if file.stem == "interrupt":
        names["train_one_step"] = partial(os.kill, os.getpid(), signal.SIGINT)
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_the_examples_of_a_module_print_what_they_say(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = fresh(file, monkeypatch) if file.stem == "schema" else importlib.import_module(name)
    said = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        test.globs = {**vars(module), **names_for(file, tmp_path)}
        runner.run(test, out=said.write)
    assert runner.failures == 0, said.getvalue()
    assert runner.tries > 0
