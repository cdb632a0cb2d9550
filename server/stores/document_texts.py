"""Keep the documents of a server with a `documents` section, and find the texts of those that a chat names.

A document that cannot be stored is logged, and its chat is served.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import Fusion, NamedChunk
from server import logs
from server.api_error import ApiError, invalid, too_long
from server.bodies.generation_bodies import FusionChoice, InlineDocument
from server.deployment import ConfigError, Deployment
from server.stores.document_registry import Document, DocumentRegistry, RegistryError, RegistryFull, TextsTooLarge
from server.text.chunker import Chunker, Chunks
from server.text.model_tokenizer import Tokenizer
from transfer.chunks.chunk_format import digest_tokens
from transfer.host_config import DocumentsConfig

_FILE = "documents.sqlite3"


@dataclass(frozen=True, slots=True)
class Documents:
    config: DocumentsConfig
    registry: DocumentRegistry
    chunker: Chunker


@dataclass(frozen=True, slots=True)
class GivenText:
    """A document of a chat."""

    title: str
    text: str


def open_documents(deployment: Deployment, tokenizer: Tokenizer) -> Documents | None:
    """Open the documents, None without a section of them. Raises ConfigError if the registry cannot be used."""
    config = deployment.documents
    if config is None:
        return None
    limit_bytes = int(config.texts_limit_mib * 2**20)
    try:
        registry = DocumentRegistry(config.resolved_folder / _FILE, config.max_documents, limit_bytes)
    except RegistryError as error:
        raise ConfigError(f"documents.folder: {error}") from None
    return Documents(config, registry, Chunker(tokenizer, config.chunk_tokens))


def check_documents(deployment: Deployment) -> None:
    """Check what `open_documents` needs, without making a folder. Raises ConfigError."""
    config = deployment.documents
    if config is None:
        return
    path = config.resolved_folder / _FILE
    if path.exists():
        try:
            DocumentRegistry(path, config.max_documents, 0).close()
        except RegistryError as error:
            raise ConfigError(f"documents.folder: {error}") from None
        return
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"documents.folder: nothing can be written in {above}; name another folder")


async def find_texts(
    documents: Documents, owner: str, given: Sequence[str | InlineDocument], most_bytes: int
) -> list[GivenText]:
    """Return the texts of a chat's documents, in their order. Raises ApiError 400 and 404, and RegistryError."""
    ids = [one for one in given if isinstance(one, str)]
    try:
        found: dict[str, Document] = await documents.registry.find(owner, ids, most_bytes) if ids else {}
    except TextsTooLarge as error:
        raise too_long("documents", f"{error} bytes; no prompt has room for them") from None
    texts = []
    for i, one in enumerate(given):
        if isinstance(one, InlineDocument):
            texts.append(GivenText(one.title or "", one.text))
        elif one in found:
            texts.append(GivenText(found[one].entry.title, found[one].text))
        else:
            raise unknown_document(f"documents[{i}]", one)
    return texts


async def note_use(
    documents: Documents, owner: str, given: Sequence[str | InlineDocument], cut: Sequence[Chunks], salt: str
) -> None:
    """Leave a chat's own texts in the registry, until others need the room, and note the chunks of all of them."""
    for one, chunks in zip(given, cut, strict=True):
        named = name_chunks(chunks, salt)
        try:
            if isinstance(one, InlineDocument):
                await documents.registry.add(owner, one.title or "", one.text, False, named)
            else:
                await documents.registry.note_chunks(owner, one, named)
        except (RegistryFull, RegistryError) as error:
            logs.warning("document_not_stored", reason=str(error))
            return


def name_chunks(chunks: Chunks, salt: str) -> list[NamedChunk]:
    return [NamedChunk(digest_tokens(chunk), len(chunk), salt) for chunk in chunks]


def choose_fusion(config: DocumentsConfig, choice: FusionChoice | None, num_layers: int) -> Fusion | None:
    """Return how a prompt with documents is computed, None for plain text.

    Raises ApiError 400 for a layer that the model lacks.
    """
    policy, ratio, select_layer, seam_tokens = config.policy, config.ratio, config.select_layer, config.seam_tokens
    if choice is not None:
        if choice.select_layer is not None and choice.select_layer >= num_layers:
            raise invalid(
                "fusion.select_layer", f"got {choice.select_layer}, the model has layers 0 to {num_layers - 1}"
            )
        policy, select_layer = choice.policy or policy, choice.select_layer or select_layer
        ratio = ratio if choice.ratio is None else choice.ratio
        seam_tokens = seam_tokens if choice.seam_tokens is None else choice.seam_tokens
    if policy == "vanilla":
        return None
    return Fusion(
        policy=policy,
        ratio=ratio,
        select_layer=select_layer,
        seam_tokens=seam_tokens,
    )


def unknown_document(param: str, got: str) -> ApiError:
    """Return a 404: the document does not exist, or belongs to another key."""
    what = f"{param}: {got[:80]!r} does not exist, or is another key's; POST /v1/documents makes one"
    return ApiError(404, what, param=param, code="document_not_found")
