"""`megascale events`: what it shows, what it refuses, and that hostile names stay text."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from megascale_jax.cli.main import app
from megascale_jax.errors import RunFolderError, UsageError
from megascale_jax.observe import event_segments
from megascale_jax.observe.events import Events

HOSTILE = "\x1b[31mred\x07[bold]markup[/bold]\u202etxt"


@pytest.fixture
def run(tmp_path):
    out = Events(tmp_path / "events", rank=2, attempt=1)
    out.record("step", 10, 5, step=1, text=HOSTILE)
    out.many(name=HOSTILE, lane="compute", begin_ns=np.arange(300), device=0, step=2)
    out.close()
    return tmp_path


def said(*words):
    result = CliRunner().invoke(app, ["events", *map(str, words)], terminal_width=300)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_processes_are_listed(run, tmp_path):
    path = tmp_path / "list.json"
    text = said(run, "--json", path)
    assert "trainer-00002-" in text and "whole" in text
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["events"], row["attempt"], row["lost"], row["files"], row["state"]) == (302, 1, 0, 1, "whole")


def test_a_cut_file_is_named(run):
    (path,) = (run / "events").glob("*.arrows")
    path.write_bytes(path.read_bytes()[:-100])
    text = said(run)
    assert "cut" in text and f"note: {path.name}: " in text


def test_of_another_host_it_is_not_said_that_it_writes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(event_segments, "boot_id", lambda: "another")
    out = Events(tmp_path / "events", rank=3)
    out.instant("a")
    assert out.flush(60)
    (path,) = (run / "events").glob("trainer-00003*")
    content = path.read_bytes()
    assert "writes" in said(run), "the lock speaks here"
    out.close()
    path.write_bytes(content[:-3])
    text = said(run)
    assert "unknown" in text and "writes" not in text and f"note: {path.name}: " in text


def test_hostile_texts_are_shown_and_not_obeyed(run):
    text = said(run, "--sql", "select name, text from events where text is not null and name = 'step'")
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "\\x1b[31mred\\x07[bold]markup[/bold]\\u202etxt" in text


def test_a_query_prints_some_rows_and_writes_all(run, tmp_path):
    path = tmp_path / "rows.json"
    text = said(run, "--sql", "select begin_ns from events where step = 2 order by begin_ns", "--limit", 5, "--json", path)
    assert "5 of 300 rows" in text
    assert [row["begin_ns"] for row in json.loads(path.read_text())["rows"]] == list(range(300))
    assert "no rows" in said(run, "--sql", "select * from events where step = 77")


def test_every_type_of_sql_is_written(run, tmp_path):
    path = tmp_path / "rows.json"
    columns = {
        "sum(duration_ns)": 5,
        "1.5::decimal(4, 1)": 1.5,
        "make_timestamp_ns(1234567890123456789)": "2009-02-13T23:31:30.123456",
        "timestamptz '2026-01-02 03:04:05+00'": "2026-01-02T03:04:05+00:00",
        "date '2026-01-02'": "2026-01-02",
        "time '03:04:05'": "03:04:05",
        "interval 90 second": {"months": 0, "days": 0, "nanoseconds": 90 * 10**9},
        "'a'::blob": "61",
        "[2::hugeint]": [2],
        "{'a': 3::hugeint}": {"a": 3},
        "'nan'::double": None,
    }
    words = ", ".join(f"{word} as c{number}" for number, word in enumerate(columns))
    said(run, "--sql", f"select {words} from events where name = 'step'", "--json", path)
    assert json.loads(path.read_text())["rows"] == [{f"c{number}": value for number, value in enumerate(columns.values())}]


def test_columns_of_one_name_are_refused(run):
    with pytest.raises(UsageError, match="columns of one name in the query's result: name; give each its own"):
        said(run, "--sql", "select name, name, step from events")


def test_a_wrong_query_and_a_wrong_folder_are_usage_errors(run, tmp_path):
    with pytest.raises(UsageError, match="the view events has the columns"):
        said(run, "--sql", "select * from '/etc/passwd'")
    with pytest.raises(RunFolderError, match="has no folder events"):
        said(tmp_path / "nothing")
    with pytest.raises(UsageError, match="has no folder events"):
        said("compact", tmp_path / "nothing")


def test_compaction_says_what_it_did(run):
    assert "1 segments with 302 events are Parquet now; 0 files" in said("compact", run)
    assert "0 segments with 0 events are Parquet now; 2 files are over the limits" in said("compact", run, "--keep-mb", 0)
