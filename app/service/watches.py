"""Names for conversations, by which pages ask whether anything changed.

Nobody can guess one, so whoever knows it may ask. It tells a number, and nothing else.
"""

import secrets

from app.service.latest import Latest

Place = tuple[str, str]
"""An owner and one of their conversations."""


class Watches:
    """See the module's docstring. A name is forgotten when many others were given since."""

    def __init__(self) -> None:
        self.names: Latest[Place, str] = Latest()
        self.places: Latest[str, Place] = Latest()

    def name(self, owner: str, conversation: str) -> str:
        """The name of a conversation, the same for all its pages."""
        place = owner, conversation
        name = self.names.get(place) or secrets.token_urlsafe(18)
        self.names[place], self.places[name] = name, place
        return name

    def place(self, name: str) -> Place | None:
        """Whose it is, and which conversation; None for a name that was never given."""
        return self.places.get(name)
