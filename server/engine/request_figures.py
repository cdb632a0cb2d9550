"""Read the numbers in an answer's usage beside tokens: of documents, the scheduler and attention methods."""

from functools import cache

from gpu.fusion.fusion_plan import FIGURES
from gpu.methods.counters import RequestFigure
from gpu.methods.registry import list_figures
from scheduler import messages


@cache
def find_figures() -> dict[str, RequestFigure]:
    """Return all figures by name."""
    places = {messages.cached_figure(place): figure for place, figure in messages.CACHED_FROM.items()}
    passed = {messages.passed_figure(why): figure for why, figure in messages.PASSED_OVER.items()}
    again = {messages.COMPUTED_AGAIN: messages.AGAIN}
    return {**FIGURES, **messages.FIGURES, **places, **passed, **again, **list_figures()}


@cache
def figure_names(of_prompt: bool) -> dict[str, bool]:
    """Return the names of the figures of prompts or of answers, and whether every answer has the figure.

    An answer has a method's figures only if the method ran. Figures about caching are not included, since `usage` shows
    them in a group. The result is cached: methods are found by reading a folder, and every answer needs the names.
    """
    of_methods = list_figures()
    of_places = {messages.cached_figure(place) for place in messages.CACHED_FROM}
    of_places |= {messages.passed_figure(why) for why in messages.PASSED_OVER} | {messages.COMPUTED_AGAIN}
    return {
        name: name not in of_methods
        for name, figure in find_figures().items()
        if figure.of_prompt == of_prompt and name not in of_places
    }


def logged_name(name: str) -> str:
    """Return the name of a figure in the log. Those of documents say so: preemptions, too, compute tokens again."""
    return f"document_{name}" if name in FIGURES else name
