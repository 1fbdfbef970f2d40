"""Documents of a corpus: a text file, a folder, JSONL, Parquet, or the sources of Python's own standard library.

``open_corpus`` lists the files once, sorted by name; ``Corpus.documents`` then streams them, one document in memory at a
time (a text file is one document, a JSONL line or a Parquet row is one document). The same corpus always gives the same
documents in the same order, on any machine and from any folder, because names are relative to the source.

What is not text (a NUL byte, or bytes that are not UTF-8) and what is empty is skipped and counted by reason; a corpus
that has nothing else is a ``DataError``. A line that is not JSON, a missing text field and a damaged Parquet file stop
the reading: to drop them quietly would train on less than was asked for.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megascale_jax.errors import DataError

STDLIB = "stdlib"
"""Source name that stands for the ``.py`` files of the running Python's standard library."""

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "__pycache__"})
_JSON_LINES = frozenset({".jsonl", ".ndjson"})
_SNIFFED_BYTES = 8192
_PARQUET_ROWS = 256

BINARY = "binary"
NOT_UTF8 = "not UTF-8"
EMPTY = "empty"


@dataclass(frozen=True)
class Document:
    """One text. ``name`` is unique in the corpus and does not depend on where the corpus lies."""

    name: str
    text: str


@dataclass(frozen=True)
class CorpusFile:
    """One regular file of a corpus."""

    path: Path
    name: str
    size_bytes: int
    modified_ns: int


@dataclass
class Corpus:
    """The files of a source, and how far they have been read.

    ``read_bytes`` (of ``total_bytes``) and ``skipped`` (reason -> files or records) belong to the newest ``documents()``.
    """

    source: str
    files: tuple[CorpusFile, ...]
    text_field: str
    read_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(file.size_bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Hex digest that changes when a file is added, removed or edited (by name, size and modification time).

        The standard library is known by its Python version and file sizes alone, so that two machines agree on it.
        """
        digest = hashlib.blake2b(digest_size=16)
        stamped = self.source != STDLIB
        if not stamped:
            digest.update(platform.python_version().encode())
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\0{file.modified_ns if stamped else 0}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Stream all documents, in order.

        Raises ``DataError`` at the end when there was none, and at once for a file that cannot be read as what it is.
        """
        self.read_bytes, self.skipped = 0, Counter()
        found = False
        before = 0
        for file in self.files:
            try:
                for document in self._documents_of(file):
                    found = True
                    yield document
            except OSError as error:
                raise DataError(f"{file.path} cannot be read: {error.strerror or error}. Mend it, or take it out of the corpus.") from error
            before += file.size_bytes
            self.read_bytes = before
        if not found:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items())) or "no files"
            raise DataError(
                f"{self.source} holds no text ({reasons}). Expected a text file, JSONL or Parquet with a {self.text_field!r} field, "
                f"a folder of these, or {STDLIB!r}."
            )

    def _documents_of(self, file: CorpusFile) -> Iterator[Document]:
        suffix = file.path.suffix.lower()
        if suffix == ".parquet":
            yield from self._parquet_documents(file)
        elif _is_binary(file.path):
            self.skipped[BINARY] += 1
        elif suffix in _JSON_LINES:
            yield from self._json_documents(file)
        else:
            yield from self._checked(file.name, file.path.read_bytes())

    def _checked(self, name: str, content: bytes | str) -> Iterator[Document]:
        """The document, or nothing and one more in ``skipped``."""
        try:
            if isinstance(content, bytes):
                text = content.decode("utf-8").removeprefix("\ufeff")
            else:
                content.encode("utf-8")  # JSON may spell half a surrogate pair, which no tokenizer accepts
                text = content
        except UnicodeError:
            self.skipped[NOT_UTF8] += 1
            return
        if not text:
            self.skipped[EMPTY] += 1
        elif "\0" in text:
            self.skipped[BINARY] += 1
        else:
            yield Document(name, text)

    def _json_documents(self, file: CorpusFile) -> Iterator[Document]:
        with file.path.open("rb") as lines:
            before = self.read_bytes
            for number, line in enumerate(lines, start=1):
                self.read_bytes += len(line)
                if not line.strip():
                    continue
                try:
                    record = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError:
                    self.skipped[NOT_UTF8] += 1
                    continue
                except (json.JSONDecodeError, RecursionError) as error:
                    raise DataError(f"{file.path} line {number} is not JSON ({error}). Each line must be one JSON object.") from error
                if not isinstance(record, dict):
                    raise DataError(f"{file.path} line {number} is a JSON {type(record).__name__}, expected an object with a text field.")
                yield from self._field_document(file, f"line {number}", f"{file.name}:{number}", record)
            self.read_bytes = before

    def _field_document(self, file: CorpusFile, place: str, name: str, record: dict[str, object]) -> Iterator[Document]:
        if self.text_field not in record:
            raise _no_field(file, place, self.text_field, record)
        text = record[self.text_field]
        if text is None:
            self.skipped[EMPTY] += 1
        elif isinstance(text, str):
            yield from self._checked(name, text)
        else:
            raise DataError(f"{file.path} {place}: {self.text_field!r} is a {type(text).__name__}, expected text. Name another field.")

    def _parquet_documents(self, file: CorpusFile) -> Iterator[Document]:
        import pyarrow as arrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(file.path) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise _no_field(file, "", self.text_field, names)
                kind = table.schema_arrow.field(self.text_field).type
                if not _is_text_type(arrow, kind):
                    raise DataError(f"{file.path}: column {self.text_field!r} is {kind}, expected strings. Name another column.")
                before, row, total = self.read_bytes, 0, max(1, table.metadata.num_rows)
                for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[self.text_field]):
                    for value in batch.column(0):
                        row += 1
                        yield from self._parquet_document(f"{file.name}:{row}", value)
                    self.read_bytes = before + file.size_bytes * row // total
                self.read_bytes = before
        except arrow.ArrowException as error:
            raise DataError(f"{file.path} is no readable Parquet file ({error}). Mend it, or take it out of the corpus.") from error

    def _parquet_document(self, name: str, value) -> Iterator[Document]:  # a pyarrow scalar: pyarrow ships no types
        try:
            text = value.as_py()
        except UnicodeDecodeError:
            self.skipped[NOT_UTF8] += 1
            return
        if text is None:
            self.skipped[EMPTY] += 1
        else:
            yield from self._checked(name, text)


