"""Text from tokens, as they come: cut UTF-8 sequences wait, and so does what may be a stop string.

Invariant: the pieces handed out so far, joined, are a prefix of the final text; nothing is ever
taken back, so the interface only appends.
"""

from collections.abc import Callable, Sequence

CUT = "�"
WINDOW = 8
LONGEST_CUT = 3
"""A cut UTF-8 sequence has at most three bytes, so three tokens, so three replacement marks."""


class TextStream:
    """Turns tokens into pieces of text, and notices the first stop string.

    `tokens` is the window: `start` splits it where a token's text began, the first `shown`
    characters of its text are handed out or held, and `waiting` tokens ended in a cut sequence.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self.detokenize = detokenize
        self.stop = [string for string in stop if string]
        self.tokens: list[int] = []
        self.start = 0
        self.shown = 0
        self.waiting = 0
        self.held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that `token` completes, and whether a stop string ended the answer there.

        Only a window of tokens is decoded again, enough for tokens whose text depends on their
        left neighbour (a leading space, the rest of a UTF-8 sequence). It never begins inside a
        sequence, and it does not wait for one that cannot come: a cut one has three tokens at most.
        """
        self.tokens.append(token)
        text = self.detokenize(self.tokens)
        whole = len(text.rstrip(CUT))
        self.waiting = self.waiting + 1 if whole < len(text) else 0
        if self.waiting > LONGEST_CUT:
            whole = max(whole, len(text) - LONGEST_CUT)
        whole = max(whole, self.shown)
        self.held += text[self.shown : whole]
        self.shown = whole
        if len(self.tokens) >= self.start + WINDOW and not 0 < self.waiting <= LONGEST_CUT:
            pending = len(text) - whole
            del self.tokens[: self.start]
            self.start = len(self.tokens)
            self.shown = len(self.detokenize(self.tokens)) - pending
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
        self.held += text[self.shown :]
        self.shown = len(text)
        piece, stopped = self.release()
        if not stopped:
            piece, self.held = piece + self.held, ""
        return piece


def overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` that `text` ends with."""
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


def resumed(
    detokenize: Callable[[Sequence[int]], str], stop: Sequence[str], tokens: Sequence[int]
) -> tuple[TextStream, str]:
    """The stream of an answer that has these tokens, as if it had never ended, and the text that
    it has handed out.

    A stop string that is in there already did not end it: they count from here on.
    """
    stream, told = TextStream(detokenize, stop), list[str]()
    for token in tokens:
        piece, stopped = stream.push(token)
        told.append(piece)
        if stopped:
            stream, text = resumed(detokenize, (), tokens)
            stream.stop = [string for string in stop if string]
            return stream, text
    return stream, "".join(told)


def behind(
    detokenize: Callable[[Sequence[int]], str], stop: Sequence[str], tokens: Sequence[int]
) -> TextStream:
    """The stream of an answer that goes on behind tokens whose text is handed out already."""
    stream = TextStream(detokenize, stop)
    stream.tokens = list(tokens[-WINDOW:])
    stream.shown = len(detokenize(stream.tokens))
    return stream
