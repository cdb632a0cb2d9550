"""Read the vocabulary of a sentencepiece `tokenizer.model`. A piece's place in the file is its id."""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from gpu.model.spec import ModelError

MODEL_FILE = "tokenizer.model"


class Kind(IntEnum):
    """The kind of a piece, by sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class SentencepieceFile:
    """A sentencepiece vocabulary.

    texts, scores, kinds: of each piece.
    is_bpe: pieces are merged by score, else chosen together (unigram).
    unk_id, bos_id, eos_id: None where there is none.
    charsmap: sentencepiece's compiled normalisation, or empty.
    adds_prefix: a text is read as if a space stood before it.
    squeezes_spaces: none at its ends, never two together.
    """

    texts: list[str]
    scores: list[float]
    kinds: list[Kind]
    is_bpe: bool
    has_byte_fallback: bool
    unk_id: int | None
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    adds_prefix: bool
    squeezes_spaces: bool

    def text_of(self, piece_id: int | None) -> str | None:
        return None if piece_id is None else self.texts[piece_id]


def read_sentencepiece(path: Path) -> SentencepieceFile:
    """Read a sentencepiece file. Raises ModelError for a file that is none, or whose pieces are words or characters."""
    from google.protobuf.message import DecodeError  # where a folder has tokenizer.json, none of this is loaded
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelError(f"model: {path} cannot be read as a sentencepiece model ({error})") from None
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if not proto.pieces:
        raise ModelError(f"model: {path} has no pieces; wanted a sentencepiece model")
    kinds = {trainer.UNIGRAM: "unigram", trainer.BPE: "bpe"}
    if trainer.model_type not in kinds or trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ModelError(
            f"model: {path}: model_type {trainer.model_type}, treat_whitespace_as_suffix "
            f"{trainer.treat_whitespace_as_suffix}, escape_whitespaces {normalizer.escape_whitespaces}; served: 1 "
            "(unigram) or 2 (bpe), False and True: put a tokenizer.json beside it"
        )

    def id_of(piece_id: int) -> int | None:
        return piece_id if 0 <= piece_id < len(proto.pieces) else None

    return SentencepieceFile(
        texts=[piece.piece for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        kinds=[Kind(piece.type) for piece in proto.pieces],
        is_bpe=kinds[trainer.model_type] == "bpe",
        has_byte_fallback=trainer.byte_fallback,
        unk_id=id_of(trainer.unk_id),
        bos_id=id_of(trainer.bos_id),
        eos_id=id_of(trainer.eos_id),
        charsmap=normalizer.precompiled_charsmap,
        adds_prefix=normalizer.add_dummy_prefix,
        squeezes_spaces=normalizer.remove_extra_whitespaces,
    )
