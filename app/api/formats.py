"""The parameters that demand a format of an answer: those of OpenAI, llama.cpp's server and vLLM.

All of them become one `AnswerFormat`. Only one may be given.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from app.http.problems import refused
from engine.constraint import grammar_of
from engine.errors import SettingError
from engine.settings import ANY_OBJECT, AnswerFormat
from engine.tools import as_json
from storage.validation import Outside, refusal

MOST_OPTIONS = 4096


def json_of(value: Any) -> Any:
    """A schema as text: some programs send it as text already. An empty one is none."""
    return (as_json(value) if value else "") if isinstance(value, dict) else value


Schema = Annotated[
    str | None, BeforeValidator(json_of), Field(default=None, description="a JSON schema")
]
Options = Annotated[
    list[str] | None,
    Field(default=None, max_length=MOST_OPTIONS, description="a list of texts to choose from"),
]


class NamedSchema(Outside):
    schema_: Schema = Field(default=None, alias="schema", description="a JSON schema")


class ResponseFormat(Outside):
    """`place` is where the schema stands."""

    place: ClassVar[str] = "response_format.json_schema.schema"
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema = Field(default=None, alias="schema", description="a JSON schema")

    @model_validator(mode="after")
    def has_schema(self) -> Self:
        if self.type == "json_schema" and self.given is None:
            raise refusal(f"{self.place} is missing. Give a JSON schema.")
        return self

    @property
    def given(self) -> str | None:
        return self.schema_ if self.json_schema is None else self.json_schema.schema_

    @property
    def schema_text(self) -> str | None:
        return None if self.type == "text" else self.given or ANY_OBJECT


class StructuredOutputs(Outside):
    """The present form of vLLM."""

    json_: Schema = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Options = None
    grammar: str | None = None
    json_object: bool = False


class Formats(Outside):
    """The parameters, as fields of a request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Options = None
    guided_grammar: str | None = None
    json_schema: Schema = None
    grammar: str | None = None

    @property
    def form(self) -> AnswerFormat | None:
        """The format of the answer, None for any text. Raises ApiError."""
        present, structured = self.response_format, self.structured_outputs
        given: list[tuple[str, str, Any]] = [
            ("response_format", "json_schema", present and present.schema_text),
            ("structured_outputs", "json_schema", structured.json_),
            ("structured_outputs", "json_schema", structured.json_object and ANY_OBJECT),
            ("structured_outputs", "regex", structured.regex),
            ("structured_outputs", "choice", structured.choice),
            ("structured_outputs", "gbnf", structured.grammar),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "gbnf", self.guided_grammar),
            ("json_schema", "json_schema", self.json_schema),
            ("grammar", "gbnf", self.grammar),
        ]
        found = [(name, usable(name, kind, value)) for name, kind, value in given if value]
        if len(found) > 1:
            both = " and ".join(dict.fromkeys(name for name, _ in found))
            message = f"Only one format can be demanded, not {both}. Leave one out."
            raise refused(message, found[-1][0])
        return found[0][1] if found else None


def usable(name: str, kind: str, value: Any) -> AnswerFormat:
    """The format that a parameter demands. Raises ApiError if it cannot be used."""
    try:
        form = AnswerFormat(kind, as_json(value) if kind == "choice" else value)
        grammar_of(form)
    except SettingError as error:
        raise refused(str(error), name) from error
    return form
