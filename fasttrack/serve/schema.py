"""Bodies of the OpenAI-compatible requests, and what they mean to the engine.

Unknown fields are refused: a parameter that would be ignored is an answer to another question. Names beyond
OpenAI's are vLLM's.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fasttrack.errors import UsageError
from fasttrack.target import Sampling

Tokens = list[Annotated[int, Field(ge=0)]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JsonSchema(_Body):
    name: str = "output"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_schema: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(_Body):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Tokens = []
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    return_tokens_as_token_ids: bool = False
    user: str | None = None  #: says nothing about the answer

    def structured(self) -> dict[str, Any] | None:
        """The engine's ``structured``; :class:`UsageError` where two grammars are asked for."""
        asked: list[dict[str, Any]] = []
        if self.response_format is not None and self.response_format.type == "json_object":
            asked.append({"json_object": True})
        elif self.response_format is not None and self.response_format.type == "json_schema":
            if self.response_format.json_schema is None:
                raise UsageError("is missing", where="response_format.json_schema", expected="a schema")
            asked.append({"json_schema": self.response_format.json_schema.schema_})
        nested = self.structured_outputs or StructuredOutputs()
        for kind, value in (
            ("json_schema", nested.json_),
            ("json_schema", nested.json_schema),
            ("json_object", nested.json_object),
            ("regex", nested.regex),
            ("json_schema", self.guided_json),
            ("regex", self.guided_regex),
        ):
            if value:
                asked.append({kind: value})
        if len(asked) > 1:
            names = ", ".join(kind for one in asked for kind in one)
            raise UsageError(f"{names} asked for at once", where="structured output", expected="one of them")
        return asked[0] if asked else None

    def sampling(self, logprobs: int | None, seed: int) -> Sampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            ignore_eos=self.ignore_eos,
            structured=self.structured(),
        )

    def seeds(self, count: int) -> list[int]:
        """One per answer; drawn where the client gave none."""
        first = self.seed if self.seed is not None else secrets.randbits(48)
        return [first + i for i in range(count)]


class CompletionBody(GenerationBody):
    prompt: str | list[str] | Tokens | list[Tokens]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False


class ChatMessage(_Body):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def as_mapping(self) -> dict[str, Any]:
        """Text parts joined; :class:`UsageError` for anything that is no text."""
        if isinstance(self.content, list):
            kinds = {part.get("type") for part in self.content}
            if kinds - {"text"}:
                raise UsageError(f"content of type {sorted(map(str, kinds))}", where="messages", expected="text")
            return {"role": self.role, "content": "".join(str(part.get("text", "")) for part in self.content)}
        return {"role": self.role, "content": self.content}


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = False


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: Tokens
