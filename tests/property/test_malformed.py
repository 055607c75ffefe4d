"""What `make fuzz` does for hours, for a moment: nearly right bytes for every decoder."""

from __future__ import annotations

import random

from tests.malformed.__main__ import feed
from tests.malformed.decoders import decoders
from tests.malformed.mutations import SIZE_MAX, Mutations

INPUTS = 20_000


def test_decoders_raise_nothing_but_their_own_errors() -> None:
    with decoders() as known:
        weights = sum(decoder.weight for decoder in known)
        for decoder in known:
            accepted, findings = feed(decoder, max(20, INPUTS * decoder.weight // weights), seed=7)
            assert findings == []
            del accepted


def test_good_examples_are_taken() -> None:
    """Else the fuzzer would only see what the first check refuses."""
    with decoders() as known:
        assert len({decoder.name for decoder in known}) == len(known) >= 15
        for decoder in known:
            for example in decoder.examples:
                if decoder.name not in {
                    "shared memory",
                    "addresses",
                    "identities",
                }:  # these name what is not there
                    decoder.decode(example)


def test_a_defect_would_be_found() -> None:
    """The driver itself: a decoder that fails at one rare byte."""
    with decoders() as known:
        headers = known[0]

        def broken(data: bytes) -> object:
            if b"\xdf" in data[:8]:
                raise ZeroDivisionError
            return headers.decode(data)

        found = feed(type(headers)("broken", broken, headers.errors, headers.examples), 5_000, seed=7)[1]
    assert found
    assert "ZeroDivisionError" in found[0]


def test_mutants_are_bounded_and_the_same_for_a_seed() -> None:
    made = [Mutations(random.Random(5), [b"abcdef" * 100, b"x"]) for _ in range(2)]
    first, second = ([one.one() for _ in range(500)] for one in made)
    assert first == second
    assert max(map(len, first)) <= SIZE_MAX
    assert len(set(first)) > 400
