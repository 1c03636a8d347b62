"""The bucket is scanned at its own pace."""

from mqmk.daemon.bucket.scan_clock import ScanClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def scans(clock: ScanClock, time: Time, seconds: float, *, changed: bool = False, fails: bool = False) -> list[float]:
    """When a loop that comes by every quarter of a second scans."""
    begun, times = time.now, []
    while time.now < begun + seconds:
        if clock.is_due(changed=changed):
            times.append(time.now - begun)
            if fails:
                clock.record_failure()
            else:
                clock.record_scan(found=False, reconciled=clock.is_reconcile_due)
        time.now += 0.25
    return times


def test_the_pause_grows_while_nothing_is_found_and_is_short_again_after_a_find():
    time = Time()
    clock = ScanClock(2.0, 5.0, 600.0, time)
    assert scans(clock, time, 20) == [0, 2, 5, 9.5, 14.5, 19.5]
    clock.record_scan(found=True, reconciled=False)
    assert scans(clock, time, 6) == [2, 5]


def test_a_change_is_scanned_at_once_but_not_right_after_a_failure():
    time = Time()
    clock = ScanClock(2.0, 30.0, 600.0, time)
    clock.record_scan(found=False, reconciled=True)
    assert not clock.is_due(changed=False) and clock.is_due(changed=True)
    assert scans(clock, time, 10, changed=True, fails=True) == [0, 2, 4, 6, 8]


def test_everything_is_listed_at_the_start_and_once_an_interval():
    time = Time()
    clock = ScanClock(2.0, 2.0, 600.0, time)
    assert clock.is_reconcile_due
    clock.record_scan(found=False, reconciled=True)
    time.now += 599
    assert not clock.is_reconcile_due
    time.now += 1
    assert clock.is_reconcile_due
