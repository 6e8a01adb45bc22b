"""The one object that the tabs talk to: the engine and the stores, with all that works on them.

Everything is scoped by owner. Each part is made here and given what it needs, and none of them
knows the session: tabs ask the part whose work it is.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from app.service.answering import Answering
from app.service.attachments import Attachments
from app.service.background import Background
from app.service.benchmark import BenchmarkRuns
from app.service.chat import Chat
from app.service.costs import Costs
from app.service.current import Current
from app.service.downloads import Downloads
from app.service.draft_models import Stacks
from app.service.entries import Entries
from app.service.gauge import Gauge
from app.service.generation import Generations
from app.service.gguf_support import GgufSupport
from app.service.history import History
from app.service.latest import Latest
from app.service.learned import PastAnswersStore
from app.service.lending import Lending
from app.service.models import Models
from app.service.notices import Notices
from app.service.presets import Presets
from app.service.programs import Programs
from app.service.proofs import Proofs
from app.service.race import Races
from app.service.revival import Revival, end_hung
from app.service.statistics_files import StatisticsFiles
from app.service.stores import Stores
from app.service.tasks import Tasks
from app.service.titles import Titles
from app.service.watches import Watches
from app.service.why import Why
from engine.backends.base import BackendInfo
from engine.engine import Engine, State
from engine.loaded import NO_MODEL_INFO
from engine.models.loaders import MODEL_LOADERS, ModelLoaders
from engine.queue import OWNER
from storage.database import Database


class Session:
    """See the module's docstring. `guests` means that others may come in: they only chat.

    `loaders` finds models; `folders` and `coming` are what `Current` is given.
    """

    def __init__(
        self,
        engine: Engine,
        database: Database,
        guests: bool = False,
        loaders: ModelLoaders = MODEL_LOADERS,
        folders: Sequence[Path] = (),
        coming: BackendInfo = NO_MODEL_INFO,
    ) -> None:
        self.engine, self.database, self.guests = engine, database, guests
        # what pages show: the conversation, the messages drawn by now (see `chat_view.Drawn`), and
        # a digest of the list of conversations
        self.viewing: Latest[str, str | None] = Latest()
        self.drawn: Latest[str, tuple[tuple[str, int], ...]] = Latest()
        self.listed: Latest[str, str] = Latest()
        # what is known and stored
        self.notices = Notices()
        self.current = Current(engine, folders, coming)
        self.past_answers = PastAnswersStore(
            database, self.notices, partial(engine.forget, past=True)
        )
        self.costs = Costs(engine, database)
        self.stores = Stores(engine, database, self.notices, self.past_answers, self.costs)
        self.history = History(database, self.notices)
        # models
        self.tasks = Tasks(partial(end_hung, engine))
        self.stacks = Stacks(engine, database, loaders)
        self.presets = Presets(database, self.current, self.stacks)
        self.models = Models(engine, database, self.stacks, self.costs, loaders, guests)
        self.gguf = GgufSupport(guests)
        self.lending = Lending(engine, self.models, self.stacks, self.tasks, self.tell)
        self.revival = Revival(engine, self.stacks, self.models, self.tell, self.lending.gate)
        self.statistics_files = StatisticsFiles(
            engine, self.current, guests, lambda: bool(self.tasks.known)
        )
        self.entries = Entries(engine, database, self.current, self.past_answers)
        # what is done with them
        self.chat = Chat(engine, database, self.tasks, self.history, self.revival)
        self.titles = Titles(
            engine, self.tasks, self.chat.conversations, self.stores, self.lending.gate
        )
        self.downloads = Downloads()
        self.attachments = Attachments()
        self.gauge = Gauge(engine, self.chat, self.tasks)
        self.answering = Answering(
            engine,
            self.tasks,
            self.current,
            self.stacks,
            self.chat,
            self.stores,
            self.history,
            self.notices,
            self.revival,
        )
        self.proofs = Proofs(
            engine,
            self.tasks,
            self.current,
            self.stacks,
            self.stores,
            self.history,
            self.notices,
            self.revival,
            self.lending,
        )
        self.background = Background(self.proofs)
        self.chat.deleted = self.background.forget
        checked = self.background.checking(self.answering.answer)
        self.generations = Generations(checked, self.tasks.wanted)
        self.benchmarks = BenchmarkRuns(
            engine,
            database,
            self.tasks,
            self.current,
            self.stacks,
            self.stores,
            self.notices,
            self.revival,
            guests,
        )
        self.watches = Watches()
        self.programs = Programs(
            engine,
            database,
            self.tasks,
            self.current,
            self.stacks,
            self.stores,
            self.lending.gate,
            guests,
        )
        self.races = Races(self.proofs, self.current)
        self.why = Why(database, self.current)
        engine.watch = self.follow
        self.follow(engine.state)

    def follow(self, state: State) -> None:
        """Another model is there, or other draft models are."""
        self.current.follow(state)
        self.revival.follow(state)
        self.stacks.follow(state)

    def tell(self, notice: str) -> None:
        """A notice for whoever has used the app by now."""
        users = [*list(self.history.last), *list(self.tasks.known)]
        for owner in {OWNER, *(owner for owner, _ in users)}:
            self.notices.report(owner, notice)

    @staticmethod
    def owner(username: str | None, browser: str | None) -> str:
        """Whose data it is. Guests share a password, so their browser tells them apart."""
        return "local" if username is None else f"{username}:{browser or ''}"
