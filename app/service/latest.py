"""A mapping that does not grow for ever."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """Keeps the `most` entries which were set last: browsers come and go unannounced."""

    LIMIT = 1_000

    def __init__(self, most: int = LIMIT) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)
