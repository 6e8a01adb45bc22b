"""The schema, as the list of scripts that led to it. The list is append-only: never edit an entry.

A database records the scripts it has had in its table `migrations`, so one of any age is brought
up to date by running the rest. `python -m storage.migrations` prints the resulting schema.
"""

import re
from functools import lru_cache

import sqlite_utils

from engine.errors import StorageError

MIGRATIONS: tuple[tuple[str, str], ...] = (
    (
        "0001-conversations",
        """
CREATE TABLE owners (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);
CREATE TABLE fingerprints (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    owner INTEGER NOT NULL REFERENCES owners(id),
    title TEXT NOT NULL,
    system_prompt TEXT NOT NULL DEFAULT '',
    settings TEXT NOT NULL DEFAULT '{}',
    created REAL NOT NULL,
    updated REAL NOT NULL
);
CREATE INDEX conversations_recent ON conversations(owner, updated);
CREATE TABLE contexts (
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    start INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    PRIMARY KEY (conversation, fingerprint, start)
);
""",
    ),
    (
        "0002-runs",
        """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation TEXT REFERENCES conversations(id) ON DELETE CASCADE,
    kind TEXT NOT NULL CHECK (kind IN ('chat', 'compare')),
    model TEXT NOT NULL,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    method TEXT NOT NULL,
    settings TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    emitted_tokens INTEGER NOT NULL,
    reused_tokens INTEGER NOT NULL,
    ttft_seconds REAL NOT NULL,
    decode_seconds REAL NOT NULL,
    forwards INTEGER NOT NULL,
    finish TEXT,
    baseline_tokens_per_second REAL,
    created REAL NOT NULL
);
CREATE INDEX runs_recent ON runs(owner, created);
CREATE INDEX runs_conversation ON runs(conversation);
CREATE TABLE steps (
    run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    tokens TEXT NOT NULL,
    proposed TEXT NOT NULL,
    accepted TEXT NOT NULL,
    by_depth TEXT NOT NULL,
    look_ups TEXT NOT NULL,
    draft_seconds REAL NOT NULL,
    verify_seconds REAL NOT NULL,
    sample_seconds REAL NOT NULL,
    other_seconds REAL NOT NULL,
    finish TEXT,
    PRIMARY KEY (run, position)
) WITHOUT ROWID;
""",
    ),
    (
        "0003-messages",
        """
CREATE TABLE messages (
    id TEXT PRIMARY KEY,
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    content TEXT NOT NULL,
    run TEXT REFERENCES runs(id) ON DELETE SET NULL,
    created REAL NOT NULL,
    pieces TEXT,
    UNIQUE (conversation, position)
);
CREATE INDEX messages_run ON messages(run);
""",
    ),
    (
        "0004-ngrams",
        """
CREATE TABLE answers (
    owner INTEGER NOT NULL REFERENCES owners(id),
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    learned INTEGER NOT NULL,
    PRIMARY KEY (owner, fingerprint)
) WITHOUT ROWID;
CREATE TABLE ngrams (
    owner INTEGER NOT NULL,
    fingerprint INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    documents INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    PRIMARY KEY (owner, fingerprint, tokens),
    FOREIGN KEY (owner, fingerprint) REFERENCES answers(owner, fingerprint) ON DELETE CASCADE
) WITHOUT ROWID;
""",
    ),
    (
        "0005-calibrations-and-costs",
        """
CREATE TABLE calibrations (
    owner INTEGER NOT NULL REFERENCES owners(id),
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    tier TEXT NOT NULL,
    match_length INTEGER NOT NULL,
    strength INTEGER NOT NULL,
    reached REAL NOT NULL,
    trusted REAL NOT NULL,
    PRIMARY KEY (owner, fingerprint, tier, match_length, strength)
) WITHOUT ROWID;
CREATE TABLE costs (
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    kind TEXT NOT NULL,
    device TEXT NOT NULL,
    dtype TEXT NOT NULL,
    threads INTEGER NOT NULL,
    points TEXT NOT NULL,
    node REAL NOT NULL,
    other REAL NOT NULL,
    measured REAL NOT NULL,
    PRIMARY KEY (fingerprint, kind, device, dtype, threads)
) WITHOUT ROWID;
""",
    ),
    (
        "0006-stacks",
        """
CREATE TABLE profiles (
    id INTEGER PRIMARY KEY,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    drafts TEXT NOT NULL,
    sampling TEXT NOT NULL,
    machine TEXT NOT NULL,
    profile TEXT NOT NULL,
    UNIQUE (fingerprint, drafts, sampling, machine)
);
CREATE TABLE stacks (
    fingerprint INTEGER PRIMARY KEY REFERENCES fingerprints(id),
    sources TEXT NOT NULL,
    spec TEXT NOT NULL
);
ALTER TABLE steps ADD COLUMN levels TEXT NOT NULL DEFAULT '{}';
""",
    ),
    (
        "0007-sources",
        """
CREATE TABLE sources (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('model', 'folder')),
    name BLOB NOT NULL,
    runtime TEXT NOT NULL,
    UNIQUE (kind, name)
);
""",
    ),
    (
        # The plain speed stored with a run was that of another prompt under another machine load.
        "0008-speedups",
        """
ALTER TABLE runs DROP COLUMN baseline_tokens_per_second;
ALTER TABLE runs ADD COLUMN speedup REAL;
ALTER TABLE runs ADD COLUMN decode_speedup REAL;
""",
    ),
    (
        # What a run took is stored as it was measured, and an answer's tokens once: in its steps.
        # A message keeps pieces of its own where it has no run, or one that says something else.
        "0009-one-run",
        """
ALTER TABLE runs ADD COLUMN prefill_seconds REAL NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN plain_prefill_seconds REAL;
ALTER TABLE runs ADD COLUMN learning_seconds REAL;
UPDATE runs SET prefill_seconds = max(0.0, ttft_seconds - coalesce((
    SELECT draft_seconds + verify_seconds + sample_seconds + other_seconds
    FROM steps WHERE run = runs.id ORDER BY position LIMIT 1
), 0.0));
ALTER TABLE runs DROP COLUMN ttft_seconds;
ALTER TABLE runs DROP COLUMN finish;
ALTER TABLE steps ADD COLUMN plain_seconds REAL;
UPDATE messages SET pieces = NULL WHERE run IS NOT NULL AND (
    SELECT json_group_array(json_array(
        json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
        json_extract(value, '$[3]'), json_extract(value, '$[4]')
    ))
    FROM json_each(CASE WHEN typeof(pieces) = 'text' AND json_valid(pieces) THEN pieces END)
    WHERE type = 'array'
) = (
    SELECT json_group_array(json_array(
        json_extract(value, '$[4]'), json_extract(value, '$[2]'), json_extract(value, '$[3]'),
        position, json_extract(value, '$[1]')
    ))
    FROM (SELECT position, tokens FROM steps WHERE run = messages.run ORDER BY position),
    json_each(CASE WHEN typeof(tokens) = 'text' AND json_valid(tokens) THEN tokens END)
    WHERE type = 'array'
);
""",
    ),
    (
        "0010-costs-of-cached-tokens",
        """
ALTER TABLE costs ADD COLUMN token REAL NOT NULL DEFAULT 0;
ALTER TABLE costs ADD COLUMN row REAL NOT NULL DEFAULT 0;
""",
    ),
    (
        # Messages become a tree: each follows its parent, and of those that follow the same one the
        # one with the largest number in `chosen` is shown. Conversations so far are one path.
        "0011-tree",
        """
ALTER TABLE conversations ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN parent TEXT;
ALTER TABLE messages ADD COLUMN chosen INTEGER NOT NULL DEFAULT 0;
UPDATE messages SET parent = (
    SELECT id FROM messages AS earlier
    WHERE earlier.conversation = messages.conversation AND earlier.position < messages.position
    ORDER BY earlier.position DESC LIMIT 1
);
UPDATE conversations SET revision = coalesce((
    SELECT max(position) FROM messages WHERE conversation = conversations.id
), 0);
CREATE INDEX messages_tree ON messages(conversation, position, id, parent, chosen);
CREATE TABLE deletions (
    token TEXT PRIMARY KEY,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation TEXT NOT NULL,
    place TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    created REAL NOT NULL
);
CREATE INDEX deletions_place ON deletions(place);
CREATE TABLE parts (
    run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    model TEXT NOT NULL,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    method TEXT NOT NULL,
    settings TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    reused_tokens INTEGER NOT NULL,
    prefill_seconds REAL NOT NULL,
    plain_prefill_seconds REAL,
    created REAL NOT NULL,
    PRIMARY KEY (run, position)
) WITHOUT ROWID;
CREATE TABLE prompts (
    run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    PRIMARY KEY (run, position)
) WITHOUT ROWID;
""",
    ),
    (
        # A key itself is not stored: who reads this file cannot use it.
        "0012-api-keys",
        """
CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    created REAL NOT NULL,
    used REAL
);
CREATE TABLE switches (
    name TEXT PRIMARY KEY,
    is_on INTEGER NOT NULL
);
""",
    ),
    (
        "0013-benchmarks",
        """
CREATE TABLE benchmarks (
    id TEXT PRIMARY KEY,
    owner INTEGER NOT NULL REFERENCES owners(id),
    title TEXT NOT NULL,
    model TEXT NOT NULL,
    fingerprint INTEGER NOT NULL REFERENCES fingerprints(id),
    machine TEXT NOT NULL,
    version TEXT NOT NULL,
    asked TEXT NOT NULL,
    plan TEXT NOT NULL,
    runs INTEGER NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX benchmarks_recent ON benchmarks(owner, created);
CREATE TABLE questions (
    benchmark TEXT NOT NULL REFERENCES benchmarks(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    category TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (benchmark, position)
) WITHOUT ROWID;
CREATE TABLE results (
    benchmark TEXT NOT NULL REFERENCES benchmarks(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    method TEXT NOT NULL,
    repeat INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    forwards INTEGER NOT NULL,
    drafted INTEGER NOT NULL,
    kept INTEGER NOT NULL,
    prefill_seconds REAL NOT NULL,
    first_seconds REAL NOT NULL,
    decode_seconds REAL NOT NULL,
    learning_seconds REAL NOT NULL,
    disturbed INTEGER NOT NULL,
    problem TEXT NOT NULL,
    answer BLOB NOT NULL,
    PRIMARY KEY (benchmark, position, method, repeat)
) WITHOUT ROWID;
""",
    ),
    (
        # What new conversations begin with; how fast models are, to choose between two formats.
        "0014-presets-and-speeds",
        """
CREATE TABLE presets (
    id TEXT PRIMARY KEY,
    owner INTEGER NOT NULL REFERENCES owners(id),
    name TEXT NOT NULL,
    system_prompt TEXT NOT NULL,
    settings TEXT NOT NULL,
    created REAL NOT NULL,
    UNIQUE (owner, name)
);
CREATE TABLE model_presets (
    owner INTEGER NOT NULL REFERENCES owners(id),
    source BLOB NOT NULL,
    preset TEXT NOT NULL,
    PRIMARY KEY (owner, source)
) WITHOUT ROWID;
CREATE TABLE speeds (
    source BLOB PRIMARY KEY,
    library TEXT NOT NULL,
    tokens_per_second REAL NOT NULL,
    measured REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE choices (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
""",
    ),
    (
        # The drafted trees, and sums that describe an answer in one sentence. A step without
        # tokens was cancelled and is not counted.
        "0015-why",
        """
ALTER TABLE steps ADD COLUMN tree BLOB;
ALTER TABLE runs ADD COLUMN accepted_tokens INTEGER;
ALTER TABLE runs ADD COLUMN plain_seconds REAL;
ALTER TABLE runs ADD COLUMN proof TEXT;
UPDATE runs SET (accepted_tokens, plain_seconds) = (
    SELECT
        CAST(total((
            SELECT total(value) FROM json_each(
                CASE WHEN typeof(accepted) = 'text' AND json_valid(accepted) THEN accepted END
            ) WHERE type = 'integer'
        )) AS INTEGER),
        CASE WHEN count(plain_seconds) = count(*) THEN sum(plain_seconds) END
    FROM steps WHERE run = runs.id AND tokens != '[]'
);
""",
    ),
    (
        # Where a conversation stands in the list.
        "0016-folders",
        """
ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN folder TEXT NOT NULL DEFAULT '';
""",
    ),
    (
        # Plain forwards were taken for slower than they are: all that followed drafts counted. They
        # are measured again with the next load.
        "0017-costs-measured-again",
        """
DELETE FROM costs;
""",
    ),
    (
        # Speeds are of whole answers, plain and with drafts. Those of plain decoding alone chose a
        # format that drafts cannot make faster. Costs are measured again: on a busy machine drafts
        # were taken for cheaper than they are.
        "0018-speeds-with-drafts",
        """
DELETE FROM costs;
DELETE FROM speeds;
ALTER TABLE speeds ADD COLUMN drafted REAL NOT NULL DEFAULT 0;
""",
    ),
    (
        # How often an owner's past answers were wiped: what an answer taught that began before a
        # wipe is not stored after it.
        "0019-wipes",
        """
ALTER TABLE owners ADD COLUMN wipes INTEGER NOT NULL DEFAULT 0;
""",
    ),
    (
        # The last row of `contexts` when an owner's past answers were wiped: what had been said
        # until then is not copied in other conversations any more.
        "0020-wiped-texts",
        """
ALTER TABLE owners ADD COLUMN wiped INTEGER NOT NULL DEFAULT 0;
""",
    ),
    (
        # The servers whose tools the model may call, each with the tools that it listed.
        "0021-tool-servers",
        """
CREATE TABLE tool_servers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    address TEXT NOT NULL,
    tools TEXT NOT NULL DEFAULT '[]'
);
""",
    ),
    (
        # A message may be the result of a tool. SQLite cannot change a check, so the table is
        # made again.
        "0022-results-of-tools",
        """
CREATE TABLE messages_with_results (
    id TEXT PRIMARY KEY,
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant', 'tool')),
    content TEXT NOT NULL,
    run TEXT REFERENCES runs(id) ON DELETE SET NULL,
    created REAL NOT NULL,
    pieces TEXT,
    parent TEXT,
    chosen INTEGER NOT NULL DEFAULT 0,
    UNIQUE (conversation, position)
);
INSERT INTO messages_with_results
SELECT id, conversation, position, role, content, run, created, pieces, parent, chosen
FROM messages;
DROP TABLE messages;
ALTER TABLE messages_with_results RENAME TO messages;
CREATE INDEX messages_run ON messages(run);
CREATE INDEX messages_tree ON messages(conversation, position, id, parent, chosen);
""",
    ),
    (
        "0023-answers-at-once",
        """
ALTER TABLE steps ADD COLUMN beside INTEGER NOT NULL DEFAULT 0;
""",
    ),
    (
        # Environment variables of a server of tools, or headers if it is reached over HTTP, and
        # what it granted at a login.
        "0024-settings-of-tool-servers",
        """
ALTER TABLE tool_servers ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
ALTER TABLE tool_servers ADD COLUMN login TEXT NOT NULL DEFAULT '{}';
""",
    ),
)


