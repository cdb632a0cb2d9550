"""Hold what all routes share: the deployment, the tokenizer, the engine's supervisor, metrics, and whether we drain."""

import hashlib
import hmac
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu.memory.plan import MemoryPlan
from server.bodies.body_memory import BodyMemory
from server.deployment import ConfigError, Deployment, ServerConfig, model_name
from server.engine.head_start import HeadStart
from server.engine.prometheus import Metrics
from server.engine.router_metrics import RouterMetrics
from server.engine.start_events import OnStart
from server.engine.supervisor import Supervisor
from server.engine.traces import Traces
from server.parsing.answer_formats import AnswerFormat, choose_format
from server.prompting.chat_template import ChatTemplate, load_template
from server.prompting.left_out import LeftOut
from server.prompting.prompt_fronts import PromptFronts
from server.service.adapter_names import LATEST, AdapterNames, load_adapter_names
from server.service.sampling_defaults import SamplingDefaults, load_sampling_defaults
from server.service.vector_settings import Vectors, load_vectors
from server.stores.conversation_tails import ConversationTails
from server.stores.document_texts import Documents, open_documents
from server.stores.response_store import ResponseStore
from server.text.control_tokens import ControlTokens
from server.text.model_tokenizer import Tokenizer, load_tokenizer
from server.text.text_pool import TextPool


class Keys:
    """The API keys that are accepted: their digests, and the owner name under which each keeps data."""

    def __init__(self, keys: Sequence[str], administrators: Sequence[str]) -> None:
        self.digests = [_digest(key) for key in keys]
        self._administrators = [_digest(key) for key in administrators]
        self.owners = frozenset(self.owner_of(key) for key in keys) or frozenset(("",))

    def knows(self, key: str) -> bool:
        """Return whether a key is known, in constant time."""
        return _is_among(_digest(key), self.digests)

    def is_administrator(self, key: str) -> bool:
        """Return whether a key may list and delete what others have saved; True if no keys are configured."""
        return not self.digests or _is_among(_digest(key), self._administrators)

    @staticmethod
    def owner_of(key: str) -> str:
        """Return the owner name under which a key keeps documents, responses and contexts."""
        return _digest(f"documents of {key}").hex()


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(digest, one) for one in known]
    return any(matches)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a service that are read from files."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    answer_format: AnswerFormat | None
    sampling_defaults: SamplingDefaults
    keys: Keys
    vectors: Vectors
    adapters: AdapterNames


@dataclass
class Service:
    """What all routes of a model share. Only `draining` and `num_open` change once it serves."""

    deployment: Deployment
    memory: MemoryPlan
    tokenizer: Tokenizer
    control_tokens: ControlTokens
    texts: TextPool
    body_memory: BodyMemory
    template: ChatTemplate | None
    answer_format: AnswerFormat | None  # None: all of an answer is plain text
    sampling_defaults: SamplingDefaults
    metrics: Metrics
    supervisor: Supervisor
    model_name: str
    keys: Keys
    vectors: Vectors
    adapters: AdapterNames
    responses: ResponseStore
    documents: Documents | None  # None: the deployment takes none
    left_out: LeftOut
    fronts: PromptFronts
    tails: ConversationTails
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_open: int = 0  # HTTP requests that a drain waits for
    traces: Traces | None = None  # None: they are not configured

    @property
    def settings(self) -> ServerConfig:
        return self.deployment.server

    @property
    def max_sequences(self) -> int:
        """Return the most sequences of one request; more could never wait and run together."""
        return self.deployment.scheduler.max_queue + self.deployment.scheduler.max_running

    @property
    def max_tokenize_items(self) -> int:
        """Return the most characters, or ids, of a /tokenize or /detokenize request."""
        return self.settings.max_tokenize_kib * 1024

    @property
    def chunk_folder(self) -> Path | None:
        """Return the folder of document chunks; None: the deployment has no documents."""
        return None if self.documents is None else self.documents.config.resolved_folder

    @property
    def model_ids(self) -> list[str]:
        """Return the model's name, then its aliases, and each of them with each adapter."""
        names = [self.model_name, *self.deployment.model.aliases]
        return [*names, *self.adapters.join(names)]

    def knows_model(self, name: str) -> bool:
        """Return whether a request's model name means this model. Ollama's clients may add the tag `:latest`."""
        return name in self.model_ids or name.removesuffix(LATEST) in self.model_ids

    def cache_salt(self, key: str) -> str:
        return _digest(f"prefixes of {key}").hex() if self.settings.cache_isolation == "key" else ""


