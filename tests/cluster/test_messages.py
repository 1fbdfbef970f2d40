"""What a node says of itself has bounds: all of it is kept in the journal and read at every start of a driver."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megascale_jax.cluster.executor_process import software
from megascale_jax.cluster.messages import FromNode, Hello

HELLO = {"kind": "hello", "node": "node-0", "incarnation": "a1", "address": "10.0.0.1", "ports": [20000], "software": {"jax": "1"}}
REPORT = {
    "rank": 0, "pid": 7, "state": "running", "exit_code": None, "signal": None, "step": 1, "section": "step", "in_section_s": 0.1,
    "longest_s": {}, "passes": {}, "loss": 1.0, "non_finite_in_a_row": 0, "saved_step": 1, "durable_step": None, "step_s": None,
    "cpu_s": 1.0, "rss_bytes": 1, "log": ["line"], "keywords": [], "is_secondary": None,
}  # fmt: skip
BEAT = {"kind": "beat", "attempt": 1, "is_idle": False, "processes": [REPORT]}
ANY = TypeAdapter(FromNode)


@pytest.mark.parametrize("address", ["10.0.0.1", "::1", "fe80::1%eth0", "node-1.cluster.local", "2001:db8::7"])
def test_what_real_nodes_send_fits(address):
    ANY.validate_python(HELLO | {"address": address, "ports": tuple(range(20000, 20016)), "software": software()}, strict=False)
    ANY.validate_json(TypeAdapter(dict).dump_json(BEAT))


@pytest.mark.parametrize(
    "harm",
    [
        {"ports": []},
        {"ports": [0]},
        {"ports": [65536]},
        {"ports": [20000] * 65},
        {"address": ""},
        {"address": "a b"},
        {"address": "x" * 256},
        {"address": "10.0.0.1\n"},
        {"incarnation": ""},
        {"incarnation": "x" * 65},
        {"software": {"jax": "x" * 256}},
        {"software": {"x" * 256: "1"}},
        {"software": {str(number): "1" for number in range(101)}},
        {"machine": "x" * 256},
        {"machine": "a\nb"},
        {"switch": "x" * 256},
        {"attempt": -1},
        {"attempt": 1 << 63},
    ],
)
def test_a_hello_beyond_its_bounds_is_refused(harm):
    Hello.model_validate_json(TypeAdapter(dict).dump_json(HELLO))
    with pytest.raises(ValidationError):
        ANY.validate_json(TypeAdapter(dict).dump_json(HELLO | harm))


@pytest.mark.parametrize(
    "harm",
    [
        {"log": ["x" * 301]},
        {"log": ["x"] * 21},
        {"section": "x" * 65},
        {"keywords": ["x" * 65]},
        {"step": 10**30},
        {"saved_step": -1},
        {"odd_ranks": [0] * 65},
        {"passes": {"x" * 65: 1}},
    ],
)
def test_a_report_beyond_its_bounds_is_refused(harm):
    with pytest.raises(ValidationError):
        ANY.validate_json(TypeAdapter(dict).dump_json(BEAT | {"processes": [REPORT | harm]}))
