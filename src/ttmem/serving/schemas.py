"""Bodies of requests. What is not known, or would change the answer and cannot be done, is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
AUTO = "auto"
"""The memory of conversations that compact themselves; no memory can have this name."""

ID = "mem-"
"""How ids begin; names do not."""

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class AnswerRequest(Strict):
    """What chat and completions share. Fields of OpenAI's that would ask for more are taken at their defaults only."""

    model: Annotated[str, Field(min_length=1, max_length=400)]
    memory: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Id or name of the memory to answer from."""
    context: Literal["memory", "full"] | None = None
    """What stands before the prompt: the memory, or the whole document it is of, where that was kept."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=8)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    n: One | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def full(self) -> bool:
        """Whether the document's tokens are to be run, instead of answering from its memory."""
        return self.context == "full"

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class AutoOptions(Strict):
    """When and how a conversation's older turns are compacted; with `wait`, before its answer."""

    threshold: Annotated[int, Field(ge=1, le=2**31)] = 2048
    keep: Annotated[int, Field(ge=0, le=2**31)] = 512
    ratios: Annotated[list[Annotated[float, Field(ge=1, le=1e6)]], Field(min_length=1, max_length=16)] = [8, 16, 32]
    preset: Literal["quick", "balanced"] = "quick"
    method: Annotated[str, Field(max_length=40)] = "latent"
    wait: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=100)]
    name: Annotated[str, Field(max_length=100)] | None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates know them."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(AnswerRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    auto: AutoOptions | None = None
    """With `memory: "auto"`."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_tokens or max_completion_tokens, not both")
        return self


class CompletionRequest(AnswerRequest):
    prompt: str | list[Token] | list[str] | list[list[Token]]
    echo: Literal[False] | None = None
    best_of: One | None = None
    logprobs: None = None
    suffix: None = None


class JobOptions(Strict):
    """How a document is to be compacted."""

    ratio: Annotated[float, Field(ge=1, le=1e6)] | None = None
    tokens: Annotated[int, Field(ge=4, le=2**31)] | None = None
    fidelity: Annotated[float, Field(gt=0, le=1)] | None = None
    preset: Annotated[str, Field(max_length=40)] = "balanced"
    settings: Annotated[dict[str, Any], Field(max_length=40)] = {}
    method: Annotated[str, Field(max_length=40)] = "latent"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    measure: bool = True
    keep_document: bool = False

    @model_validator(mode="after")
    def _one_budget(self) -> JobOptions:
        given = [name for name in ("ratio", "tokens", "fidelity") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one budget, not {' and '.join(given)}")
        return self


Name = Annotated[str, Field(pattern=NAME)]


class NewMemory(JobOptions):
    """A document as JSON."""

    text: Annotated[str, Field(min_length=1)]
    name: Name | None = None


class NamedOptions(JobOptions):
    """The form fields beside an uploaded file."""

    name: Name | None = None


class Naming(Strict):
    """The form field beside an uploaded memory."""

    name: Name | None = None


def described_body(form: type[BaseModel], json: type[BaseModel] | None = None) -> dict[str, Any]:
    """The body of a route that reads it by itself, for the OpenAPI schema: a form with a file, or JSON as well."""
    fields = form.model_json_schema()
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    schema = {**fields, "properties": {"file": file, **fields["properties"]}, "required": ["file"]}
    content: dict[str, Any] = {"multipart/form-data": {"schema": schema}}
    if json is not None:
        content["application/json"] = {"schema": json.model_json_schema()}
    return {"requestBody": {"content": content, "required": True}}
