"""Pairing where tiles lie in one tier with where they lie in the other, carrier by carrier."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from strideweave import CPU
from strideweave.carriers.tiled_evictable.store import Places, by_carrier
from strideweave.carriers.tiled_evictable.transfers import _matched

CARRIERS = [CPU(1) for _ in range(3)]


def places(assigned, base):
    """Tiles by the number of the carrier that each lies in; None as ``which`` where one has them all."""
    found = []
    for number in sorted(set(assigned)):
        which = np.flatnonzero(np.array(assigned) == number)
        whole = len(which) == len(assigned)
        found.append(Places(None if whole else which, CARRIERS[number], base + which * 10))
    return found


@given(tiles=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_every_tile_goes_from_its_place_to_its_place_once(tiles):
    sources, destinations = [one for one, _ in tiles], [other for _, other in tiles]
    found = []
    for source, starts, destination, at in _matched(places(sources, 1000), places(destinations, 5000)):
        found += [
            (source, start, destination, to) for start, to in zip(starts.tolist(), at.tolist(), strict=True)
        ]
    expected = [
        (CARRIERS[one], 1000 + 10 * tile, CARRIERS[other], 5000 + 10 * tile)
        for tile, (one, other) in enumerate(tiles)
    ]
    assert sorted(found, key=lambda item: item[1]) == expected


def test_places_that_are_given_tile_by_tile_are_sorted_by_their_carrier():
    one, other, _ = CARRIERS
    found = by_carrier([(one, 3), (other, 5), (one, 1)])
    assert [(carrier, which.tolist(), starts.tolist()) for which, carrier, starts in found] == [
        (one, [0, 2], [3, 1]),
        (other, [1], [5]),
    ]
    assert by_carrier([]) == []
