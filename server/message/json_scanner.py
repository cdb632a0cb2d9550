"""Where a JSON object or list ends, told from its brackets and strings alone, as its text comes.

Does not know whether the text is JSON; what stands between the brackets is not looked at.
"""


class JsonScanner:
    def __init__(self, depth: int) -> None:
        """depth: of brackets that are open already; 0: the value has not begun."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find_end(self, text: str, begin: int) -> int | None:
        """Where the value ends in `text`, which goes on from `begin`; where it should have begun, if it does not."""
        for i in range(begin, len(text)):
            char = text[i]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0:
                if not char.isspace():
                    return i
            elif char == '"':
                self._in_string = True
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None
