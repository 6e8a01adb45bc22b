"""Text from tokens, as they come: cut UTF-8 sequences wait, and so does what may be a stop string.

Invariant: the pieces handed out so far, joined, are a prefix of the final text; nothing is ever
taken back, so the interface only appends.
"""

from collections.abc import Callable, Sequence

CUT = "�"
WINDOW = 8


class TextStream:
    """Turns tokens into pieces of text, and notices the first stop string."""

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self.detokenize = detokenize
        self.stop = [string for string in stop if string]
        self.tokens: list[int] = []
        self.shown = ""
        self.held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that `token` completes, and whether a stop string ended the answer there.

        Only a window of tokens is decoded again, enough for tokens whose text depends on their
        left neighbour (a leading space, the rest of a UTF-8 sequence).
        """
        self.tokens.append(token)
        text = self.detokenize(self.tokens)
        if text.endswith(CUT) and len(self.tokens) < 2 * WINDOW:
            return "", False
        self.held += text[len(self.shown) :]
        if len(self.tokens) >= 2 * WINDOW:
            del self.tokens[:-WINDOW]
            text = self.detokenize(self.tokens)
        self.shown = text
        return self.release()

    def release(self) -> tuple[str, bool]:
        """Hand out the held text up to a stop string, or up to what may become one."""
        ends = [at for string in self.stop if (at := self.held.find(string)) >= 0]
        if ends:
            piece, self.held = self.held[: min(ends)], ""
            return piece, True
        keep = max((overlap(self.held, string) for string in self.stop), default=0)
        cut = len(self.held) - keep
        piece, self.held = self.held[:cut], self.held[cut:]
        return piece, False

    def flush(self) -> str:
        """What is still held when the answer ends for another reason."""
        text = self.detokenize(self.tokens) if self.tokens else ""
        piece, self.held = self.held + text[len(self.shown) :], ""
        self.shown = text
        return piece


def overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` that `text` ends with."""
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
