"""What does `import headrace.data_plane` cost beyond torch and tensordict?

In fresh processes. Judged by processor time, since on a busy machine the wall clock measures the neighbours.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from run import Bench, main

SECONDS = 0.3
PROBE = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
import torch, tensordict
base_wall, base_cpu = time.perf_counter(), time.process_time()
import headrace.data_plane
own = {"wall_s": time.perf_counter() - base_wall, "cpu_s": time.process_time() - base_cpu}
base = {"wall_s": base_wall - wall, "cpu_s": base_cpu - cpu}
heavy = {"ray", "transformers", "transfer_queue", "vllm", "datasets"} & set(sys.modules)
print(json.dumps({"own": own, "base": base, "heavy": sorted(heavy)}))
"""


def probe() -> dict[str, dict[str, float]]:
    """Import in a fresh process."""
    source = Path(__file__).parents[1] / "src"
    code = f"import sys; sys.path.insert(0, {str(source)!r})\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(bench: Bench) -> None:
    """Import a few times; each takes seconds, most of them torch's."""
    probe()
    results = [probe() for _ in range(2 if bench.quick else 5)]
    assert all(result["heavy"] == [] for result in results)
    for part in ("own", "base"):
        bench.notes[part] = {
            clock: [round(result[part][clock], 3) for result in results] for clock in ("cpu_s", "wall_s")
        }
    own_s = statistics.median(result["own"]["cpu_s"] for result in results)
    bench.figure("beyond_torch_and_tensordict", own_s, "s", at_most=SECONDS)


if __name__ == "__main__":
    main(measure, __doc__)
