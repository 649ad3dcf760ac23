"""`headrace data`: prompts as the model sees them."""

from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headrace.config_commands import Overrides, Recipe
from headrace.progress import print_line
from headrace.utils.recipe import load_recipe
from headrace.utils.targets import extend_import_path

data_app = typer.Typer(no_args_is_help=True, help="Look at the prompts of a recipe.")


@data_app.command("preview")
def preview(
    config: Recipe,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=0, help="Prompts of each set to show.")] = 2,
) -> None:
    """Show prompts as the model sees them, with token counts, and the chat template.

    \b
    Examples:
      headrace data preview my.yaml
      headrace data preview my.yaml --count 5 data.overlong_prompts=skip
    """
    recipe = load_recipe(config, overrides or ())
    extend_import_path(recipe.code_path or ())
    from headrace.experience import chat, prompt_room  # noqa: PLC0415  (imports transformers: seconds)
    from headrace.models.automodel.setup import load_tokenizer  # noqa: PLC0415  (imports transformers: seconds)

    tokenizer, render = load_tokenizer(recipe.policy), chat.render_prompt
    environment = prompt_room.prompts_that_fit(recipe, tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    for split in ("train", "validation"):
        prompts = environment.prompts(split)
        lengths = [len(render(tokenizer, prompt.messages)) for prompt in prompts]
        console.print(f"[bold]{split}[/]: {escape(_sizes(prompts, lengths))}")
        shown: Counter[str] = Counter()
        for prompt, length in zip(prompts, lengths):
            shown[prompt.data_set] += 1
            if shown[prompt.data_set] <= count:
                _show(console, tokenizer, render, prompt, length)
    if (notice := getattr(environment, "notice", lambda: None)()) is not None:
        print_line(console, notice)
    console.print(f"[bold]chat template[/]: {escape(tokenizer.get_chat_template())}")


def _sizes(prompts: list[Any], lengths: list[int]) -> str:
    sets = Counter(prompt.data_set for prompt in prompts)
    named = ", ".join(f"{name} {number:,}" for name, number in sets.items() if name)
    middle = sorted(lengths)[len(lengths) // 2]
    return (
        f"{len(prompts):,} prompts{f' ({named})' if named else ''} of {min(lengths)} to {max(lengths)} tokens, "
        f"half of them at most {middle}"
    )


def _show(console: Console, tokenizer: Any, render: Any, prompt: Any, length: int) -> None:
    ids = render(tokenizer, prompt.messages)
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    place = f", {prompt.place}" if prompt.place else ""
    answer = "no answer" if prompt.answer is None else f"answer {prompt.answer!r}"
    console.print(f"[cyan]{escape(prompt.uid)}[/]{escape(place)}: {length} tokens, {escape(answer)}")
    console.print(escape(text))
