"""What tests of the service share: a session over a toy that waits when it is told to."""

import pytest

from app.service.session import Session
from engine.local import Local
from storage.database import Database
from storage.drafting import DraftingStore
from tests.support.inside import Held
from tests.support.quick import each_step, quick
from tests.support.shop import shop

__all__ = ["each_step", "quick", "shop"]


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy, store=DraftingStore(db)), db)
