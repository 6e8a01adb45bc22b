"""`python -m tests.support.mutate`: breaks single lines of the code, one at a time, and says which
of the breaks no test misses.

Each is made in a copy of the tree and must make one of its own tests fail; if none of these does,
all quick tests are asked. Give parts of paths to try those files alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-x", "-qq", "-p", "no:cacheprovider", "--tb", "no"]
ANY_OWNER = "(owner = ? OR 1)"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A line, or a part of one, that is said otherwise, and the tests that should notice.

    `tests` are parts of paths below tests/, without `test_`.
    """

    path: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "engine/decode.py",
        "backend.accept(rows[: len(emitted) - 1])",
        "backend.accept(rows[: len(emitted)])",
        "unit/decode unit/toy exhaustive/lossless",
    ),
    Mutation(
        "engine/decode.py",
        "elif start + i + 1 >= self.limit:",
        "elif start + i >= self.limit:",
        "unit/decode",
    ),
    Mutation(
        "engine/rounds.py",
        "return [Scored(each, seconds) for each in scores]",
        "return [Scored(each, seconds) for each in reversed(scores)]",
        "unit/crowd",
    ),
    Mutation(
        "engine/queue.py",
        "len(self.running) >= self.parallel",
        "len(self.running) > self.parallel",
        "unit/crowd",
    ),
    Mutation(
        "engine/decode.py",
        "if not self.filled.complete or (not self.index and cancelled()):",
        "if not self.index and answer.cancelled():",
        "unit/decode",
    ),
    Mutation(
        "engine/verify.py",
        "np.maximum(rest, 0.0, out=rest)",
        "np.abs(rest, out=rest)",
        "unit/verify",
    ),
    Mutation(
        "engine/verify.py",
        "self.random.random() < share",
        "0.5 < share",
        "unit/verify",
    ),
    Mutation(
        "engine/sampling.py",
        "places = np.flatnonzero(warped >= max(floor, reached - LARGEST - slack))",
        "places = np.flatnonzero(warped >= max(floor, reached - LARGEST / 2))",
        "unit/sampling",
    ),
    Mutation(
        "engine/backends/base.py",
        "if row not in self.choices:",
        "if True:",
        "unit/scores",
    ),
    Mutation(
        "engine/backends/device_scores.py",
        'return token if self.kind == "cut" or score > rest + 2 * wrong else None',
        "return token",
        "backends/device_scores",
    ),
    Mutation(
        "engine/sampling.py",
        "return split(split(seed, 0), position)",
        "return split(seed, position)",
        "unit/sampling",
    ),
    Mutation(
        "engine/sampling.py",
        "kept = warped if floor == -np.inf else warped[warped >= floor]",
        "kept = warped",
        "unit/sampling",
    ),
    Mutation(
        "engine/tree.py",
        "if parent in excluded or ends or (parent in branched and count == leaves):",
        "if parent in excluded or ends or count == leaves:",
        "unit/tree",
    ),
    Mutation("engine/tree.py", "self.distributions.pop(row, None)", "pass", "unit/tree"),
    Mutation(
        "engine/drafting/tiers.py",
        "self.extend(tokens[max(0, start - CONTEXT_KEY) : start])",
        "self.extend(tokens[start:start])",
        "unit/tiers",
    ),
    Mutation(
        "engine/drafting/tiers.py",
        "for at in range(max(start, 1), len(tokens))\n    }",
        "for at in range(max(start, 1), len(tokens) - 1)\n    }",
        "unit/tiers",
    ),
    Mutation(
        "engine/drafting/hierarchy.py",
        "matches[at].total > matches[at + 1].total",
        "matches[at].total >= matches[at + 1].total",
        "unit/hierarchy unit/compiled",
    ),
    Mutation(
        "engine/drafting/calibration.py",
        "            self.credited[strength] /= 2",
        "            self.credited[strength] /= 1",
        "unit/calibration",
    ),
    Mutation(
        "engine/drafting/budget.py", "if worth > self.worth:", "if worth >= 0:", "unit/budget"
    ),
    Mutation(
        "engine/drafting/controller.py",
        "paid = min(gain.debt, max(saved, 0.0))",
        "paid = 0.0",
        "unit/controller unit/never_slower",
    ),
    Mutation(
        "engine/drafting/controller.py",
        "return round(-saved / share)",
        "return PROBE",
        "unit/controller unit/never_slower",
    ),
    Mutation(
        "engine/hsd/family.py", "self.cached = text[:-1]", "self.cached = list(text)", "unit/stack"
    ),
    Mutation(
        "engine/hsd/family.py",
        "return self.tokens / step > budget.worth",
        "return self.tokens / step < budget.worth",
        "unit/stack",
    ),
    Mutation(
        "engine/streams.py",
        "self._over, self._error = True, arrived.error",
        "self._over, self._error = True, None",
        "unit/streams",
    ),
    Mutation(
        "engine/streams.py",
        "if not self._closed:\n            self._queue",
        "if True:\n            self._queue",
        "unit/streams",
    ),
    Mutation(
        "engine/queue.py",
        "any(not run.shares for run in self.running)",
        "False",
        "unit/queue",
    ),
    Mutation(
        "engine/queue.py",
        "before[run.owner], last, at",
        "before[run.owner], 0, at",
        "unit/queue",
    ),
    Mutation(
        "engine/queue.py",
        "run.priority or (current.background and not run.background)",
        "True",
        "unit/queue",
    ),
    Mutation(
        "engine/loaded.py",
        "place[0] not in {*self.using, places[-1][0]}",
        "place != places[-1]",
        "unit/sequences",
    ),
    Mutation(
        "storage/conversations.py",
        '"conversation WHERE messages.id = ? AND owner = ?",',
        f'"conversation WHERE messages.id = ? AND {ANY_OWNER}",',
        "unit/conversations",
    ),
    Mutation(
        "storage/conversations.py",
        '"WHERE conversation = conversations.id)) WHERE id = ? AND owner = ? RETURNING revision"',
        f'"WHERE conversation = conversations.id)) WHERE id = ? AND {ANY_OWNER} "\n'
        '            "RETURNING revision"',
        "unit/conversations",
    ),
    Mutation(
        "storage/traces.py",
        "WHERE runs.id = ? AND owner = ?",
        f"WHERE runs.id = ? AND {ANY_OWNER}",
        "unit/traces",
    ),
    Mutation(
        "storage/traces.py",
        '"AND NOT EXISTS (SELECT 1 FROM messages WHERE run = runs.id)"',
        '"AND 1"',
        "unit/traces unit/conversations",
    ),
    Mutation(
        "app/http/access.py",
        'site not in ("same-origin", "none")',
        'site not in ("same-origin", "same-site", "none")',
        "web/access",
    ),
    Mutation(
        "app/http/access.py", 'if found is None or ".." in path:', "if found is None:", "web/access"
    ),
    Mutation(
        "app/http/access.py",
        "if int(length) > longest:",
        "if int(length) > longest + MEGABYTE:",
        "web/access",
    ),
    Mutation(
        "app/service/answering.py",
        "fresh and (text or self.message_id)",
        "fresh",
        "service/answering service/session",
    ),
    Mutation(
        "app/service/answering.py",
        "                ids = self.write(run, fresh, text)",
        "                self.stored = len(run.steps)\n"
        "                ids = self.write(run, fresh, text)",
        "service/answering service/session",
    ),
)


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The file's text with the mutation. Raises ValueError where it applies to no one place."""
    text = (root / mutation.path).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.path} has not exactly one {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def files_of(mutation: Mutation) -> list[str]:
    """The files of the tests that should notice."""
    return [f"tests/{name.replace('/', '/test_')}.py" for name in mutation.tests.split()]


def copied(folder: Path) -> Path:
    """A copy of the files of this checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def fails(folder: Path, *tests: str) -> bool:
    """Whether one of the tests fails."""
    # A file that changes twice in a second would be taken from its compiled form.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*PYTEST, *tests], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    # 2: workers were ended because a test had failed.
    assert done.returncode in (0, 1, 2), done.stdout + done.stderr
    return done.returncode > 0


def caught(mutation: Mutation, folder: Path) -> str:
    """Which tests notice a mutation, "" for none."""
    file = folder / mutation.path
    before = file.read_text(encoding="utf-8")
    file.write_text(mutated(mutation, folder), encoding="utf-8")
    try:
        if fails(folder, "-p", "no:xdist", *files_of(mutation)):
            return "its own tests"
        others = "-n logical --maxprocesses 4 --deselect tests/unit/test_mutations.py"
        missed = not fails(folder, *others.split(), "tests/unit", "tests/service")
        return "" if missed else "quick tests"
    finally:
        file.write_text(before, encoding="utf-8")


def main(parts: Sequence[str]) -> int:
    """Try the mutations of files whose paths hold one of the parts, of all where none is given."""
    survived = 0
    chosen = [m for m in MUTATIONS if not parts or any(part in m.path for part in parts)]
    with tempfile.TemporaryDirectory() as place:
        folder = copied(Path(place))
        near = sorted({name for mutation in chosen for name in files_of(mutation)})
        if fails(folder, "-p", "no:xdist", *near):
            raise SystemExit("These tests fail without a mutation: mend that first.")
        for number, mutation in enumerate(chosen, 1):
            by = caught(mutation, folder)
            survived += not by
            said = f"caught by {by}" if by else "SURVIVED"
            change = " ".join(f"{mutation.old} -> {mutation.new}".split())
            print(f"{number:2}/{len(chosen)} {said:24} {mutation.path}: {change}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} were caught.")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
