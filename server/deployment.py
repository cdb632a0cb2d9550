"""Read a deployment's YAML file, which no other module reads. Unknown keys are errors; nothing mutates a deployment."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from gpu.config import Composition, MethodChoice, ModelConfig
from gpu.methods.method import Slot
from gpu.methods.registry import list_methods
from gpu.model.declared_formats import AUTO, NONE, call_formats, reasoning_formats
from gpu.model.gguf.folder import model_path, name_gguf_files
from scheduler.engine_config import EngineConfig
from server.observing_config import EventsConfig, TracingConfig
from transfer.nearest_name import nearest_hint
from transfer.settings_model import Settings

HUB_PREFIX = "hf:"  # of a model's name on the hub, where a path may stand
SEVERAL = "models"  # the key of a file with several of them
MOST_TOLD = 8  # problems of a configuration, in one line
_NULL_TAG = "tag:yaml.org,2002:null"
_A_METHOD = (
    "wanted a method's name, or a mapping with `method` and its settings; leave it out for what the slot does without"
)
_NAMED = re.compile(r"\b(alias|anchor|tag) .*", re.DOTALL)  # what PyYAML calls wrong, and its name


class ConfigError(Exception):
    """Report a configuration that cannot be used, in one line that names the file, the key and what was wanted."""


LEFT_OUT = (
    r"(?m)^x-anthropic-[a-z-]+:.*\n?",  # Claude Code writes it into each request, for Anthropic's own servers
    r"\n?<total_tokens>(?:\d+|Infinite) tokens left</total_tokens>",  # likewise, after every result of a tool
)


class ServerConfig(Settings):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: any free port, printed at the start")
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate and those that signed it; if given, the server speaks HTTPS"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key; default: the same file")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of CA certificates; clients need a certificate that one of these has signed"
    )
    api_keys: tuple[str, ...] = Field(
        (),
        description="bearer keys that requests may use; none: no key is needed; /health, /live, /version, /metrics, "
        "/openapi.json, /docs and / never need one",
    )
    api_keys_file: Path | None = Field(None, description="file with more keys, one a line")
    admin_keys_file: Path | None = Field(
        None,
        description="file with more keys, one a line, that may also list and delete contexts saved by other keys; if "
        "no keys are configured, every client may",
    )
    cache_isolation: Literal["none", "key"] = Field(
        "none",
        description="key: requests of different keys share no cached prefixes, so that neither `cached_tokens` nor "
        "timing tells a key what others sent",
    )
    max_body_mib: float = Field(16.0, gt=0, description="largest request body; a larger one is answered with 413")
    max_bodies_mib: float = Field(
        256.0, gt=0, description="most memory for all request bodies in progress; beyond it: 503"
    )
    max_tokenize_kib: int = Field(
        1024, ge=1, description="most characters (or ids) of a /tokenize or /detokenize, in units of 1,024"
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="most open connections; one more is answered with 503; default and upper limit: what file "
        "descriptors allow",
    )
    header_seconds: float = Field(
        10.0, gt=0, description="time limit for a request's headers, and for a connection's first request to begin"
    )
    body_seconds: float = Field(60.0, gt=0, description="time limit for a request's body")
    stall_seconds: float = Field(
        120.0, gt=0, description="close the connection of a client that reads nothing for this long"
    )
    unknown_fields: Literal["auto", "refuse", "ignore"] = Field(
        "auto",
        description="what to do with an unknown field in a request. refuse: a 400 that names a similar field; ignore: "
        "it is named in the header x-tandem-ignored; auto: ignored on /v1/messages, /v1/responses and /api, refused "
        "elsewhere",
    )
    left_out: tuple[str, ...] = Field(
        LEFT_OUT,
        description="regular expressions (Python's); what they match in a chat's system messages is left out of the "
        "prompt. It is for text that clients change with each request, after which no cached prefix could be used",
    )
    generation_defaults: Literal["model", "openai"] = Field(
        "model",
        description="sampling defaults for what a request leaves open: from the model's generation_config.json, or "
        "OpenAI's",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="longest answer if a request sets no limit; default: 16, in chats all that the context leaves",
    )
    max_request_seconds: float | None = Field(
        None, gt=0, description="longest time that a request may take, even if its `max_seconds` is larger"
    )
    responses_seconds: float = Field(
        3600.0,
        ge=0,
        description="how long a response can be fetched, or named as `previous_response_id`; 0: none is kept",
    )
    responses_limit_mib: float = Field(
        64.0, gt=0, description="most memory for kept responses; beyond it the oldest are dropped"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins whose pages may send requests from a browser; *: all"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="further names of this server that are accepted in the header `host` while there are no keys; *: "
        "any. Always accepted are addresses, this machine's names, names without a dot, and .local, .lan, .internal, "
        ".home.arpa",
    )
    page: bool = Field(True, description="serve a page at / with a chat and the server's state")
    keepalive_seconds: float = Field(
        10.0, gt=0, description="interval of SSE comments in a stream while nothing else is sent"
    )
    progress_seconds: float = Field(0.5, gt=0, description="shortest interval between reports of `return_progress`")
    retry_after_seconds: int = Field(2, ge=1, description="value of the header Retry-After in a 429")
    drain_seconds: float = Field(60.0, ge=0, description="on SIGTERM, wait this long for open requests")
    models_at_once: Literal["one", "fitting"] = Field(
        "one",
        description="how many of several `models` have an engine at once: one, or as many as fit beside each other by "
        "their plans; a request for another model then drains and unloads one",
    )
    load_wait_seconds: float = Field(
        300.0,
        gt=0,
        description="how long a request waits for its model to be loaded, unless its own time limit is shorter; after "
        "that it is answered with 503",
    )
    restart_engine: bool = Field(True, description="start a new engine process when one dies")
    max_engine_failures: int = Field(
        5, ge=1, description="exit after this many engines in a row hang or die within a minute of service"
    )
    engine_quiet_seconds: float = Field(
        5.0, gt=0, description="without a heartbeat for this long the engine counts as hung; /health says so"
    )
    engine_silence_seconds: float = Field(
        120.0,
        gt=0,
        description="an engine that hangs for this long (five times as long while it loads), or whose step takes this "
        "long, is replaced",
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    events: EventsConfig | None = None
    tracing: TracingConfig | None = None

    @field_validator("left_out")
    @classmethod
    def _compile_first(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                found = re.compile(pattern).fullmatch("")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
            if found is not None:
                raise ValueError(f"{pattern!r} finds the empty text; wanted one that finds what is to be left out")
        return patterns

    @model_validator(mode="after")
    def _certificate_first(self) -> "ServerConfig":
        for key in ("tls_key", "tls_client_ca"):
            if getattr(self, key) is not None and self.tls_certificate is None:
                raise ValueError(f"{key}: got {str(getattr(self, key))!r} without tls_certificate; give both")
        return self


class Deployment(EngineConfig):
    """The whole configuration of one server. `tandem plan` prints it resolved for a machine."""

    server: ServerConfig = ServerConfig()
    idle_seconds: float | None = Field(
        None,
        ge=0,
        description="how long the model stays loaded after its last request, unless that sets `keep_alive`; the next "
        "request loads it again; default: until another model needs its room",
    )

    @field_validator("model")
    @classmethod
    def _known_formats(cls, model: ModelConfig) -> ModelConfig:
        for key, formats in (("tool_parser", call_formats()), ("reasoning_parser", reasoning_formats())):
            names = (AUTO, NONE, *formats)
            if getattr(model, key) not in names:
                raise ValueError(f"{key}: got {getattr(model, key)!r}; wanted one of {', '.join(names)}")
        return model

    @model_validator(mode="after")
    def _have_prefixes_to_tell(self) -> "Deployment":
        if self.server.events is not None and not self.scheduler.prefix_cache:
            raise ValueError(
                "server.events: without scheduler.prefix_cache there are no events; turn that on, or leave out events"
            )
        return self


def model_name(deployment: Deployment) -> str:
    """Return the model's id in /v1/models."""
    model = deployment.model
    return model.name or model.random_weights or (model.path.resolve().name if model.path else "")