def apply(handle: sqlite_utils.Database, name: str = "The database") -> None:
    """Bring a database up to date, inside the caller's transaction; errors call it `name`.

    Raises `StorageError` for a database of another program or of a newer version of this one:
    neither is touched.
    """
    tables = handle.table_names()
    if tables and "migrations" not in tables:
        raise StorageError(
            f"{name} holds tables of another program ({', '.join(tables[:3])}). "
            "Choose another data directory, or move that file away."
        )
    handle.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
    applied = {entry for (entry,) in handle.execute("SELECT name FROM migrations")}
    unknown = applied - {entry for entry, _ in MIGRATIONS}
    if unknown:
        raise StorageError(
            f"{name} was written by a newer version ({min(unknown)!r} is not known here). "
            "Update the program, or choose another data directory."
        )
    for entry, script in MIGRATIONS:
        if entry not in applied:
            handle.executescript(script)
            handle.execute("INSERT INTO migrations (name) VALUES (?)", [entry])


def damage(handle: sqlite_utils.Database) -> str | None:
    """What is damaged in the schema of one of our files, even if SQLite accepts it.

    None if the schema is what our migrations make, and for a file of another program or of a newer
    version, which `apply` refuses. Additional tables are ignored.
    """
    tables = set(handle.table_names())
    ours = {name for kind, name in schema_of(MIGRATIONS) if kind == "table"}
    if "migrations" not in tables:
        return "its list of migrations is missing" if tables & ours else None
    applied = {entry for (entry,) in handle.execute("SELECT name FROM migrations")}
    names = [entry for entry, _ in MIGRATIONS]
    known = [entry for entry in names if entry in applied]
    if known != names[: len(known)] or (len(known) < len(names) and len(known) < len(applied)):
        return "its list of migrations is damaged"
    if len(known) < len(applied):
        return None
    found = statements(handle)
    for key, statement in schema_of(MIGRATIONS[: len(known)]).items():
        if found.get(key) != statement:
            return f"the definition of the {' '.join(key)} is damaged"
    return None


@lru_cache(maxsize=2)
def schema_of(steps: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], str]:
    """The schema of an empty file after these migrations, as `statements` returns it."""
    handle = sqlite_utils.Database(memory=True, execute_plugins=False)
    try:
        handle.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
        for _, script in steps:
            handle.executescript(script)
        return statements(handle)
    finally:
        handle.close()


def statements(handle: sqlite_utils.Database) -> dict[tuple[str, str], str]:
    """The statements of a schema, by the kind and name of what they define, without spaces and
    quotes: versions of SQLite put different ones into the statement of an altered table."""
    rows = handle.execute("SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL").fetchall()
    return {
        (str(kind), str(name)): re.sub(r'[\s"`]', "", str(statement))
        for kind, name, statement in rows
    }


def blank_schema() -> str:
    """The schema of a new database, as docs/storage.md shows it."""
    handle = sqlite_utils.Database(memory=True, execute_plugins=False)
    try:
        apply(handle)
        return handle.schema
    finally:
        handle.close()


if __name__ == "__main__":
    print(blank_schema())
