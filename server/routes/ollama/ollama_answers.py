"""Define the answers of Ollama's routes, and their errors. Durations are nanoseconds."""

from typing import Any, Literal

from server.routes.answer import Answer, Count


class OllamaError(Answer):
    """An error: its text, and the other fields of OpenAI's."""

    error: str
    param: str | None = None
    code: str | None = None


class OllamaFunction(Answer):
    index: Count
    name: str
    arguments: dict[str, Any]


class OllamaAnsweredCall(Answer):
    id: str
    function: OllamaFunction


class OllamaAnsweredMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnsweredCall] | None = None


class OllamaFigures(Answer, kw_only=True):
    """The fields at the end of an answer. warn: the client's own limit is less than its prompt."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: Count | None = None
    load_duration: Count | None = None
    prompt_eval_count: Count | None = None
    prompt_eval_duration: Count | None = None
    eval_count: Count | None = None
    eval_duration: Count | None = None
    warn: str | None = None


class OllamaChat(OllamaFigures, kw_only=True):
    """An answer to a chat, or a line of it."""

    message: OllamaAnsweredMessage


class OllamaText(OllamaFigures, kw_only=True):
    """An answer to a prompt, or a line of it."""

    response: str
    thinking: str | None = None


class OllamaEmbeddings(Answer):
    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count


class OllamaEmbedding(Answer):
    embedding: list[float]


class OllamaDetails(Answer):
    parent_model: str
    format: Literal["gguf", "safetensors", "random"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    name: str
    model: str
    modified_at: str
    size: Count
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaLoadedModel(Answer):
    name: str
    model: str
    size: Count
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: Count
    context_length: Count


class OllamaLoadedModels(Answer):
    models: list[OllamaLoadedModel]


class OllamaShown(Answer):
    """A model. `model_info`: its sizes by GGUF's names."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer):
    """Name the version of Ollama whose routes these are, and this server's own."""

    version: str
    tandem: str
