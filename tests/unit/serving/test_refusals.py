"""Which requests the HTTP protocol refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

from transduce.serving.app import make_app
from transduce.serving.limits import Limits
from transduce.serving.service import RunSpec, Service


def test_requests_that_arrive_at_the_same_time_do_not_share_a_place() -> None:
    async def main() -> None:
        service = Service([RunSpec(Path("x"))], limits=Limits(max_requests=2))
        _, refusals = make_app(service, log=False)

        def is_refused(method: bytes = b"POST", url: bytes = b"/v1/translate") -> bool:
            return refusals.response(method, url) is not None

        assert [is_refused() for _ in range(4)] == [False, False, True, True]
        assert not is_refused(b"GET") and not is_refused(url=b"/none") and not is_refused(url=b"/models/x")
        await asyncio.sleep(0)  # the application has begun with the first two
        with service.request():
            assert [is_refused() for _ in range(2)] == [False, True]
            service.is_draining = True  # the application answers 503
            assert not is_refused()

    asyncio.run(main())
