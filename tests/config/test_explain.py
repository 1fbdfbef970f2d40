from typing import Annotated, Literal

import pytest
from pydantic import Field

from megascale_jax.config.explain import dotted_keys, expectation
from megascale_jax.config.schema import Experiment, Fraction, Positive, Window

Bounded = Annotated[float, Field(gt=0, le=2.5)]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (Positive, "an integer >= 1"),
        (Positive | None, "an integer >= 1 or null"),
        (Fraction, "a number >= 0 and < 1"),
        (Bounded | None, "a number > 0 and <= 2.5 or null"),
        (Literal["a", "b"], "a or b"),
        (Window | tuple[Window, ...], "an integer >= 1 or full or a list of (an integer >= 1 or full)"),
        (str | None, "a string or null"),
        (bool, "true or false"),
        (Experiment, "a mapping"),
    ],
)
def test_expectation_says_what_a_type_accepts(annotation, words):
    assert expectation(annotation) == words


def test_every_leaf_of_the_schema_has_a_description():
    def undescribed(section, prefix=""):
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield f"{prefix}{name}"

    assert list(undescribed(Experiment)) == []
    assert len(set(dotted_keys(Experiment))) == len(dotted_keys(Experiment)) > 50
