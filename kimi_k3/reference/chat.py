"""The assistant's side of the chat format: splitting generated text into reasoning and answer as it grows."""

from __future__ import annotations

from kimi_k3.reference.tokenizer import CLOSE, OPEN, SEP

_ANSWER = f"{OPEN}response{SEP}"


class ChannelReader:
    """Feeds on text that began inside the think channel (``thinking``) or inside the response channel.

    What could be the beginning of a marker is held back. Everything behind the response channel is dropped.
    """

    def __init__(self, thinking: bool) -> None:
        self._places = ["think", "between", "response"] if thinking else ["response"]
        self._text = ""

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that ``text`` adds."""
        self._text += text
        found = {"think": "", "between": "", "response": ""}
        while self._places:
            marker = _ANSWER if self._places[0] == "between" else CLOSE
            before, seen, after = self._text.partition(marker)
            if seen:
                found[self._places.pop(0)] += before
                self._text = after
                continue
            kept = 0 if final else _overlap(self._text, marker)
            end = len(self._text) - kept
            found[self._places[0]] += self._text[:end]
            self._text = self._text[end:]
            break
        return found["think"], found["response"]


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` begin ``marker``."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
