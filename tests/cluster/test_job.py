"""The journal of a job: what may go on under it, and what begins anew."""

import pytest

from megascale_jax.cluster.job import open_journal
from megascale_jax.cluster.state import Joined, Ordered, Shape
from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.errors import RunFolderError

CONFIG = ClusterConfig()
FOUR = (Shape(num_nodes=4),)
HERE = Joined(at_s=1.0, node="node-0", incarnation="x", address="10.0.0.1", ports=(20000,))


def begin(folder, *events):
    with open_journal(folder, FOUR, CONFIG) as journal:
        for event in events:
            journal.append(event)


def test_a_job_goes_on_with_what_it_began_with(tmp_path):
    begin(tmp_path, HERE)
    with open_journal(tmp_path, FOUR, CONFIG) as journal:
        assert list(journal.events()) == [HERE]


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        ((Shape(num_nodes=2),), CONFIG, "4 nodes, now 2"),
        (FOUR, ClusterConfig(grace_s=30.0, strikes=1), "cluster.grace_s 10.0, now 30.0, cluster.strikes 3, now 1"),
    ],
)
def test_other_sizes_or_settings_are_refused_while_it_is_under_way(tmp_path, shapes, config, words):
    begin(tmp_path, HERE)
    with pytest.raises(RunFolderError, match=words):
        open_journal(tmp_path, shapes, config)
    with open_journal(tmp_path, FOUR, CONFIG) as journal:
        assert list(journal.events()) == [HERE], "nothing was lost by the attempt"


def test_a_job_that_has_ended_is_kept_aside_whatever_comes_next(tmp_path):
    for number, shapes in enumerate((FOUR, (Shape(num_nodes=2),), (Shape(num_nodes=8),)), start=1):
        with open_journal(tmp_path, shapes, CONFIG) as journal:
            assert not list(journal.events())
            journal.append(HERE)
            journal.append(Ordered(at_s=2.0, action="stop", by="ada"))
        assert len(list(tmp_path.glob("journal-*.sqlite"))) == number - 1
