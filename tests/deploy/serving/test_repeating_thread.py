import threading

from mqmk.deploy.serving.repeating_thread import RepeatingThread


def test_it_acts_again_at_once_when_asked_and_never_after_its_end():
    acts = threading.Semaphore(0)
    slow = RepeatingThread("slow", acts.release, seconds=60)
    slow.start()
    assert acts.acquire(timeout=20)
    slow.run_now()
    assert acts.acquire(timeout=20)
    assert slow.alive
    slow.stop()
    assert not slow.alive


def test_it_acts_again_and_again():
    acts = threading.Semaphore(0)
    fast = RepeatingThread("fast", acts.release, seconds=0.01, lower_priority=5)
    fast.start()
    assert all(acts.acquire(timeout=20) for _ in range(5))
    fast.stop()
    while acts.acquire(blocking=False):
        pass
    assert not acts.acquire(timeout=0.1)


def test_what_is_asked_for_while_it_acts_is_done_next():
    began, may_end, acts = threading.Event(), threading.Event(), threading.Semaphore(0)

    def act() -> None:
        began.set()
        assert may_end.wait(20)
        acts.release()

    thread = RepeatingThread("busy", act, seconds=60)
    thread.start()
    assert began.wait(20)
    thread.run_now()
    may_end.set()
    assert acts.acquire(timeout=20)
    assert acts.acquire(timeout=20)
    thread.stop()
