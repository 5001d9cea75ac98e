"""Signals: the first raises where it may, waits where it must not; the second kills."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from simic.workers.signals import SIGNALS, Stopped, StopSignals, signals_deferred


@pytest.fixture(autouse=True)
def untouched():
    """Whatever a test does, the handlers of this process come back."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_where_it_arrives(number, code):
    done = []

    def work() -> None:
        with StopSignals().watched():
            os.kill(os.getpid(), number)
            done.append("never")

    with pytest.raises(Stopped) as stopped:
        work()
    assert (stopped.value.exit_code, str(stopped.value)) == (code, number.name)
    assert done == []


def test_no_handler_of_errors_swallows_a_stop():
    assert not issubclass(Stopped, Exception)


def test_what_must_be_finished_is_finished_first():
    signals, done = StopSignals(), []

    def work() -> None:
        with signals.watched():
            with signals.held():
                with signals.held():
                    os.kill(os.getpid(), signal.SIGTERM)
                    done.append("inner")
                done.append("outer")
            done.append("never")

    with pytest.raises(Stopped):
        work()
    assert done == ["inner", "outer"]


def test_finalizers_that_fail_are_told_until_a_stop(monkeypatch):
    class HalfBuilt:
        def __del__(self) -> None:
            raise AttributeError("not yet there")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    before, signals = sys.unraisablehook, StopSignals()
    with signals.quiet():
        HalfBuilt()
        assert [str(about.exc_value) for about in told] == ["not yet there"]
        with pytest.raises(Stopped), signals.watched():
            os.kill(os.getpid(), signal.SIGTERM)
        HalfBuilt()
        assert len(told) == 1
    assert sys.unraisablehook is before
    told.clear()


def test_an_error_in_a_held_region_counts_more_than_the_signal():
    signals = StopSignals()

    def work() -> None:
        with signals.watched(), signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_a_held_region_without_a_signal_changes_nothing():
    signals = StopSignals()
    with signals.watched():
        with signals.held():
            pass
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", ["signals.held()", "contextlib.suppress(Stopped)"])
def test_the_second_signal_kills_even_where_the_first_must_wait(second, where):
    code = f"""
import contextlib, os, signal, time
from simic.workers.signals import Stopped, StopSignals
signals = StopSignals()
with signals.watched():
    with {where}:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
    os.kill(os.getpid(), signal.{second})
    time.sleep(10)
"""
    if where.startswith("signals"):
        code = code.replace("        time.sleep(0)\n    os", "        os")
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=20)
    assert ended.returncode == -getattr(signal, second)


def test_deferred_signals_are_handled_afterwards():
    """Also one that another thread receives, as blocking them in this thread would not achieve."""
    reached = []

    def work() -> None:
        with StopSignals().watched(), signals_deferred():
            thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
            thread.start()
            thread.join()
            reached.append("the end of the region")
        reached.append("never")

    with pytest.raises(Stopped, match="SIGTERM"):
        work()
    assert reached == ["the end of the region"]


def test_in_another_thread_signals_are_left_to_the_program_around():
    seen = []

    def work() -> None:
        with StopSignals().watched():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
