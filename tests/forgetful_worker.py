"""A worker of vLLM's CPU build that loses in its sleep what a GPU loses, where vLLM's own ignores sleep.

As in vllm/v1/worker/gpu_worker.py and vllm/device_allocator/cumem.py: level 1 keeps the parameters, level 2 only the
buffers; both lose the cache. HEADRACE_VERBS names a file for the verbs, in their order.
"""

import os
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

_GARBAGE = 7.0


class ForgetfulWorker(CPUWorker):
    """Sleeps, and writes down what it is told."""

    def sleep(self, level: int = 1) -> None:
        _note(f"sleep {level}")
        model = self.get_model()
        self._kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if level == 1:
            self._kept |= {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        for tensor in (*model.parameters(), *model.buffers(), *self.model_runner.kv_caches):
            tensor.data.fill_(_GARBAGE)

    def wake_up(self, tags: list[str] | None = None) -> None:
        _note(f"wake_up {' '.join(tags or ['all'])}")
        if "weights" in (tags or ["weights"]):
            model = self.get_model()
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in self._kept:
                    tensor.data.copy_(self._kept[name])

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        _note("load")
        super().reload_weights(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        _note("generate")
        return super().execute_model(scheduler_output)


def _note(verb: str) -> None:
    path = Path(os.environ["HEADRACE_VERBS"])
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if before[-1:] != [verb]:  # a generation has many steps
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{verb}\n")
