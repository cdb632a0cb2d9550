"""Read an answer as a message while its text arrives: content, reasoning and tool calls.

Special tokens are spelled out in the text, but known as such: they mark formats, and clients do not see them. Text that
looks like a call but is not one is content. White space around regions is dropped. If a limit cut the answer, what may
be the beginning of a mark is dropped, and so is a call without a name. The joined parts do not depend on how the text
is cut.
"""

from server.parsing.answer_formats import REASONING_FIELDS, AnswerFormat
from server.parsing.answer_parts import CallArguments, CallBegun, Content, Part, Reasoning, new_call_id
from server.parsing.call_readers import Call, CallReader, Ended, choose_reader
from server.parsing.offered_tools import Tools
from server.parsing.regions import Between, Closed, Inside, Opened, RegionReader
from server.parsing.response_template import Field

_CALLS = "tool_calls"
_CONTENT = "content"


class MessageReader:
    """Reads an answer: `feed` it the text, then call `finish` or `cut`.

    is_done: the request wants no more calls, so the rest is not read.
    """

    def __init__(self, answer_format: AnswerFormat, opening: str, tools: Tools | None, has_form: bool) -> None:
        """Start reading.

        `opening`: the answer's beginning in the prompt, which is read and not told. `tools`: without any, calls are
        content. `has_form`: an answer with content has a form, and all that follows its beginning is part of it.
        """
        template = answer_format.template
        fields = [field for field in template.fields.values() if tools is not None or field.name != _CALLS]
        self._regions = RegionReader(fields)
        self._outer = next((field.name for field in fields if field.opens is None), None)
        self._tools = tools or Tools({})
        self._known_only = answer_format.known_only
        self._specials: list[tuple[int, int]] = []
        self._num_fed = 0
        self._is_cut = False
        self._field: Field | None = None
        self._opened_at = 0
        self._calls: CallReader | None = None
        self._has_calls = False  # the open region has
        self._has_form = has_form
        self._content, self._reasoning = _Words(Content), _Words(Reasoning)
        self.num_calls = 0
        self.is_done = False
        self._num_old = 0  # characters of the opening
        self.feed(opening, False)
        self._num_old = self._num_fed
        for words in (self._content, self._reasoning):
            words.forget_held()

    @property
    def is_reasoning(self) -> bool:
        return self._field is not None and self._field.name in REASONING_FIELDS

    def feed(self, text: str, is_special: bool) -> list[Part]:
        if self.is_done or not text:
            return []
        if is_special:
            self._specials.append((self._num_fed, self._num_fed + len(text)))
        self._num_fed += len(text)
        self._regions.feed(text)
        return self._read()

    def finish(self) -> list[Part]:
        """End an answer that has ended by itself."""
        return self._end(is_cut=False)

    def cut(self) -> list[Part]:
        """End an answer that a limit ended."""
        return self._end(is_cut=True)

    def _end(self, is_cut: bool) -> list[Part]:
        if self.is_done:
            return []
        self._is_cut = is_cut
        self._regions.finish(is_cut)
        parts = self._read()
        if not self.is_done:
            self._content.end(parts)
        return parts

    def _read(self) -> list[Part]:
        parts: list[Part] = []
        while not self.is_done and (event := self._regions.next()) is not None:
            if isinstance(event, Opened):
                self._open(event, parts)
            elif isinstance(event, Inside | Between):
                self._go_on(event, parts)
            else:
                self._close(event, parts)
        self._forget()
        return parts

    def _open(self, event: Opened, parts: list[Part]) -> None:
        self._field, self._opened_at = event.field, event.begin
        if event.field.name == _CALLS:
            self._calls = choose_reader(event.field, event.captures, self._tools, self._known_only)
            self._has_calls = False
            self._give_back(self._calls, event.end, parts)

    def _go_on(self, event: Inside | Between, parts: list[Part]) -> None:
        name = self._field.name if self._field is not None else self._outer
        if self._calls is not None:
            if not self._calls.broken:
                text = self._visible(event.begin, event.end)
                if self._calls.reads_specials:
                    text = self._regions.text(event.begin, event.end)
                calls = self._calls.feed(text) if isinstance(event, Inside) else self._calls.add(event.argument, text)
                if self._tell(calls, parts):
                    self._give_back(self._calls, event.end, parts)
            else:
                self._say(self._visible(event.begin, event.end), parts)
        elif name in REASONING_FIELDS:
            self._reasoning.say(self._visible(event.begin, event.end), parts)
        elif name == _CONTENT:
            self._say(self._visible(event.begin, event.end), parts)

    def _close(self, event: Closed, parts: list[Part]) -> None:
        field, calls = self._field, self._calls
        if field is None:
            if event.is_cut:
                self._content.pass_region()
            return
        self._field = self._calls = None
        if calls is None:
            if field.name in REASONING_FIELDS:
                self._content.pass_region()
                self._reasoning.pass_region()
            return
        if calls.broken:
            self._say(self._visible(event.begin, event.end), parts)
            return
        ended: Ended = "by itself" if not event.is_cut else "by a limit" if self._is_cut else "with the answer"
        if not self._tell(calls.close(ended), parts):
            return
        if not self._give_back(calls, event.end, parts):
            self._content.pass_region()
        elif self._has_calls:
            self._say(self._visible(event.begin, event.end), parts)

    def _give_back(self, calls: CallReader, end: int, parts: list[Part]) -> bool:
        """Return whether the region up to `end`, or its rest after the last call, is not a call and becomes content."""
        if not calls.broken:
            return False
        if self._has_calls:
            self._content.pass_region()
        self._say(calls.rest() if self._has_calls else self._visible(self._opened_at, end), parts)
        return True

    def _tell(self, calls: list[Call], parts: list[Part]) -> bool:
        """Add calls to the parts. Return False if the request wants no more of them."""
        for name, text in calls:
            if name:
                if self.num_calls == self._tools.max_calls:
                    self.is_done = True
                    return False
                self._has_calls = True
                parts.append(CallBegun(self.num_calls, new_call_id(), name))
                self.num_calls += 1
            elif text:
                parts.append(CallArguments(self.num_calls - 1, text))
        return True

    def _say(self, text: str, parts: list[Part]) -> None:
        self._content.say(text, parts)
        if self._has_form and text.strip():
            self._regions.open_no_more()

    def _visible(self, begin: int, end: int) -> str:
        """Return the text without special tokens and without the opening."""
        pieces = []
        begin = max(begin, self._num_old)
        for first, last in self._specials:
            if first >= end:
                break
            if last > begin:
                pieces.append(self._regions.text(begin, max(begin, first)))
                begin = max(begin, last)
        pieces.append(self._regions.text(begin, max(begin, end)))
        return "".join(pieces)

    def _forget(self) -> None:
        """Release the text before the open region, or before what comes next outside."""
        keep = self._opened_at if self._calls is not None and not self._has_calls else self._regions.position
        self._regions.release(keep)
        while self._specials and self._specials[0][1] <= keep:
            del self._specials[0]


class _Words:
    """Collects content or reasoning, without the white space around regions unless it separates words on both sides."""

    def __init__(self, kind: type[Content] | type[Reasoning]) -> None:
        self._kind = kind
        self._held = ""  # white space: part of the words if more of them come
        self._is_fresh = self._is_behind = kind is Reasoning  # behind a region, and no words since; of it at all
        self._has_said = False

    def say(self, text: str, parts: list[Part]) -> None:
        if self._is_fresh and (self._held or (self._is_behind and not self._has_said)):
            text = text.lstrip()
        if not text:
            return
        if self._is_fresh and not self._has_said:
            self._held = ""
        self._is_fresh = False
        text = self._held + text
        said = text.rstrip()
        self._held = text[len(said) :]
        if said:
            self._has_said = True
            parts.append(self._kind(said))

    def forget_held(self) -> None:
        self._held = ""

    def pass_region(self) -> None:
        self._is_fresh = self._is_behind = True

    def end(self, parts: list[Part]) -> None:
        if self._held and not self._is_fresh:
            parts.append(self._kind(self._held))
