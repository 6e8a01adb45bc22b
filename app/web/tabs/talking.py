"""Chat: what the events of the composer and those of single messages have in common."""

from collections.abc import Sequence

import gradio as gr

from app.service.preferences import Preferences
from app.service.session import Session
from app.web.tabs.chat_view import Parts, shown
from app.web.tabs.settings import Controls
from app.web.wiring import Updates
from engine.errors import Busy


class Talk:
    """The chat's components, and how an answer is begun."""

    def __init__(
        self,
        session: Session,
        parts: Parts,
        controls: Controls,
        current: gr.State,
        memory: gr.BrowserState,
    ) -> None:
        self.session, self.parts, self.controls = session, parts, controls
        self.current, self.memory = current, memory
        self.nothing: Updates = {parts.editing: gr.skip()}

    def ready(self, values: Sequence[object]) -> tuple[str, Preferences]:
        """System prompt and preferences; raises SettingError where they could not be followed,
        before anything is stored or taken back for an answer that cannot come."""
        system, preferences = self.controls.read(values)
        self.session.stacks.check(preferences.chosen(), preferences.generation.sampling)
        return system, preferences

    def alone(self, owner: str, conversation: str | None) -> None:
        """Raises Busy while an answer is under way, which would not know what is said meanwhile."""
        if conversation and self.session.generations.find(owner, conversation):
            raise Busy("The last message is still being answered. Wait for the end, or press Stop.")

    def begin(
        self, request: gr.Request, owner: str, conversation: str, preferences: Preferences
    ) -> Updates:
        """Begin an answer; what that changes on the page that asked for it."""
        self.session.viewing[request.session_hash or ""] = conversation
        self.session.generations.start(owner, conversation, preferences)
        return {
            **shown(self.session, self.parts, request, owner, conversation),
            self.parts.proof: "",
        }
