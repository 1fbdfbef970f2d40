"""What a GPU-hour costs, on which day: an input, never a default. One file a price in ``configs/price``."""

from datetime import date
from typing import Annotated

from pydantic import Field, field_validator

from megascale_jax.config.schema import Section


class Price(Section):
    """A price of one GPU for an hour."""

    price_per_gpu_hour: Annotated[float, Field(gt=0)] = Field(description="of one GPU with its share of the node")
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = Field(default="USD", description="three letters, ISO 4217")
    date: str = Field(description="day on which the price held, YYYY-MM-DD")
    device: Annotated[str, Field(min_length=1)] = Field(description="which GPU, and of which offer")
    source: Annotated[str, Field(min_length=1)] = Field(description="where the price is from")

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str) -> str:
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError as error:
            raise ValueError(f"got {value!r}, expected a day as YYYY-MM-DD") from error
