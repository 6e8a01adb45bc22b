"""The engine, the stores, and the parts of the program that work on them for every kind of answer.

Everything is scoped by owner. Each part is created here and receives what it needs; no part knows
the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.service.chat import Chat
from app.service.current import Costs, Current
from app.service.databases import PastAnswersStore
from app.service.draft_models import Stacks
from app.service.history import History
from app.service.jobs import Tasks
from app.service.model_swap import ModelSwap
from app.service.models import Models
from app.service.pages import Notices
from app.service.revival import Revival, end_hung
from app.service.tool_servers import ToolServers
from engine.backends.base import BackendInfo
from engine.engine import CostsMeasured, Engine, Event, Notice
from engine.loaded import NO_MODEL_INFO
from engine.models.loaders import MODEL_LOADERS, ModelLoaders
from engine.queue import OWNER
from storage.database import Database


@dataclass(eq=False, repr=False)
class Core:
    """`guests` means that other people, who may only chat, can use the app. Without a `page` only
    other programs send requests. `loaders` finds models; see `Current` for `folders` and
    `coming`."""

    engine: Engine
    database: Database
    guests: bool = False
    loaders: ModelLoaders = MODEL_LOADERS
    folders: Sequence[Path] = ()
    coming: BackendInfo = NO_MODEL_INFO
    page: bool = True

    def __post_init__(self) -> None:
        engine, database, guests, loaders = self.engine, self.database, self.guests, self.loaders
        self.notices = Notices(database, engine)
        self.current = Current(engine, self.folders, self.coming)
        self.past_answers = PastAnswersStore(database, partial(engine.forget, past=True))
        self.costs = Costs(engine, database)
        self.history = History(database, self.notices)
        self.tasks = Tasks(partial(end_hung, engine))
        self.stacks = Stacks(engine, database, loaders)
        self.models = Models(engine, database, self.stacks, self.costs, loaders, guests)
        self.model_swap = ModelSwap(self.models, self.tasks, self.tell)
        self.revival = Revival(
            engine, self.models, self.tell, self.model_swap.gate, self.say, self.page
        )
        self.tool_servers = ToolServers(database, self.current, guests)
        offered = self.tool_servers.offered
        self.chat = Chat(engine, database, self.tasks, self.history, self.revival, offered)

    def tell(self, notice: str) -> None:
        """Show a notice to everyone who has used the app so far."""
        users = [*list(self.history.last), *list(self.tasks.known)]
        for owner in {OWNER, *(owner for owner, _ in users)}:
            self.notices.remember(owner, notice)
        self.say(notice)

    def say(self, notice: str) -> None:
        self.notices.say(notice)

    def take_aside(self, owner: str, event: Event) -> None:
        """Handle the other events of an answer: notices, and corrected costs."""
        if isinstance(event, Notice):
            self.notices.report(owner, event.text)
        elif isinstance(event, CostsMeasured):
            self.notices.keep(owner, partial(self.costs.save, event.info, event.costs))
