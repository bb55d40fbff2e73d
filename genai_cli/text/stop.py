"""Stop sequences, matched on text wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Sequence

from genai_cli.errors import GenaiError


class StopMatcher:
    """Passes text on until the first stop sequence is complete; holds back what may still become one.

    The sequence that is complete first wins; of several that end together, the longest. So how the text was cut
    into pieces changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise GenaiError("an empty stop sequence was given; wanted at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is certainly before any stop sequence. After a match (`matched` is set) nothing more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the generation ended for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
