"""Define the answers of `/v1/documents`."""

from typing import Literal

from server.routes.answer import Answer, Count


class Document(Answer):
    """A document. `content_hash`: SHA-256 of the text in UTF-8."""

    id: str
    object: Literal["document"]
    title: str
    content_hash: str
    num_bytes: Count
    created: Count


class WholeDocument(Document):
    text: str


class NewDocument(Document):
    """A new document.

    `num_stored` of its chunks were stored now, `num_known` before; `reason`: why others were not.
    """

    num_tokens: Count
    num_chunks: Count
    num_stored: Count | None
    num_known: Count | None
    reason: str | None


class DocumentList(Answer):
    """List documents, oldest first; the next page begins `after` the last one."""

    object: Literal["list"]
    data: list[Document]
    has_more: bool


class DeletedDocument(Answer):
    id: str
    object: Literal["document.deleted"]
    deleted: Literal[True]
