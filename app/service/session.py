"""The one object that the tabs use: the engine and the stores, with all parts that work on them.

No part knows the session. A tab calls the part that does the work.
"""

from app.service.answering import Answering
from app.service.attachments import Attachments
from app.service.benchmark import BenchmarkRuns
from app.service.core import Core
from app.service.databases import Entries
from app.service.gguf_support import GgufSupport
from app.service.pages import ChangeTokens, Downloads, LimitedDict
from app.service.preferences import Presets
from app.service.programs import Programs
from app.service.proofs import Background, Proofs
from app.service.race import Padded, Races
from app.service.statistics_files import StatisticsFiles
from app.service.tool_calls import ToolCalls
from app.service.ways import Ways
from app.service.why import Why
from engine.engine import State


class Session(Core):
    def __post_init__(self) -> None:
        super().__post_init__()
        engine, database, guests = self.engine, self.database, self.guests
        # what each page shows: its conversation, the messages drawn so far (see `Drawn` in
        # app/web/tabs/chat.py), and a digest of the list of conversations
        self.viewing: LimitedDict[str, str | None] = LimitedDict()
        self.drawn: LimitedDict[str, tuple[tuple[str, int], ...]] = LimitedDict()
        self.listed: LimitedDict[str, str] = LimitedDict()
        self.change_tokens = ChangeTokens()
        self.downloads = Downloads()
        self.attachments = Attachments()
        self.presets = Presets(database, self.current, self.stacks)
        self.gguf = GgufSupport(guests)
        self.statistics_files = StatisticsFiles(
            engine, self.current, guests, lambda: bool(self.tasks.known)
        )
        self.entries = Entries(engine, database, self.current, self.past_answers)
        self.why = Why(database, self.current)
        self.proofs = Proofs(self)
        self.background = Background(self.proofs)
        self.chat.deleted = self.background.forget
        self.answering = Answering(self, self.background.add)
        self.tool_calls = ToolCalls(self, self.answering)
        self.generations = self.tool_calls.generations
        self.benchmarks = BenchmarkRuns(self)
        self.padded = Padded(self.models)
        self.races = Races(self.proofs, self.padded)
        self.ways = Ways(self.proofs)
        self.programs = Programs(self)
        engine.watch, engine.notify = self.follow, self.notices.report
        self.follow(engine.state)

    def follow(self, state: State) -> None:
        self.current.follow(state)
        self.revival.follow(state)
        self.stacks.follow(state)

    @staticmethod
    def owner(username: str | None, browser: str | None) -> str:
        """The owner of a request's data. Guests share a password, so they are distinguished by
        their browser."""
        return "local" if username is None else f"{username}:{browser or ''}"
