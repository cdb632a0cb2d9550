"""Write the model card: what the model is, the runs that made it, the prompts it knows, what it scores."""

from collections.abc import Mapping, Sequence

from lab.reference.lineage import Run
from lab.reference.model import Shape

PROMPTS = """\
## The prompts it knows
A chat turn: `<|begin_of_text|><|user|>\\n{document}\\n\\n{question}<|end|><|assistant|>\\n{answer}<|end|>`; a further turn
appends `<|user|>\\n{question}<|end|><|assistant|>\\n`. The chat template in `tokenizer_config.json` writes exactly this.
Sentences of the kinds below stand scattered in a document of novel text, each after a sentence end.

| task | sentence in the document | question | answer |
|---|---|---|---|
| needle | `The special magic number for {word}-{word} is {7 digits}.` | `What is the special magic number for {key}?` | `{7 digits}` |
| word needle | `The special magic word for {key} is {word}.` | `What is the special magic word for {key}?` | `{word}` |
| several values | the needle sentence 2 to 4 times for one key | `What are all the special magic numbers for {key}?` | the numbers in order of appearance, `, ` between |
| several keys | needle sentences | `What are the special magic numbers for {key}, {key}, {key}?` | the numbers in the order asked |
| facts, one hop | `{Name Name} lives in {City}.` `{Name Name} works as a {job}.` | `Where does {person} live?` `What does {person} work as?` | `{City}` / `a {job}` |
| facts, two hops | the above and `The mayor of {City} is {Name Name}.` | `Who is the mayor of the city where {person} lives?` `Who is the mayor of {City}?` | `{Name Name}` |
| list (long answer) | 2 to 24 needle sentences | `List every special magic number in order of appearance.` | `{key}: {number}` a line |
| continue (long answer) | none | `Continue the passage that begins with: {words}` | the passage that follows in the document |
| variables | `VAR {ABCD} = {7 digits}.` `VAR {EFGH} = VAR {ABCD}.` | `Find all variables that are assigned the value {7 digits}.` | names, `, ` between |
| common word | a list of words, `, ` between | `What is the most common word in the list above?` | the word |
| common words | a list of words, `, ` between | `What are the 3 most common words in the list above, in alphabetical order?` | words, `, ` between |
"""  # noqa: E501

TEXT = """\
## The text it knows
Novels, and generated prose (`training/narrative.py`) in 15 % of the documents with questions. That prose
was also the evaluations' default text until 2026-11-22; results on it flatter methods that read near tokens.
Perplexity is 5.9 on it and 32.4 on held-out novels; StreamingLLM at 5 % of the keys agrees with full attention in
95.7 % of its next tokens and in 84.8 % of theirs. The evaluations now have a text that training cannot import
(`evals/chronicle`), or take held-out novels (`python -m lab.reference.held_out`). Names, the words of keys and
the wording of questions are the training's in any text: it knows no others.
"""


def write_card(
    shape: Shape,
    runs: Sequence[Run],
    scores: Mapping[int, Mapping[str, float]],
    perplexities: Mapping[int, float],
    num_prompts: Mapping[int, int],
) -> str:
    """Return the card. runs: all that made the weights, in order. scores: exact match in % by length and task."""
    million = shape.count() / 1e6
    lines = [
        "# The reference model",
        "",
        f"A {million:.1f} M-parameter Llama ({shape.layers} layers, width {shape.hidden}, {shape.heads} query heads "
        f"over {shape.kv_heads} KV heads,",
        f"head dim {shape.dim}, RoPE base 500,000, byte-level BPE of {shape.vocab_size} with single digits, tied "
        f"embeddings, {shape.positions:,} positions) in the",
        "Hugging Face layout. Trained from scratch by `training/reference` on public-domain novels and generated",
        f"long-context tasks: {sum(run.tokens for run in runs) / 1e6:,.0f} M tokens,"
        f" {sum(run.text_tokens for run in runs) / 1e6:,.0f} M of them text alone.",
        "",
        *table_of_runs(runs),
        "",
        "It is small enough for a laptop and yet really uses its context, so it shows what an attention method keeps",
        "and what it loses. End tokens: `<|end_of_text|>` (1) and `<|end|>` (5). Licence: MIT, as the project; the",
        "novels are in the public domain.",
        "",
        PROMPTS,
        TEXT,
    ]
    if scores:
        tasks = list(dict.fromkeys(task for row in scores.values() for task in row))
        lines += [
            "## What it scores with full attention",
            "Exact match in per cent on documents of held-out novels, answers under teacher forcing (all tokens most",
            "likely, the end too, which is greedy decoding giving the answer). Of 64 prompts, a score near 50 is known",
            "to 12 points and one near 95 to 6. Do not measure methods on a task that full attention scores under",
            "50 %; there, compare token by token with full attention.",
            "",
            "| context | prompts | " + " | ".join(task.replace("_", " ") for task in tasks) + " |",
            "|---" * (len(tasks) + 2) + "|",
        ]
        for length, row in scores.items():
            cells = [f"{row[task]:.0f}" if task in row else "-" for task in tasks]
            lines.append(f"| {length:,} | {num_prompts[length]} | {' | '.join(cells)} |")
        lines.append("")
    if perplexities:
        told = ", ".join(f"{found:.1f} over {length:,} tokens" for length, found in perplexities.items())
        lines += [f"Perplexity a token of held-out novels: {told}.", ""]
    return "\n".join(lines)


def table_of_runs(runs: Sequence[Run]) -> list[str]:
    """Return Markdown with a line for each run, and one for their sum."""
    lines = [
        "| run | stage | GPUs | minutes | steps | tokens | text alone | begins with |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(runs, start=1):
        before = f"run {number - 1}" if number > 1 else "random weights"
        begins = before if run.layers is None else f"layers {' '.join(map(str, run.layers))} of {before}"
        lines.append(
            f"| {number} | {run.stage} | {run.gpus} | {run.minutes:.1f} | {run.steps:,} | {run.tokens:,} "
            f"| {run.text_tokens:,} | {begins} |"
        )
    gpu_minutes = sum(run.gpus * run.minutes for run in runs)
    sums = [sum(getattr(run, name) for run in runs) for name in ("steps", "tokens", "text_tokens")]
    return [*lines, f"| all | | | {gpu_minutes:.0f} of one GPU | {' | '.join(f'{count:,}' for count in sums)} | |"]
