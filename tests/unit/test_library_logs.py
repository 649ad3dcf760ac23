"""Warnings of libraries go to a file of the run; what headrace and its user say stays on the terminal."""

import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401  (its import sets its logger up)

from headrace.algorithms.observer import RunObserver, StepRecord
from headrace.library_logs import LibraryLogs
from headrace.training import run_recipe
from tiny_recipe import tiny_recipe


class Noise(RunObserver):
    """Speaks as libraries and as the user's own code do, in the middle of a run."""

    def on_step(self, record: StepRecord) -> None:
        logging.getLogger("transformers.modeling_utils").warning("noise of transformers")
        logging.getLogger("torch.some.part").warning("noise of torch")
        logging.getLogger("torch.other").error("a fault of torch")
        warnings.warn_explicit("noise by warnings", UserWarning, torch.__file__, 1)
        logging.getLogger("my_reward").warning("words of the user")
        logging.getLogger("headrace.experience").warning("words of headrace")


def test_a_runs_terminal_has_its_own_words_and_the_file_those_of_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = [logging.getLogger(name) for name in ("transformers", "torch")]
    before = [(logger.handlers.copy(), logger.propagate) for logger in loggers]
    # pytest's own handlers would keep Python's last resort from printing.
    caught, logging.root.handlers = logging.root.handlers, []
    try:
        run_recipe(tiny_recipe(tmp_path / "run", grpo={"max_num_steps": 1}), [Noise()])
    finally:
        logging.root.handlers = caught
    shown, told = capsys.readouterr().err, (tmp_path / "run" / "libraries.log").read_text()
    assert "noise" not in shown
    for words in ("words of the user", "words of headrace", "a fault of torch"):
        assert words in shown
    for words in ("noise of transformers", "noise of torch", "noise by warnings", "a fault of torch"):
        assert words in told
    assert "words of" not in told
    assert [(logger.handlers, logger.propagate) for logger in loggers] == before


def test_a_logger_that_writes_to_a_file_of_its_own_goes_on_doing_so(tmp_path: Path) -> None:
    logger, own = logging.getLogger("wandb.sync"), logging.FileHandler(tmp_path / "own.log")
    logger.handlers = [own, logging.StreamHandler(sys.stderr)]
    with LibraryLogs(tmp_path / "libraries.log"):
        logger.warning("to both files")
    logger.handlers = []
    own.close()
    for name in ("own.log", "libraries.log"):
        assert "to both files" in (tmp_path / name).read_text()


def test_without_a_word_there_is_no_file(tmp_path: Path) -> None:
    with LibraryLogs(tmp_path / "libraries.log"):
        logging.getLogger("ray").info("nothing of note")
    assert list(tmp_path.iterdir()) == []
