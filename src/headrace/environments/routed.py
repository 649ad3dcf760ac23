"""Several environments behind one: a value in a prompt's `info` says which of them scores it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.environments.interfaces import Environment, Prompts, StepResult, Talks
from headrace.environments.prompts import Splits
from headrace.experience.scoring import checked_results
from headrace.experience.types import Prompt


@dataclass
class RoutedEnvironment:
    """Sends each prompt to the environment that `info[column]` names, or to a default one; `source` has the prompts."""

    source: Splits | Environment
    by_name: Mapping[str, Environment]
    column: str = "task"
    default: Environment | None = None

    def prompts(self, split: str) -> list[Prompt]:
        if not isinstance(self.source, Splits):
            return self.source.prompts(split)
        return list(self.source.train if split == "train" else self.source.validation)

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        rows_by_name: dict[str | None, list[int]] = {}
        for row, prompt in enumerate(prompts):
            name = prompt.info.get(self.column)
            rows_by_name.setdefault(name if name in self.by_name else None, []).append(row)
        results: dict[int, StepResult] = {}
        for name, rows in rows_by_name.items():
            environment = self.default if name is None else self.by_name[name]
            assert environment is not None, f"prompt '{prompts[rows[0]].uid}' names no environment"
            judged = environment.step(
                [prompts[i] for i in rows],
                [conversations[i] for i in rows],
                truncated=[truncated[i] for i in rows],
            )
            names = [f"prompt '{prompts[i].uid}'" for i in rows]
            judged = checked_results(judged, names, who=f"the environment of {self.column} {name!r}")
            results.update(zip(rows, judged))
        return [results[row] for row in range(len(prompts))]
