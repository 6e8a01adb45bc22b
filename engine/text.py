"""Text from outside the program: made well-formed once, where it comes in.

JSON, PDF files and browsers can hold half of a surrogate pair, which is no character: UTF-8 cannot
encode it, and neither SQLite nor a tokenizer accepts it.
"""

import json
from typing import Any


def well_formed(value: Any) -> Any:
    """A text, or a value of JSON with all its texts, without halves of surrogate pairs. Two halves
    that belong together become their character, and any other half becomes U+FFFD."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    elif isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


def read_json(content: str | bytes, **options: Any) -> Any:
    """The value of a JSON text, with well-formed texts. `options` are those of `json.loads`, which
    also says what this raises."""
    if isinstance(content, bytes):
        content = content.decode(json.detect_encoding(content), "surrogatepass")
    found = json.loads(well_formed(content), **options)
    return well_formed(found) if "\\ud" in content or "\\uD" in content else found
