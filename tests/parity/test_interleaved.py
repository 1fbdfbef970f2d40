"""The cases of `test_pipeline.py` with several chunks a stage, in a file of their own so that two workers share them."""

import pytest

from tests.parity.test_pipeline import CASES, case_id, check, configured


@pytest.mark.parametrize(("shape", "remat", "kind", "delay"), [case for case in CASES if case[0][1] > 1], ids=case_id)
def test_loss_and_gradients_equal_float64_reference(shape, remat, kind, delay):
    check(kind, shape, configured(kind, shape, remat, delay))
