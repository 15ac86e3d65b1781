from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.config import SamplingParams
from noria.engine.request import Request
from noria.scheduler.policy import Policy, WaitingQueue, order_key


def make_request(arrival: int, priority: int) -> Request:
    return Request(str(arrival), [1], SamplingParams(), key=0, priority=priority, arrival=arrival)


@settings(max_examples=40)
@given(
    policy=st.sampled_from(["fcfs", "priority"]),
    priorities=st.lists(st.integers(-2, 2), max_size=12),
    data=st.data(),
)
def test_queue_against_sorting(policy: Policy, priorities: list[int], data: st.DataObject) -> None:
    key = order_key(policy)
    queue, model = WaitingQueue(key), []
    outside = [make_request(arrival, priority) for arrival, priority in enumerate(priorities)]
    while outside or model:
        if outside and (not model or data.draw(st.booleans())):
            request = outside.pop(0)
            queue.push(request)
            model.append(request)
        else:
            request = data.draw(st.sampled_from(model))
            queue.remove(request)
            model.remove(request)
            if data.draw(st.booleans()) and len(outside) < 20:
                queue.push(request)  # as after a preemption
                model.append(request)
        model.sort(key=key)
        assert queue.peek() is (model[0] if model else None)
        assert list(queue) == model
        assert len(queue) == len(model)
