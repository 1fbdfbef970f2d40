"""From a corpus to a prepared folder."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from megascale_jax.data import prepare as preparing
from megascale_jax.data.manifest import SPLITS, Manifest, Split, read_manifest, rows_folder
from megascale_jax.data.prepare import prepare
from megascale_jax.data.prepared import stored_rows
from megascale_jax.data.source import read_documents
from megascale_jax.data.split import document_hash, is_below
from megascale_jax.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from megascale_jax.errors import DataError
from tests.data.test_baseline import slow
from tests.data.texts import make_texts


def stream_of(folder: Path, split: Split) -> np.ndarray:
    """The token stream that the rows of a split were cut from."""
    source = stored_rows(folder, read_manifest(folder), split)
    return np.concatenate([source[0][:1], *(source[index][1:] for index in range(len(source)))])


def texts_of(folder: Path, split: Split) -> list[str]:
    """The documents of a split, decoded."""
    manifest = read_manifest(folder)
    stream = stream_of(folder, split)
    assert stream[-1] == manifest.end_of_document
    documents = np.split(stream, np.flatnonzero(stream == manifest.end_of_document) + 1)[:-1]
    return [load_tokenizer(manifest.tokenizer, folder).decode(document) for document in documents]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_document_is_whole_in_the_split_that_its_hash_says(corpus, make_prepared):
    folder = make_prepared()
    texts = [document.text for document in read_documents(str(corpus))]
    expected = {"held_out": [], "train": []}
    for text in texts:
        expected["held_out" if is_below(document_hash(text, 0), 0.25) else "train"].append(text)
    assert {split: texts_of(folder, split) for split in SPLITS} == expected
    manifest = read_manifest(folder)
    for split in SPLITS:
        counts = manifest.split(split)
        tokens = sum(len(text.encode()) + 1 for text in expected[split])
        assert (counts.documents, counts.tokens, counts.rows) == (len(expected[split]), tokens, -(-(tokens - 1) // 32))


def test_streams_are_the_same_when_cut_into_pieces(make_prepared, monkeypatch):
    whole = make_prepared("whole")
    monkeypatch.setattr(preparing, "_PIECE_TOKENS", 50)
    monkeypatch.setattr(preparing, "_DOCUMENTS_AT_ONCE", 7)
    pieces = make_prepared("pieces")
    assert contents(whole) == contents(pieces)


def test_baselines_are_those_of_the_two_streams(make_prepared):
    folder = make_prepared()
    manifest = read_manifest(folder)
    train, held_out = (stream_of(folder, split).tolist() for split in ("train", "held_out"))
    unigram, bigram, alpha = slow(train, held_out, 257, 256)
    assert (manifest.unigram_nats, manifest.bigram_nats) == pytest.approx((unigram, bigram), rel=1e-12)
    assert manifest.bigram_alpha == alpha
    assert manifest.baseline_train_tokens == manifest.train.tokens


def test_baselines_count_a_part_of_a_train_split_that_is_too_long(make_prepared, monkeypatch):
    monkeypatch.setattr(preparing, "_PIECE_TOKENS", 100)
    monkeypatch.setattr(preparing.baseline, "MAX_TRAIN_TOKENS", 1000)
    manifest = read_manifest(make_prepared())
    assert 900 < manifest.baseline_train_tokens <= 1000 < manifest.train.tokens


def test_preparing_twice_gives_equal_files_and_another_seed_another_digest(make_prepared):
    first, second, other = make_prepared("a"), make_prepared("b"), make_prepared("c", seed=1)
    assert contents(first) == contents(second)
    assert read_manifest(first).digest != read_manifest(other).digest


def test_digest_depends_on_the_sequence_length(make_prepared):
    assert read_manifest(make_prepared("a")).digest != read_manifest(make_prepared("b", sequence_length=31)).digest


def test_digest_of_equal_tokens_stays_over_layouts_of_the_folder(make_prepared):
    """A checkpoint names its data by it: this is the digest that layout version 1 had for this corpus."""
    digest = read_manifest(make_prepared()).digest
    assert digest == "c2bfa84e1237f520ffd72e6c09236af9753fb6fcaa268701a50476cde1932f3c"


def test_folder_of_an_older_layout_says_what_to_do_and_is_replaced_when_forced(make_prepared):
    folder = make_prepared()
    new = contents(folder)
    manifest = json.loads(new["manifest.json"]) | {"version": 1}
    del manifest["rows_per_file"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(folder / rows_folder(manifest["digest"]))
    (folder / "train.array_record").write_bytes(b"rows as they were")
    for look in (lambda: read_manifest(folder), make_prepared):
        with pytest.raises(DataError, match=r"layout version 1, this program reads 2.*--force"):
            look()
    make_prepared(force=True)
    assert contents(folder) == new


def test_copies_of_a_text_are_never_in_both_splits(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(40) * 3))
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", sequence_length=16, held_out_fraction=0.3)
    train, held_out = (texts_of(tmp_path / "out", split) for split in ("train", "held_out"))
    assert len(train) + len(held_out) == 120
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("variant", range(5))
def test_single_text_file_gives_its_end_to_the_held_out_split(tmp_path, variant):
    text = "".join(f"line {number}, {variant}\n" for number in range(3000))
    (tmp_path / "book.txt").write_text(text)
    prepare(str(tmp_path / "book.txt"), tmp_path / "out", sequence_length=32)
    (train,), (held_out,) = (texts_of(tmp_path / "out", split) for split in ("train", "held_out"))
    assert train + held_out == text
    assert 0.04 < len(held_out) / len(text) < 0.051


def test_held_out_gets_a_row_when_its_fraction_is_tiny(make_prepared):
    manifest = read_manifest(make_prepared(held_out_fraction=1e-9))
    assert manifest.held_out.rows >= 1
    assert manifest.held_out.tokens >= 33
    assert manifest.held_out.documents < 10


def test_bpe_is_trained_on_the_train_documents_alone_and_kept_in_the_folder(corpus, make_prepared):
    folder = make_prepared(train_bpe_vocab=300)
    texts = [document.text for document in read_documents(str(corpus))]
    train = [text for text in texts if not is_below(document_hash(text, 0), 0.25)]
    manifest = read_manifest(folder)
    assert manifest.tokenizer_digest == train_bpe(train, 300).digest != train_bpe(texts, 300).digest
    assert manifest.vocab_size == 300
    assert sorted(texts_of(folder, "train") + texts_of(folder, "held_out")) == sorted(texts)
    again = make_prepared("again", tokenizer=str(folder / manifest.tokenizer))
    assert read_manifest(again).digest == manifest.digest


def test_tokens_have_32_bits_when_the_vocabulary_is_large(make_prepared, tmp_path):
    file = tmp_path / train_bpe(make_texts(20), 300).save(tmp_path)
    content = json.loads(file.read_text())
    added = {"id": 70_000, "content": "def", "special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["model"]["vocab"]["def"] = 70_000
    content["added_tokens"].append(added)
    file.write_text(json.dumps(content))
    folder = make_prepared(tokenizer=str(file))
    assert (read_manifest(folder).dtype, read_manifest(folder).vocab_size) == ("uint32", 70_002)
    assert 70_000 in stream_of(folder, "train")
    assert 70_001 in stream_of(folder, "train")


def test_equal_request_returns_the_folder_untouched(corpus, make_prepared, monkeypatch):
    folder = make_prepared()
    monkeypatch.setattr(preparing, "_fill", None)
    before = contents(folder)
    assert make_prepared() == folder
    assert contents(folder) == before


def test_other_request_is_refused_with_the_difference_and_replaces_when_forced(make_prepared):
    folder = make_prepared()
    before = contents(folder)
    with pytest.raises(DataError, match=r"sequence_length 32 \(now 16\).*--force"):
        make_prepared(sequence_length=16)
    assert contents(folder) == before
    make_prepared(sequence_length=16, force=True)
    assert read_manifest(folder).sequence_length == 16
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_changed_corpus_is_refused_until_forced(corpus, make_prepared):
    folder = make_prepared()
    (corpus / "new.txt").write_text("new")
    with pytest.raises(DataError, match="fingerprint"):
        make_prepared()
    make_prepared(force=True)
    assert read_manifest(folder).train.documents + read_manifest(folder).held_out.documents == 61


@pytest.mark.parametrize("force", [False, True])
def test_folder_that_is_no_prepared_data_is_never_overwritten(make_prepared, tmp_path, force):
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="no prepared data"):
        make_prepared(force=force)
    assert contents(tmp_path / "prepared") == {"thesis.txt": b"years of work"}


def test_empty_folder_is_filled(make_prepared, tmp_path):
    (tmp_path / "prepared").mkdir()
    assert read_manifest(make_prepared()).train.rows > 0


def test_faster_process_with_an_equal_folder_wins(corpus, make_prepared, monkeypatch):
    original = preparing._fill
    ours: list[Manifest] = []

    def fill_slowly(*arguments):
        monkeypatch.setattr(preparing, "_fill", original)
        make_prepared()  # the other process
        ours.append(original(*arguments))
        return ours[0]

    monkeypatch.setattr(preparing, "_fill", fill_slowly)
    folder = make_prepared()
    assert read_manifest(folder) == ours[0]
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence length of 0"),
        ({"held_out_fraction": 0.0}, "held-out fraction of 0.0"),
        ({"held_out_fraction": 1.0}, "held-out fraction of 1.0"),
        ({"seed": -1}, "seed -1"),
        ({"train_bpe_vocab": 100}, "too small"),
        ({"train_bpe_vocab": 300, "tokenizer": "x.json"}, "not both"),
        ({"tokenizer": "absent.json"}, "No tokenizer"),
        ({"sequence_length": 5000}, "too short.*a row needs 5001"),
    ],
)
def test_bad_request_writes_nothing(make_prepared, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        make_prepared("deep/folder", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


@pytest.mark.parametrize("content", [b"", b"\0\1"])
def test_corpus_without_text_writes_nothing(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match="holds no text"):
        prepare(str(tmp_path), tmp_path.with_name("out"), sequence_length=8)
    assert not tmp_path.with_name("out").exists()


def test_output_inside_the_corpus_is_refused(corpus):
    with pytest.raises(DataError, match="lies in the corpus"):
        prepare(str(corpus), corpus / "out", sequence_length=8)


def test_full_disk_is_a_data_error_and_leaves_nothing(make_prepared, tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (11_000, old[1]))  # the token file fits, the rows do not
    try:
        with pytest.raises(DataError, match="cannot be written"):
            make_prepared()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_documents_without_a_token_are_counted(tmp_path):
    file = tmp_path / train_bpe(make_texts(20), 300).save(tmp_path)
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    file.write_text(json.dumps(content))
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["xxx", *make_texts(30), "x"]))
    manifest = prepare(str(source), tmp_path / "out", sequence_length=8, tokenizer=str(file), held_out_fraction=0.3)
    assert manifest.skipped == {"without a token": 2}
    assert manifest.train.documents + manifest.held_out.documents == 30
    source.write_text('{"text": "x"}\n{"text": "xx"}\n')
    with pytest.raises(DataError, match="no token"):
        prepare(str(source), tmp_path / "none", sequence_length=8, tokenizer=str(file))


def test_stdlib_bytes_have_a_bigram_that_beats_the_unigram(tmp_path):
    manifest = prepare("stdlib", tmp_path / "out", sequence_length=128)
    assert manifest.vocab_size == ByteTokenizer.vocab_size
    assert manifest.train.tokens > 5_000_000
    assert 2.0 < manifest.bigram_nats < 2.7 < 3.0 < manifest.unigram_nats < 3.6
