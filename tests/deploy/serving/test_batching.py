"""How single items become batches."""

import asyncio
import threading
import time

import pytest

from mqmk.deploy.serving.batching import Batcher


def run(batcher: Batcher, scene):
    async def play():
        try:
            return await scene()
        finally:
            batcher.close()

    return asyncio.run(play())


def test_what_came_while_the_model_was_busy_is_the_next_batch():
    sizes = []

    def slow(_, items):
        sizes.append(len(items))
        time.sleep(0.05)
        return [item * 10 for item in items]

    batcher = Batcher(slow, max_batch=8)

    async def scene():
        return await asyncio.gather(*(batcher.submit("same", [number]) for number in range(20)))

    assert run(batcher, scene) == [[number * 10] for number in range(20)]
    assert max(sizes) == 8
    assert sum(sizes) == 20


def test_a_lone_item_does_not_wait():
    batcher = Batcher(lambda _, items: items, max_batch=8)

    async def scene():
        began = time.perf_counter()
        for number in range(20):
            assert await batcher.submit("same", [number]) == [number]
        return time.perf_counter() - began

    assert run(batcher, scene) < 1


def test_with_a_wait_company_is_awaited():
    sizes = []
    batcher = Batcher(lambda _, items: (sizes.append(len(items)), items)[1], max_batch=8, wait_seconds=0.1)

    async def scene():
        async def later(number):
            await asyncio.sleep(number * 0.01)
            return await batcher.submit("same", [number])

        await asyncio.gather(*(later(number) for number in range(4)))

    run(batcher, scene)
    assert sizes == [4]


def test_no_batch_mixes_two_keys_and_everybody_gets_its_own_answer():
    def compute(key, items):
        time.sleep(0.002)
        return [(key, item) for item in items]

    batcher = Batcher(compute, max_batch=4)

    async def scene():
        jobs = [(number % 3, [number, -number]) for number in range(30)]
        found = await asyncio.gather(*(batcher.submit(key, items) for key, items in jobs))
        return [(key, [(key, item) for item in items]) for key, items in jobs], found

    expected, found = run(batcher, scene)
    assert [row for _, row in expected] == found


def test_an_error_reaches_those_of_its_batch_and_no_other():
    def compute(key, items):
        if key == "bad":
            raise ValueError("no")
        return items

    batcher = Batcher(compute, max_batch=4)

    async def scene():
        results = await asyncio.gather(
            *(batcher.submit(key, [key]) for key in ("good", "bad", "good", "bad")), return_exceptions=True
        )
        return results, await batcher.submit("good", ["still"])

    results, still = run(batcher, scene)
    assert results[0] == results[2] == ["good"]
    assert isinstance(results[1], ValueError)
    assert still == ["still"]


def test_a_request_that_gave_up_is_not_computed():
    go, seen = threading.Event(), []

    def compute(_, items):
        seen.extend(items)
        go.wait(5)
        return items

    batcher = Batcher(compute, max_batch=1)

    async def scene():
        first = asyncio.create_task(batcher.submit("same", ["first"]))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.submit("same", ["gave up"]), 0.05)
        last = asyncio.create_task(batcher.submit("same", ["last"]))
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, last)

    assert run(batcher, scene) == [["first"], ["last"]]
    assert seen == ["first", "last"]
