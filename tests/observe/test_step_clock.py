"""The clock of the host gap, on a device and a time that the test controls; and on a real engine."""

from __future__ import annotations

import timeit

import jax
import jax.numpy as jnp
import pytest

from noria.observe.step_clock import StepClock, StepTimes


class World:
    """Time passes when the test says so; a program is ready at a time set beforehand."""

    def __init__(self) -> None:
        self.time = 100.0
        self.clock = StepClock(lambda: self.time)

    def dispatch(self, call: float, ready_after: float) -> Program:
        """A dispatch whose call takes `call`; its program ends `ready_after` the call began."""
        self.clock.dispatching()
        program = Program(self, self.time + ready_after)
        self.time += call
        self.clock.dispatched(program)
        return program

    def wait(self, program: Program) -> None:
        self.clock.waiting()
        self.time = max(self.time, program.end)
        self.clock.waited(program)


class Program:
    def __init__(self, world: World, end: float) -> None:
        self.world, self.end = world, end

    def is_ready(self) -> bool:
        return self.world.time >= self.end


@pytest.fixture
def world() -> World:
    return World()


def times(world: World) -> tuple[float, float]:
    found = world.clock.times
    return pytest.approx(found.wall_s), pytest.approx(found.gap_s)


def test_the_plain_loop_pays_for_all_that_the_host_does(world: World) -> None:
    for _ in range(3):
        world.clock.begin()
        world.time += 2  # scheduling, while the device has nothing to do
        program = world.dispatch(call=1, ready_after=11)
        world.wait(program)
        world.time += 3  # updating; the next begin() changes nothing
    world.clock.end()
    assert times(world) == (3 * (2 + 11 + 3), 3 * (2 + 1) + 2 * 3)  # what comes after the last step delays nobody
    assert world.clock.times.host_share == pytest.approx(15 / 48)


def test_running_ahead_costs_nothing_while_the_device_is_busy(world: World) -> None:
    world.clock.begin()
    before = world.dispatch(call=1, ready_after=10)  # ends at 110
    for end in (120, 130, 140):
        world.time += 2
        ahead = world.dispatch(call=1, ready_after=end - world.time)
        world.wait(before)
        before = ahead
    world.wait(before)
    world.clock.end()
    assert times(world) == (40, 1)  # the first dispatch


def test_a_device_found_idle_counts_since_it_was_last_seen_busy(world: World) -> None:
    world.clock.begin()
    world.dispatch(call=0, ready_after=5)  # ends at 105
    world.time = 104
    world.dispatch(call=0, ready_after=3)  # the device was busy until now; this one ends at 107
    world.time = 109
    world.dispatch(call=1, ready_after=9)
    assert times(world)[1] == 110 - 104  # an upper bound: nobody looked between 104 and 109


def test_a_program_that_runs_inside_its_dispatch_is_the_devices_time(world: World) -> None:
    world.clock.begin()
    world.time += 1
    program = world.dispatch(call=7, ready_after=7)
    world.wait(program)
    world.time += 2
    world.dispatch(call=4, ready_after=4)
    assert times(world)[1] == 1 + 2


def test_without_work_nobody_waits(world: World) -> None:
    world.clock.begin()
    world.wait(world.dispatch(call=1, ready_after=5))
    world.clock.end()
    world.time += 1000
    world.clock.end()
    world.clock.begin()
    world.wait(world.dispatch(call=1, ready_after=5))
    world.clock.end()
    assert times(world) == (10, 2)


def test_a_wait_for_an_older_program_does_not_hide_an_idle_device(world: World) -> None:
    world.clock.begin()
    old = world.dispatch(call=0, ready_after=5)
    world.dispatch(call=0, ready_after=6)
    world.time = 120  # both have long ended
    world.wait(old)
    world.dispatch(call=0, ready_after=5)
    assert times(world)[1] == 20


def test_times_since() -> None:
    assert StepTimes(5, 2).since(StepTimes(3, 1)) == StepTimes(2, 1)
    assert StepTimes().host_share == 0


def test_it_is_cheap() -> None:
    """A step is two dispatches and a wait. Far above the few microseconds it takes, since tests run beside others."""
    clock, array = StepClock(), jnp.zeros(8)
    array.block_until_ready()
    assert isinstance(array, jax.Array)

    def step() -> None:
        clock.begin()
        for _ in range(2):
            clock.dispatching()
            clock.dispatched(array)
        clock.waiting()
        clock.waited(array)

    assert min(timeit.repeat(step, number=200, repeat=5)) / 200 < 50e-6
