"""Token ids whose ends stand for decode steps: running text, or a task's prompts with their answers."""

from pathlib import Path

from evals.cells import Cell, PromptSettings
from evals.fidelity import text_prompts
from evals.run import form_of, make_prompts
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer

TEXT = "text"


def recovery_prompts(
    model: Path, task: str, length_tokens: int, num_prompts: int, seed: int, files: tuple[Path, ...]
) -> list[list[int]]:
    """Return `num_prompts` prompts of a task (or `text`), `length_tokens` or a little fewer each."""
    tokenizer = load_tokenizer(model)
    if task == TEXT:
        return text_prompts(tokenizer, text_source(files, {}), length_tokens, num_prompts, seed)
    made = make_prompts(
        Cell(task, length_tokens, num_prompts, ("full",), 0), PromptSettings(model, form_of(model), seed, files)
    )
    answers = [tokenizer.encode(" ".join(one.sample.answers), add_special_tokens=False) for one in made]
    return [(one.token_ids.tolist() + answer)[-length_tokens:] for one, answer in zip(made, answers, strict=True)]
