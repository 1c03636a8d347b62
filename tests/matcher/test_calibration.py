"""What a pool says about the certainty of its matches, as a replica reads it."""

from mqmk.matcher.calibration import read_confidence


def test_a_pool_that_says_nothing_is_read_as_nothing():
    nothing = read_confidence({}, "cascade")
    assert nothing.calibration is None and nothing.threshold is None and not nothing.reference
