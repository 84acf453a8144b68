"""Which work a service takes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from transduce.errors import SettingsError
from transduce.serving.limits import Admission, Limits, OverloadedError


def test_requests_and_tokens_beyond_the_limits_are_refused_until_others_end() -> None:
    admission = Admission(Limits(max_requests=2, max_tokens=100))
    with ExitStack() as stack:
        stack.enter_context(admission.request())
        stack.enter_context(admission.tokens(90))
        with admission.request(), pytest.raises(OverloadedError, match="too much text"), admission.tokens(11):
            pass
        with admission.request(), admission.tokens(10), pytest.raises(OverloadedError, match="too many requests"):
            stack.enter_context(admission.request())
        with admission.tokens(1000, refuse=False):  # more work of a request of which some has been done
            assert admission.n_tokens == 1090
    assert (admission.n_requests, admission.n_tokens) == (0, 0)
    with pytest.raises(SettingsError, match=r"up to 101 tokens .* at most 100"), admission.tokens(101):
        pass
