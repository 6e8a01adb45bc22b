"""Between the engine, which stores nothing, and the stores.

What it learns comes as values and is stored here, for an owner; when it asks for what it does not
know any more, it is told what is stored.
"""

from dataclasses import dataclass

from app.service.costs import Costs
from app.service.learned import PastAnswersStore
from app.service.notices import Notices
from engine.backends.base import BackendInfo
from engine.engine import (
    Calibrated,
    ContextLogged,
    CostsMeasured,
    Engine,
    NgramsLearned,
    Notice,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedPastAnswers,
)
from storage.contexts import ContextStore
from storage.database import Database


@dataclass(frozen=True, slots=True)
class Kept:
    """What an answer needs of the stores: whose it is, in which conversation, by which model, and
    how often the owner's past had been wiped when it began."""

    owner: str
    conversation: str
    info: BackendInfo
    wiped: int


@dataclass(frozen=True, slots=True)
class Stores:
    """See the module's docstring."""

    engine: Engine
    database: Database
    notices: Notices
    past_answers: PastAnswersStore
    costs: Costs

    def recall(
        self, wanted: WantedPastAnswers | WantedContextLog, owner: str, conversation_id: str
    ) -> StoredPastAnswers | StoredContextLog:
        """What the engine asks for, as it is stored."""
        if isinstance(wanted, WantedPastAnswers):
            return self.past_answers.recall(owner, wanted.fingerprint)
        store, fingerprint = ContextStore(self.database, owner), wanted.tokenizer_fingerprint
        log = self.notices.keep(owner, lambda: store.load(conversation_id, fingerprint)) or []
        return StoredContextLog(log, ContextStore.CAP)

    def save(self, learned: object, kept: Kept) -> bool:
        """Store what the engine learned; False for what is not to be stored."""
        owner, info = kept.owner, kept.info
        if isinstance(learned, ContextLogged):
            log = ContextStore(self.database, owner)
            where = kept.conversation, info.tokenizer_fingerprint
            self.notices.keep(owner, lambda: log.append(*where, learned.tokens))
        elif isinstance(learned, NgramsLearned):
            self.past_answers.learn(owner, info.fingerprint, kept.wiped, learned.grams)
            self.past_answers.prune(owner, info.fingerprint, learned.size)
        elif isinstance(learned, Calibrated):
            self.past_answers.save(owner, info.fingerprint, kept.wiped, learned.rows)
        elif isinstance(learned, CostsMeasured):
            self.notices.keep(owner, lambda: self.costs.save(learned.info, learned.costs))
        elif isinstance(learned, Notice):
            self.notices.report(owner, learned.text)
        else:
            return False
        return True

    def wipe_context(self, owner: str, conversation_id: str) -> None:
        """Forget the token log of a conversation; its messages stay."""
        ContextStore(self.database, owner).clear(conversation_id)
        self.engine.forget(owner, conversation_id)
