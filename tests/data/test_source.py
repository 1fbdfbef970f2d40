"""Documents of text, JSONL, Parquet, folders and the standard library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from megascale_jax.data.source import Document, open_corpus, read_documents
from megascale_jax.errors import DataError


def read(source: Path | str, text_field: str = "text") -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in read_documents(str(source), text_field)]


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_stdlib_gives_library_sources_without_tests_and_packages():
    corpus = open_corpus("stdlib")
    documents = list(corpus.documents())
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    assert corpus.read_bytes == corpus.total_bytes > 5_000_000
    assert documents == list(open_corpus("stdlib").documents())


def test_text_file_is_one_document_when_it_has_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo".encode())
    assert read(path) == [("a.txt", "one\r\n\r\ntwo")]


def test_folder_is_read_recursively_by_name_when_it_holds_many_kinds(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "x.md").write_text("x")
    (tmp_path / "a.py").write_text("a = 1")
    write_jsonl(tmp_path / "d.jsonl", [{"text": "first"}, {"text": "second"}])
    parquet.write_table(arrow.table({"text": ["third"]}), tmp_path / "e.parquet")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert read(tmp_path) == [
        ("a.py", "a = 1"),
        ("b/c/x.md", "x"),
        ("d.jsonl:1", "first"),
        ("d.jsonl:2", "second"),
        ("e.parquet:1", "third"),
    ]


def test_binary_undecodable_and_empty_files_are_counted_when_beside_text(tmp_path):
    (tmp_path / "text.txt").write_text("good")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "late_nul.txt").write_bytes(b"a" * 20_000 + b"\0")
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus.documents()) == [Document("text.txt", "good")]
    assert corpus.skipped == {"binary": 2, "not UTF-8": 1, "empty": 1}


@pytest.mark.parametrize("content", [b"", b"\0\1\2", b"\xff\xfe"])
def test_corpus_without_text_is_refused_when_it_is_empty_or_binary(tmp_path, content):
    (tmp_path / "only").write_bytes(content)
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path)


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="no files"):
        read(tmp_path)


def test_missing_source_is_refused_with_what_is_expected(tmp_path):
    with pytest.raises(DataError, match=r"No corpus at .*stdlib"):
        open_corpus(str(tmp_path / "absent"))


def test_jsonl_takes_the_named_field_and_skips_what_is_no_text(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"body": "one", "text": 3}, {"body": ""}, {"body": None}, {"body": "\ud800"}, {"body": "two"}]
    )
    path.write_bytes(path.read_bytes() + b"\n" + b'{"body": "\xff"}\n')
    corpus = open_corpus(str(path), "body")
    assert [document.text for document in corpus.documents()] == ["one", "two"]
    assert corpus.skipped == {"empty": 2, "not UTF-8": 2}
    assert corpus.read_bytes == corpus.total_bytes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a JSON list"),
        ('{"txt": "a"}', "no field 'text'; it has txt"),
        ('{"text": 1}', "is a int"),
    ],
)
def test_jsonl_is_refused_with_the_line_when_a_record_is_wrong(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl")


def test_parquet_streams_all_row_groups_and_counts_nulls(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text {number}" for number in range(1000)] + [None, ""]
    parquet.write_table(arrow.table({"text": texts, "other": range(1002)}), path, row_group_size=300)
    corpus = open_corpus(str(path))
    assert [(document.name, document.text) for document in corpus.documents()] == [(f"a.parquet:{n + 1}", texts[n]) for n in range(1000)]
    assert corpus.skipped == {"empty": 2}


def test_parquet_reads_dictionary_encoded_strings(tmp_path):
    column = arrow.array(["x", "y", "x"]).dictionary_encode()
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    assert [text for _, text in read(tmp_path / "a.parquet")] == ["x", "y", "x"]


def test_parquet_is_refused_when_damaged_or_without_a_text_column(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(DataError, match="no readable Parquet"):
        read(path)
    parquet.write_table(arrow.table({"n": [1]}), path)
    with pytest.raises(DataError, match="no field 'text'; it has n"):
        read(path)
    with pytest.raises(DataError, match="column 'n' is int64"):
        read(path, "n")


def test_fingerprint_changes_when_a_file_does_and_not_when_the_folder_moves(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "a.txt").write_text("a")
    before = open_corpus(str(old)).fingerprint
    new = old.rename(tmp_path / "new")
    assert open_corpus(str(new)).fingerprint == before
    stamp = (new / "a.txt").stat().st_mtime_ns
    (new / "a.txt").write_text("ab")
    os.utime(new / "a.txt", ns=(stamp, stamp))
    assert open_corpus(str(new)).fingerprint != before
    (new / "a.txt").write_text("b")
    os.utime(new / "a.txt", ns=(stamp + 1, stamp + 1))
    assert open_corpus(str(new)).fingerprint != before


def test_preparing_modules_do_not_import_jax_or_grain():
    code = (
        "import sys, megascale_jax.data.prepare, megascale_jax.data.select, megascale_jax.cli.data;"
        "print([name for name in ('jax', 'grain', 'pyarrow', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
