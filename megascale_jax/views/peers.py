"""How those that do the same work differ: each beside the median of the others. Arrays [step, stage, peer] of float64; NaN: not known."""

import numpy as np

_MANY = 64
"""Peers beyond which it makes no difference to leave one out of a spread."""
_MAD = 1.4826
_MEDIAN_ERROR = 1.2533


def by_stage(seconds: np.ndarray) -> np.ndarray:
    """[step, pipe, data, tensor] as [step, stage, peer]."""
    return seconds.reshape(*seconds.shape[:2], -1)


def median(values: np.ndarray) -> np.ndarray:
    """Over the first axis, of what is known; NaN where nothing is."""
    return _sorted_medians(np.sort(values, axis=0), 0)


def _sorted_medians(ordered: np.ndarray, axis: int) -> np.ndarray:
    count = (~np.isnan(ordered)).sum(axis=axis, keepdims=True)
    low, high = np.maximum((count - 1) // 2, 0), np.maximum(count // 2, 0)
    middle = [np.take_along_axis(ordered, np.minimum(at, ordered.shape[axis] - 1), axis) for at in (low, high)]
    return np.squeeze((middle[0] + middle[1]) / 2, axis)


def beside_peers(values: np.ndarray) -> np.ndarray:
    """Of values [..., peer] the difference to the median of the others, NaN where there is none; NaNs are nobody's peers."""
    order = np.argsort(values, axis=-1)
    ordered = np.take_along_axis(values, order, -1)
    others = (~np.isnan(ordered)).sum(axis=-1, keepdims=True) - 1
    at, last = np.arange(values.shape[-1]), values.shape[-1] - 1
    middle = [np.minimum(np.maximum(number, 0) + (at <= number), last) for number in ((others - 1) // 2, others // 2)]
    medians = (np.take_along_axis(ordered, middle[0], -1) + np.take_along_axis(ordered, middle[1], -1)) / 2
    result = np.empty_like(values)
    np.put_along_axis(result, order, np.where(others > 0, ordered - medians, np.nan), -1)
    return result


def excess_over_peers(seconds: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Of seconds [step, stage, peer] how much longer they are than the median of the others (0.1: 10 %); NaN where that is not known.

    ``more``: what `beside_peers` says of them.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = seconds / (seconds - more) - 1
    relative[~np.isfinite(relative)] = np.nan
    return relative


def deviation(relative: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Standard deviation of a peer's excess where it is like the others, float64[stage, peer].

    ``relative``: its excess [step, stage, peer]; ``over``: the median of that. The larger of two: the error of a median over the steps, and
    how far the medians of the others are from each other.
    """
    steps = np.maximum((~np.isnan(relative)).sum(axis=0), 1)
    within = median(median(np.abs(relative - over)).T)[:, None] * _MEDIAN_ERROR * _MAD / np.sqrt(steps)
    return np.fmax(within, _MAD * _peers_spread(over))


def _peers_spread(over: np.ndarray) -> np.ndarray:
    """Median absolute deviation of every device's peers, float64[stage, peer]; one peer has none."""
    count = over.shape[1]
    if count > _MANY:
        return np.broadcast_to(median(np.abs(over - median(over.T)[:, None]).T)[:, None], over.shape)
    peers = np.where(np.eye(count, dtype=bool), np.nan, over[:, None, :])
    middle = np.moveaxis(peers, -1, 0)
    return np.nan_to_num(median(np.abs(middle - median(middle))))
