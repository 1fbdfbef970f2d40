"""Documents of fleets and prices: the shipped ones, and what is said of a wrong one."""

from datetime import date
from pathlib import Path

import pytest
from yaml import safe_load

from megascale_jax.config import search
from megascale_jax.config.fleet import Fleet, init_s
from megascale_jax.config.load import load_document
from megascale_jax.config.price import Price
from megascale_jax.errors import ConfigError

SHIPPED = search.names("fleet", search.config_trees())
PRICES = search.names("price", search.config_trees())


def changed(tmp_path: Path, old: str, new: str, name: str = "megascale") -> Path:
    """A shipped document with a line changed."""
    text = SHIPPED[name].read_text()
    assert old in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new, 1))
    return file


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_fleet_is_read_and_says_of_every_number_where_it_is_from(name):
    fleet = load_document("fleet", name, Fleet)
    sources = [*fleet.kinds.values(), *fleet.correlated.values(), fleet.recovery, fleet.checkpoint]
    for one in sources:
        assert any(word in one.source for word in ("published", "derived", "assumed")), one


def test_rates_are_the_published_ones():
    rates = {name: load_document("fleet", name, Fleet).failures_per_1000_node_days for name in SHIPPED}
    assert rates["meta-rsc-1"] == 6.5 and rates["meta-rsc-2"] == 2.34
    assert rates["llama3-405b"] == pytest.approx(3.79, abs=0.005)
    assert 2.3 <= rates["megascale"] <= 3.7
    assert 24 * 1000 / (rates["byterobust"] * 1200) == pytest.approx(2.78, abs=0.005)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    failures_per_1000_node_days: 2.86\n", "", "kinds.restart.failures_per_1000_node_days: missing, expected a number >= 0"),
        ("failures_per_1000_node_days: 2.86", "failures_per_1000_node_days: -1", "failures_per_1000_node_days: got -1, expected a number"),
        ("    shows: exit", "    shows: bang", "kinds.restart.shows: got 'bang', expected exit or hang or silent or corrupt"),
        ("    heals: 0.0", "    heals: 1.5", "kinds.restart.heals: got 1.5, expected a number >= 0 and <= 1"),
        ("    heals: 0.0", "    heal: 0.0", "unknown key kinds.restart.heal; did you mean kinds.restart.heals?"),
        ("  storage_read_gbps: 40", "  storage_read_gbps: -40", "checkpoint.storage_read_gbps: got -40, expected a number > 0"),
        ("  diagnose_s: 120\n", "", "recovery.diagnose_s: missing"),
        ("correlated:", "corelated:", "unknown key corelated; did you mean correlated?"),
        ("    group_nodes: 64", "    group_nodes: 0", "correlated.tor_switch.group_nodes: got 0, expected an integer >= 1"),
        ("  tor_switch:", "  restart:", "restart is a kind and a correlated event"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, old, new, said):
    file = changed(tmp_path, old, new)
    with pytest.raises(ConfigError) as error:
        load_document("fleet", str(file), Fleet)
    assert str(file) in str(error.value) and said in str(error.value)


def test_an_unknown_fleet_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'megascale'"):
        load_document("fleet", "megscale", Fleet)


def test_start_of_processes_is_linear_between_sizes():
    recovery = load_document("fleet", "llama3-405b", Fleet).recovery
    assert [init_s(recovery, gpus) for gpus in (16384, 19456, 22528, 131072)] == [200, 250, 300, 1200]
    assert init_s(recovery, 8) == 0.0, "not below 0"


@pytest.mark.parametrize("name", PRICES)
def test_a_shipped_price_has_its_day_and_source(name):
    price = load_document("price", name, Price)
    assert date.fromisoformat(price.date) and "published" in price.source and price.price_per_gpu_hour > 0


def test_a_price_without_a_day_is_refused(tmp_path):
    file = tmp_path / "price.yaml"
    for day, said in (("", "date: missing"), ("date: soon\n", "date: got 'soon'"), ("date: '2024-13-01'\n", "YYYY-MM-DD")):
        file.write_text(f"price_per_gpu_hour: 2\ndevice: X\nsource: made\n{day}")
        with pytest.raises(ConfigError, match=said):
            load_document("price", str(file), Price)
    assert isinstance(safe_load(PRICES["aws-capacity-block-h100"].read_text())["date"], str)