def build_service(
    deployment: Deployment,
    memory: MemoryPlan,
    engine_command: Sequence[str],
    on_start: OnStart | None,
    ahead: HeadStart | None = None,
    beside: "Service | None" = None,
) -> Service:
    """Build the service of a model. ahead: may have an engine process that was started in advance. beside: the service
    of this server's first model, with which it shares what does not depend on a model.

    Raises ConfigError if the tokenizer, the chat template, the keys or the documents cannot be read.
    """
    server = deployment.server
    parts = load_parts(deployment)
    metrics, name = Metrics(), model_name(deployment)
    has_prefixes = deployment.scheduler.prefix_cache
    stats = metrics.stats
    metrics.show_more(
        RouterMetrics(
            name, memory, parts.adapters.names, has_prefixes, lambda: stats.latest, lambda: metrics.num_load_waits()
        )
    )
    texts = TextPool(server.retry_after_seconds) if beside is None else beside.texts
    bodies = BodyMemory(server.max_body_mib, server.max_bodies_mib, server.retry_after_seconds)
    responses = ResponseStore(server.responses_seconds, int(server.responses_limit_mib * 2**20))
    return Service(
        deployment=deployment,
        memory=memory,
        tokenizer=parts.tokenizer,
        control_tokens=ControlTokens(parts.tokenizer),
        texts=texts,
        body_memory=bodies if beside is None else beside.body_memory,
        template=parts.template,
        answer_format=parts.answer_format,
        sampling_defaults=parts.sampling_defaults,
        metrics=metrics,
        supervisor=Supervisor(deployment, memory, engine_command, metrics, on_start, ahead),
        model_name=name,
        keys=parts.keys,
        vectors=parts.vectors,
        adapters=parts.adapters,
        responses=responses if beside is None else beside.responses,
        documents=open_documents(deployment, parts.tokenizer),
        left_out=LeftOut(server.left_out, metrics.count_left_out),
        fronts=PromptFronts(parts.tokenizer, texts),
        tails=ConversationTails(parts.tokenizer, metrics.count_turn),
    )


def load_parts(deployment: Deployment) -> Parts:
    """Load the files of a service. Raises ConfigError if one of them cannot be read."""
    keys, file = read_keys(deployment.server), deployment.server.admin_keys_file
    administrators = [] if file is None else _keys_in("admin_keys_file", file)
    tokenizer = load_tokenizer(deployment.model)
    template = load_template(deployment.model, tokenizer)
    answer_format = None
    if template is not None:
        with_tools = template.for_tools or template
        source = template.source if with_tools is template else template.source + with_tools.source
        answer_format = choose_format(deployment.model, source, with_tools.writes_tools, tokenizer.settings)
    return Parts(
        tokenizer=tokenizer,
        template=template,
        answer_format=answer_format,
        sampling_defaults=load_sampling_defaults(deployment),
        keys=Keys(keys, administrators),
        vectors=load_vectors(deployment.model, tokenizer),
        adapters=load_adapter_names(deployment),
    )


def read_keys(settings: ServerConfig) -> list[str]:
    """Return all keys. Raises ConfigError, also for a key that no client could send; the error contains no key."""
    named = [(f"server.api_keys[{i}]", key) for i, key in enumerate(settings.api_keys)]
    for setting in ("api_keys_file", "admin_keys_file"):
        path = getattr(settings, setting)
        if path is not None:
            named += [
                (f"server.{setting}: key {i + 1} of {path}", key) for i, key in enumerate(_keys_in(setting, path))
            ]
    for name, key in named:
        if not key or not all("!" <= char <= "~" for char in key):
            raise ConfigError(f"{name}: cannot come in a header; wanted printable ASCII without spaces, and not empty")
    if settings.cache_isolation == "key" and not named:
        raise ConfigError("server.cache_isolation: got key, but there are no keys; set server.api_keys_file")
    return [key for _, key in named]


def require_tls(settings: ServerConfig) -> None:
    """Check the certificate, its key and the clients' CA. Raises ConfigError."""
    if settings.tls_certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
    except OSError as error:  # includes SSLError, which names no file
        files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        named = ", ".join(str(path) for path in files if path is not None)
        raise ConfigError(f"server.tls: one of {named} cannot be used: {error.strerror or error}") from None


def _keys_in(setting: str, path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # the path is not repeated, since it may be a misplaced key
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"server.{setting}: the file that it names cannot be read: {reason}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"server.{setting}: {path} has no key; wanted one a line")
    return keys


def join_salts(of_key: str, of_request: str | None) -> str:
    """Combine the salts of a key and a request; the key's salt if the request has none."""
    if of_request is None:
        return of_key
    return _digest(f"{of_key} {of_request}").hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