def read_documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """Stream the documents of ``source``. Raises ``DataError`` as ``open_corpus`` and ``Corpus.documents`` do."""
    return open_corpus(source, text_field).documents()


def open_corpus(source: str, text_field: str = "text") -> Corpus:
    """List the files of ``source``: ``stdlib``, a file, or a folder (recursive, hidden names left out).

    Raises ``DataError`` when there is no such source.
    """
    if source == STDLIB:
        return Corpus(source, tuple(_stdlib_files()), text_field)
    path = Path(source).expanduser()
    if path.is_dir():
        return Corpus(source, tuple(_files_under(path, lambda name: name.startswith("."))), text_field)
    if path.is_file():
        return Corpus(source, (_corpus_file(path, path.name),), text_field)
    raise DataError(f"No corpus at {source!r}. Expected a text, JSONL or Parquet file, a folder of these, or {STDLIB!r}.")


def _stdlib_files() -> Iterable[CorpusFile]:
    root = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata records how and where this Python was built: machine paths, not library code.
    files = _files_under(root, lambda name: name in _STDLIB_LEFT_OUT or name.startswith("_sysconfigdata"))
    chosen = [file for file in files if file.path.suffix == ".py"]
    if not chosen:
        raise DataError(f"This Python has no source files of its standard library in {root}. Give a file or a folder as the source.")
    return chosen


def _files_under(root: Path, is_left_out) -> list[CorpusFile]:  # is_left_out: name -> bool, for files and folders
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not is_left_out(name)]
        for name in names:
            path = Path(folder, name)
            if not is_left_out(name) and path.is_file():
                found.append(_corpus_file(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.name)


def _corpus_file(path: Path, name: str) -> CorpusFile:
    status = path.stat()
    return CorpusFile(path, name, status.st_size, status.st_mtime_ns)


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be listed: {error.strerror}. Mend it, or take it out of the corpus.") from error


def _is_binary(path: Path) -> bool:
    """Whether the beginning has a NUL byte: a huge binary file is then never read whole."""
    with path.open("rb") as file:
        return b"\0" in file.read(_SNIFFED_BYTES)


def _is_text_type(arrow, kind) -> bool:  # arrow: the lazily imported module
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)


def _no_field(file: CorpusFile, place: str, text_field: str, present: Iterable[str]) -> DataError:
    where = f"{file.path} {place}".strip()
    return DataError(f"{where} has no field {text_field!r}; it has {', '.join(sorted(present)) or 'none'}. Name one with --text-field.")
