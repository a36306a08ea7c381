"""Ctrl-C is held back, and not lost."""

import signal
import threading

import pytest

from sbnet_cupy.demo.interrupts import held_back


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_interrupt_comes_at_the_end():
    reached = False
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens():
    with held_back():
        pass
    with pytest.raises(ImportError), held_back():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_stays():
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    with held_back():
        signal.raise_signal(signal.SIGINT)
        assert pressed


def test_a_thread_may_use_it():
    done = []

    def work():
        with held_back():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
