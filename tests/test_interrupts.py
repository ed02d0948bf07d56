"""Interrupts are held back, allowed and raised at named points, and leave what they strike whole."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from notebook_accel.interrupts import Interrupts, Latch, allowed, check, held, interrupt
from tests.interrupting import every_step, kernel_handler  # noqa: F401 - a fixture

_DEADLINE_S = 10.0
pytestmark = pytest.mark.usefixtures("kernel_handler")


def test_waiters_go_on_when_the_latch_is_set() -> None:
    latch = Latch()
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(latch.wait(_DEADLINE_S)), daemon=True) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    assert not latch.is_set
    latch.set()
    for waiter in waiters:
        waiter.join(_DEADLINE_S)
    assert seen == [True] * 5
    latch.set()  # again
    assert latch.is_set and latch.wait(0) and latch.wait()


@pytest.mark.parametrize("timeout_s", [0.001, 0, -1.0])
def test_wait_that_times_out_returns_false_and_leaves_nothing_behind(timeout_s: float) -> None:
    latch = Latch()
    assert not latch.wait(timeout_s)
    assert not latch._waiters


def test_several_threads_can_set_it() -> None:
    for _ in range(200):
        latch = Latch()
        setters = [threading.Thread(target=latch.set) for _ in range(4)]
        for setter in setters:
            setter.start()
        assert latch.wait(_DEADLINE_S)
        for setter in setters:
            setter.join(_DEADLINE_S)


def test_interrupt_at_any_step_of_waiting_leaves_the_latch_whole() -> None:
    steps = 0
    for interrupting in every_step(1):
        latch = Latch()
        steps += interrupting.call(lambda latch=latch: latch.wait(0.001))  # type: ignore[misc]
        setter = threading.Thread(target=latch.set, daemon=True)
        setter.start()
        setter.join(_DEADLINE_S)
        assert not setter.is_alive(), f"after an interrupt at step {steps}, setting it waits for ever"
        assert latch.wait(_DEADLINE_S)
    assert steps > 20


def test_an_interrupt_ends_the_waiting() -> None:
    latch = Latch()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not latch._waiters:
            time.sleep(0)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        latch.wait(_DEADLINE_S)
    thread.join(_DEADLINE_S)
    latch.set()
    assert latch.is_set


@pytest.mark.parametrize("times", [1, 2])
def test_what_has_begun_is_ended_wherever_an_interrupt_strikes(times: int) -> None:
    ends = set()
    for interrupting in every_step(times, __file__):
        done: list[str] = []

        def act(done: list[str] = done) -> None:
            with held():
                done.append("taken")
                try:
                    done.append("used")
                finally:
                    done.append("given back")

        was_interrupted = interrupting.call(act)
        assert was_interrupted == interrupting.has_come
        assert done in ([], ["taken", "used", "given back"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ends.add((was_interrupted, bool(done)))
    assert ends == {(True, False), (True, True), (False, True)}


def test_code_of_the_users_is_ended_and_what_ends_it_is_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held() as interrupts:
        try:
            with interrupts.allowed():
                done.append("began")
                signal.raise_signal(signal.SIGINT)
                done.append("went on")
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("tidied up")
    assert done == ["began", "tidied up"]


def test_what_is_held_again_in_allowed_code_is_not_broken() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held(), allowed():
        with held():
            signal.raise_signal(signal.SIGINT)
            done.append("sent")
        done.append("went on")
    assert done == ["sent"]


def test_named_points_raise_what_is_held_and_nothing_outside() -> None:
    check()
    with allowed():
        check()
    for point in (check, lambda: allowed().__enter__()):
        with pytest.raises(KeyboardInterrupt), held():
            signal.raise_signal(signal.SIGINT)
            point()
            raise AssertionError("went on")


def test_another_signal_interrupts_as_sigint_does_even_where_that_is_ignored() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: interrupt())
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt), held() as interrupts:
                signal.raise_signal(signal.SIGTERM)
                assert interrupts.has_pending
                with interrupts.allowed():
                    raise AssertionError("went on")
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_one_that_has_come_is_raised_in_the_end_and_two_clicks_are_one() -> None:
    woken: list[bool] = []
    with pytest.raises(KeyboardInterrupt) as raised, held() as interrupts:
        with interrupts.waking(lambda: woken.append(True)), held() as same:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert same is interrupts and woken == [True]
            taken = interrupts.take()
            assert taken is not None and not interrupts.has_pending and interrupts.take() is None
        interrupts.add(EOFError())
    assert taken is raised.value and woken == [True]
    with pytest.raises(EOFError), held():
        signal.raise_signal(signal.SIGINT)
        raise EOFError


def test_handler_of_the_users_does_what_it_did() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with held() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.has_pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [signal.SIGINT]


def test_other_threads_hold_nothing_back() -> None:
    handlers: list[object] = []

    def act() -> None:
        with held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_another_thread_holds_what_is_noted_for_it() -> None:
    noted = Interrupts()
    seen: list[bool] = []

    def act() -> None:
        with held(noted), held() as same:
            seen.append(same is noted)
            noted.add(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                same.check()
        with held() as other:
            seen.append(other is noted)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert seen == [True, False]
