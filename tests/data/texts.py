"""Generated texts for corpora."""

import random

WORDS = ("loss", "step", "rank", "Grüße", "λ", "def f(x):", "\n", "return", "  ", "0.5")


def make_texts(count: int, seed: int = 0) -> list[str]:
    """``count`` different short texts."""
    choose = random.Random(seed)
    return [f"{number} " + " ".join(choose.choices(WORDS, k=choose.randint(1, 60))) for number in range(count)]
