"""Exceptions at every point of a step where Python may run a signal handler."""

from __future__ import annotations

import dis
import inspect
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn

import compiled_optim

PACKAGE = str(Path(compiled_optim.__file__).parent)
_CALLS = frozenset(number for name, number in dis.opmap.items() if "CALL" in name)


class Interrupted(BaseException):
    """What a signal handler raises."""


class Interruption:
    """Raises at one point of what the package does: a function's beginning, a line, or where a call has returned.

    Args:
        point: which one, counted from 0 on.
    """

    def __init__(self, point: int) -> None:
        self._left = point

    def run(self, function: Callable[[], object]) -> bool:
        """Run ``function`` up to the point; whether it got there."""
        sys.settrace(self._enter)
        try:
            function()
        except Interrupted:
            return True
        finally:
            sys.settrace(None)
            # a block's end counts as a line, although no signal arrives between it and its exit
            torch.set_grad_enabled(True)
        return False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Count a function's beginning; what to call at each of its instructions."""
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if not code.co_flags & inspect.CO_GENERATOR:  # what is raised in a generator that is being closed is lost
            self._pass()
        instructions = code.co_code  # a copy: taken once, not at every instruction
        last = -1

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                if last in _CALLS:
                    self._pass()
                last = instructions[frame.f_lasti]
            elif event == "line":
                self._pass()
            return trace

        return trace

    def _pass(self) -> None:
        if self._left == 0:
            raise Interrupted
        self._left -= 1


def interrupted_steps(count: int, size: int, signals: int) -> None:
    """Interrupt steps of SGD over ``count`` tensors by a timer until so many ``signals`` arrived in a step.

    The step after each must be right. The gradients keep their memory from the interrupted step to the one after it, and
    get other values.
    """
    generator = random.Random(0)
    params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    optimizer = compiled_optim.SGD(params, lr=0.5, momentum=0.25)
    kept = []

    def give() -> None:
        kept.append([torch.full((size,), generator.uniform(1, 2)) for _ in params])
        for param, grad in zip(params, kept[-1], strict=True):
            param.grad = grad
        del kept[:-2]  # stale addresses lead to old values

    def interrupt(*_: object) -> None:
        raise Interrupted

    for _ in range(3):
        give()
        optimizer.step()
    before = signal.signal(signal.SIGALRM, interrupt)
    arrived, delay = 0, 1e-3
    try:
        for _ in range(100 * signals):
            give()
            ended = False
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, generator.uniform(0, delay)))
                optimizer.step()
                ended = True
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted as error:
                arrived += any(frame.f_code.co_filename.startswith(PACKAGE) for frame, _ in walk_tb(error.__traceback__))
            delay *= 0.5 if ended else 1.1  # near 1.1 times the duration of a step, whatever that is at the moment
            torch.set_grad_enabled(True)  # a signal in torch's own context managers leaves it off
            torch._foreach_mul_(kept[-1], -3.0)
            expected = []
            for param in params:
                momentum = 0.25 * optimizer.state[param]["momentum_buffer"] + param.grad
                expected.append(param.detach() - 0.5 * momentum)
            optimizer.step()
            wrong = torch.stack([(p - e).abs().amax() for p, e in zip(params, expected, strict=True)]).amax()
            assert wrong < 1e-4, wrong
            if arrived == signals:
                return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError(arrived)
