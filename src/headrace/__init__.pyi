"""What `import headrace` gives; `__init__.py` loads each name when it is first used."""

from headrace.algorithms.loss import LossInputs as LossInputs
from headrace.algorithms.observer import RunObserver as RunObserver
from headrace.config import RecipeConfig as RecipeConfig
from headrace.environments.interfaces import StepResult as StepResult
from headrace.errors import HeadraceError as HeadraceError
from headrace.experience.types import Message as Message
from headrace.experience.types import Prompt as Prompt
from headrace.training import RunResult as RunResult
from headrace.training import train as train
from headrace.utils.recipe import load_recipe as load_recipe

__version__: str
