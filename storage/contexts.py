"""The context tier's store: per conversation and tokenizer, the log of all token ids seen in it.

The log keeps what the conversation no longer shows, regenerated and edited-away text included,
because such text tends to come back. It is stored as chunks that are never rewritten: to append
costs the new tokens, and the oldest chunks are dropped whole.
"""

from collections.abc import Sequence

from storage.conversations import Conversations
from storage.database import Database, pack_tokens, unpack_tokens


class ContextStore:
    """The token logs of one owner's conversations.

    Every method raises `StorageError` for a conversation this owner does not have.
    """

    CAP = 262_144
    """The most tokens a log gives back; what is older is forgotten."""
    CHUNK = 8_192
    """The most tokens in a row, and so the most by which a log exceeds its cap on disk."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)

    def load(self, conversation_id: str, fingerprint: str) -> list[int]:
        """The newest `CAP` tokens of the log, oldest first; empty when nothing was appended.

        A damaged chunk is passed over: it costs drafts, not the conversation.
        """
        key = self._key(conversation_id, fingerprint)
        rows = self._db.execute_read(
            "SELECT tokens FROM contexts WHERE conversation = ? AND fingerprint = ? ORDER BY start",
            key,
        )
        blobs = [blob for (blob,) in rows if isinstance(blob, bytes) and len(blob) % 4 == 0]
        return [token for blob in blobs for token in unpack_tokens(blob)][-self.CAP :]

    def append(self, conversation_id: str, fingerprint: str, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the log, and drop the chunks that lie wholly before the cap."""
        with self._db.write() as handle:
            key = self._key(conversation_id, fingerprint)
            start = self._end(key)
            for offset in range(0, len(tokens), self.CHUNK):
                chunk = pack_tokens(tokens[offset : offset + self.CHUNK])
                handle.execute(
                    "INSERT INTO contexts (conversation, fingerprint, start, tokens) "
                    "VALUES (?, ?, ?, ?)",
                    (*key, start + offset, chunk),
                )
            oldest = start + len(tokens) - self.CAP
            handle.execute(
                "DELETE FROM contexts WHERE conversation = ? AND fingerprint = ? AND start < ? "
                "AND start + length(tokens) / 4 <= ?",
                (*key, oldest, oldest),
            )

    def size(self, conversation_id: str, fingerprint: str) -> int:
        """The number of tokens `load` would give."""
        key = self._key(conversation_id, fingerprint)
        (first,) = self._db.execute_read(
            "SELECT coalesce(min(start), 0) FROM contexts WHERE conversation = ? "
            "AND fingerprint = ?",
            key,
        )[0]
        return min(self.CAP, self._end(key) - int(first))

    def clear(self, conversation_id: str) -> None:
        """Forget the conversation's logs, of every tokenizer."""
        self._conversations.get(conversation_id)
        with self._db.write() as handle:
            handle.execute("DELETE FROM contexts WHERE conversation = ?", [conversation_id])

    def _key(self, conversation_id: str, fingerprint: str) -> tuple[str, int]:
        """The log's key, after making sure that the conversation is this owner's."""
        self._conversations.get(conversation_id)
        return conversation_id, self._db.key("fingerprints", fingerprint)

    def _end(self, key: tuple[str, int]) -> int:
        """Where the next token goes: how many were ever appended."""
        rows = self._db.execute_read(
            "SELECT start + length(tokens) / 4 FROM contexts WHERE conversation = ? "
            "AND fingerprint = ? ORDER BY start DESC LIMIT 1",
            key,
        )
        return int(rows[0][0]) if rows else 0
