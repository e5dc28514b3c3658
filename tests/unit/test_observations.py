"""One array or a dict of arrays: each helper does to every leaf what numpy does to an array."""

import numpy as np
import pytest

from manyhands.trees import concat as appended
from manyhands.trees import copy_into
from manyhands.trees import stack as stacked
from manyhands.trees import take as pick

PLAIN = np.arange(12.0).reshape(4, 3)
BOTH = {"a": PLAIN, "b": np.arange(4)}


@pytest.mark.parametrize("where", [2, slice(1, 3), np.array([3, 0]), PLAIN[:, 0] > 4])
def test_at(where):
    np.testing.assert_array_equal(pick(PLAIN, where), PLAIN[where])
    found = pick(BOTH, where)
    assert set(found) == {"a", "b"}
    for key, whole in BOTH.items():
        np.testing.assert_array_equal(found[key], whole[where])


def test_copy_into_writes_where_the_target_stands():
    target = {"a": np.zeros((4, 3)), "b": np.zeros(4, int)}
    view = target["a"]
    copy_into(target, BOTH)
    np.testing.assert_array_equal(view, PLAIN)
    np.testing.assert_array_equal(target["b"], BOTH["b"])
    plain = np.zeros((4, 3))
    copy_into(plain, PLAIN)
    np.testing.assert_array_equal(plain, PLAIN)


def test_stacked_and_joined():
    rows = [pick(BOTH, i) for i in range(4)]
    np.testing.assert_array_equal(stacked(rows)["a"], PLAIN)
    np.testing.assert_array_equal(stacked([PLAIN[0], PLAIN[1]]), PLAIN[:2])
    np.testing.assert_array_equal(
        appended([pick(BOTH, slice(1)), pick(BOTH, slice(1, 4))])["a"], PLAIN
    )
    assert appended([PLAIN]) is PLAIN
