def why() -> None:
    """x."""