def load_deployment(path: Path) -> Deployment:
    """Read a deployment from a YAML file, or make one with all defaults for a model's folder or GGUF file.

    Relative paths in a YAML file are relative to its folder. A folder with one GGUF file and no config.json stands for
    that file. Raises ConfigError with one line.
    """
    path = model_path(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            wanted = f"wanted a YAML file or a model's Hugging Face folder{name_gguf_files(path)}"
            raise ConfigError(f"config: {path} has no config.json; {wanted}")
        return Deployment(model=ModelConfig(path=path.resolve()))
    if path.suffix == ".gguf":
        return Deployment(model=ModelConfig(path=path.absolute()))  # not resolved: a link's name has the part number
    tree, text = read_tree(path)
    if SEVERAL in tree:
        raise ConfigError(f"config: {path} has several `{SEVERAL}`; wanted a file with one `model`")
    check_filled(path, yaml.compose(text, Loader=yaml.SafeLoader))
    return build_deployment(path, tree, text)


def read_tree(path: Path) -> tuple[dict[str, Any], str]:
    """Return the mapping in a YAML file, and its text. Raises ConfigError."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"config: {path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} cannot be read: {' '.join(str(error).split())}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {_where(error)}") from None
    except (ValueError, LookupError, AttributeError):  # of PyYAML's own conversions
        raise ConfigError(f"config: {path} is not YAML: a value is not what its tag (!!) says") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config: {path} holds {type(tree).__name__}; wanted a mapping with the key `model`")
    return tree, text


def check_filled(path: Path, node: yaml.Node | None, inside: str = "") -> None:
    """Raise ConfigError for a section of a deployment's mapping that has no value."""
    for key, wanted in _empty_keys(node, Deployment):
        raise ConfigError(f"config: {path}: {inside}{key} has no value; {wanted}")


def build_deployment(path: Path, tree: dict[str, Any], text: str, entry: int | None = None) -> Deployment:
    """Build the deployment of a mapping in the file `path`, or of entry `entry` of its models. Raises ConfigError."""
    try:
        deployment = Deployment.model_validate(tree)
    except ValidationError as error:
        inside = "" if entry is None else f"{SEVERAL}[{entry}]."
        raise ConfigError(f"config: {path}: {inside}{describe(error, text, entry)}") from None
    return _anchor(deployment, path.resolve().parent)


def describe(error: ValidationError, text: str | None, entry: int | None = None) -> str:
    """Describe the problems of a ValidationError as `key: got, wanted`, at most MOST_TOLD of them, without API keys.

    text: the deployment's YAML; None if something without API keys was validated. entry: the model's, if several.
    """
    problems: list[Any] = list(error.errors())
    told = [_problem(problem, text, entry) for problem in problems[:MOST_TOLD]]
    more = len(problems) - len(told)
    return "; ".join([*told, f"and {more} more"] if more else told)


def _problem(problem: dict[str, Any], text: str | None, entry: int | None) -> str:
    loc = problem["loc"]
    key = ".".join(str(part) for part in loc) or "(top)"
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg']}{_got(problem)}"
    if text is None or (len(loc) > 1 and loc[0] != "server"):
        known = () if text is None else _known_keys(loc[:-1])
        return f"{key}: unknown key{nearest_hint(str(loc[-1]), known)}"
    return _unknown(loc, text, entry)


def _known_keys(section: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the allowed keys of the section at a path of keys; () if they are not fixed."""
    model: type[BaseModel] = Deployment
    if section[0] == "profiles":  # each has a name of its own
        section = ("profiles", *section[2:])
    for key in section:
        inner = _section_of(model, str(key))
        if inner is None:
            return ()
        model = inner
    return tuple(model.model_fields)


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the model of the section that a key names, or None if the key has a plain value."""
    field = model.model_fields.get(key)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _empty_keys(node: yaml.Node | None, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the keys of sections, profiles and slots that have no value, with what is wanted there.

    YAML reads them as null. An explicit `null` is accepted.
    """
    for key, value in _pairs(node):
        section = _section_of(model, key)
        if section is None:
            continue
        if _is_empty(value):
            yield key, _A_METHOD if section is MethodChoice else _what_to_write(key, "the section")
        elif section is Composition:  # profiles have names of their own
            for name, profile in _pairs(value):
                if _is_empty(profile):
                    yield f"{key}.{name}", _what_to_write(name, "the profile")
                for slot, wanted in _empty_keys(profile, Composition):
                    yield f"{key}.{name}.{slot}", wanted
        else:
            for inner, wanted in _empty_keys(value, section):
                yield f"{key}.{inner}", wanted


def _pairs(node: yaml.Node | None) -> list[tuple[str, yaml.Node]]:
    return [(str(key.value), value) for key, value in node.value] if isinstance(node, yaml.MappingNode) else []


def _is_empty(node: yaml.Node) -> bool:
    return node.tag == _NULL_TAG and node.value == ""


def _what_to_write(key: str, what: str) -> str:
    return f"write `{key}: {{}}` for {what} with its defaults, or leave it out"


def _unknown(loc: tuple[str, ...], text: str, entry: int | None) -> str:
    """Describe an unknown key by its line and the nearest known key, not by its text, which may be an API key."""
    section, known = ("server", ServerConfig) if len(loc) > 1 else ("(top)", Deployment)
    return (
        f"{section}: unknown key at line {_line_of(loc, text, entry)}{nearest_hint(str(loc[-1]), known.model_fields)}"
    )


def _line_of(loc: tuple[str, ...], text: str, entry: int | None) -> int:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 1
    if entry is not None:
        its_own = next(value for key, value in node.value if key.value == SEVERAL).value[entry]
        node = its_own if any(key == loc[0] for key, _ in _pairs(its_own)) else node
    for part in loc:
        found = [pair for pair in node.value if pair[0].value == str(part)]
        if not found:  # the key comes from a merged mapping
            break
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


def _got(problem: dict[str, Any]) -> str:
    """Return the given value for a message, or "" if it is or may contain an API key."""
    given, loc = problem["input"], problem["loc"]
    if (
        problem["type"] == "missing"
        or {"api_keys", "admin_keys_file"} & set(loc)
        or ("server" in loc and isinstance(given, str))
    ):
        return ""
    is_section = problem["type"] == "model_type" or isinstance(given, dict | list | tuple)
    return f" (got {type(given).__name__ if is_section else repr(given)})"


def _where(error: yaml.YAMLError) -> str:
    """Describe a YAML error and its place, without the line or names in it, which may contain an API key."""
    mark = getattr(error, "problem_mark", None)
    what = _NAMED.sub(r"\1", getattr(error, "problem", None) or type(error).__name__)
    return f"{what} at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else what


def is_on_hub(path: Path) -> bool:
    """Return whether `model.path` names a model on the hub."""
    return str(path).startswith(HUB_PREFIX)


def _anchor(deployment: Deployment, folder: Path) -> Deployment:
    model = deployment.model
    paths = {key: getattr(model, key) for key in ("path", "tokenizer", "chat_template")}
    anchored = {key: folder / path for key, path in paths.items() if path is not None and not is_on_hub(path)}
    anchored |= {key: model_path(anchored[key]) for key in ("path", "tokenizer") if key in anchored}
    server, documents = deployment.server, deployment.documents
    files = {
        key: getattr(server, key)
        for key in ("api_keys_file", "admin_keys_file", "tls_certificate", "tls_key", "tls_client_ca")
    }
    server = server.model_copy(update={key: folder / path for key, path in files.items() if path is not None})
    if documents is not None and documents.folder is not None:
        documents = documents.model_copy(update={"folder": folder / documents.folder})
    disk = deployment.disk
    if disk is not None and disk.folder is not None:
        disk = disk.model_copy(update={"folder": folder / disk.folder})
    adapters = {name: folder / path for name, path in deployment.adapters.items()}
    profiles = {name: _anchor_methods(one, folder) for name, one in deployment.profiles.items()}
    update = {"model": model.model_copy(update=anchored), "server": server, "documents": documents, "disk": disk}
    return deployment.model_copy(update={**update, "profiles": profiles, "adapters": adapters})


def _anchor_methods(composition: Composition, folder: Path) -> Composition:
    """Resolve the paths of files in methods' settings. Invalid settings are kept; they are reported later."""
    methods, update = list_methods(), {}
    for slot in get_args(Slot):
        choice: MethodChoice | None = getattr(composition, slot)
        if choice is None or choice.method not in methods:
            continue
        known = methods[choice.method].settings.model_fields
        files = {
            key: str(folder / path)
            for key, path in choice.settings.items()
            if isinstance(path, str) and key in known and known[key].annotation is Path
        }
        update[slot] = MethodChoice(method=choice.method, **{**choice.settings, **files})
    return composition.model_copy(update=update)
