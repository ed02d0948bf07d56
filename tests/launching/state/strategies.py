"""Events that ranks could send, for property tests."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events


def replay(world_size: int, stored: Iterable[tuple[int, events.Event]]) -> RunState:
    """Return the state after stored events of ranks, in the order of arrival."""
    state = RunState(world_size)
    for rank, event in stored:
        state.apply(rank, event)
    return state


times = st.floats(0, 1e6)
texts = st.text(max_size=40)
counts = st.integers(0, 1000)
any_event: st.SearchStrategy[events.Event] = st.one_of(
    st.builds(events.Started, time_s=times, pid=counts),
    st.builds(
        events.Progress,
        time_s=times,
        step=counts,
        total=st.none() | counts,
        epoch=st.none() | counts,
        epochs=st.none() | counts,
        steps=counts,
        label=texts,
        device=texts,
    ),
    st.builds(
        events.StepTimes,
        time_s=times,
        steps=counts,
        seconds=st.dictionaries(st.sampled_from(events.PHASES), st.floats(0, 1e6)),
        samples=counts,
        lines=st.lists(st.builds(events.SampledLine, texts, texts, texts, texts, counts), max_size=3),
    ),
    st.builds(events.Metrics, time_s=times, step=counts, values=st.dictionaries(texts, st.floats())),
    st.builds(events.Output, time_s=times, text=texts, left_out=counts),
    st.builds(events.Display, time_s=times, data=st.just({"text/plain": "x"})),
    st.builds(events.Memory, time_s=times, used_bytes=counts, total_bytes=counts, kind=st.just("host")),
    st.builds(events.ModelMemory, time_s=times, parameters=counts, held_parameters=counts, parameter_bytes=counts),
    st.builds(
        events.Failed,
        time_s=times,
        kind=texts,
        message=texts,
        traceback=texts,
        exception=st.binary(max_size=40),
        lost_peer=st.booleans(),
    ),
    st.builds(events.Finished, time_s=times),
    st.builds(events.TimeLimitReached, time_s=times, limit=st.floats(0, 4e9)),
    st.builds(events.CheckpointSaved, time_s=times, folder=texts),
    st.builds(events.Silent, time_s=times, since_s=times, at=texts, waits_in=texts),
    st.builds(events.Restarting, time_s=times, number=st.integers(1, 99), of=st.integers(1, 99), why=texts),
    st.builds(events.Respawning, time_s=times),
    st.builds(events.Numbered, time_s=times, first_rank=counts, world_size=counts),
    st.builds(events.Nodes, time_s=times, lines=st.lists(texts, max_size=3), is_news=st.booleans()),
    st.builds(events.Serving, time_s=times, cell=texts),
    st.builds(events.Working, time_s=times, ranks=st.lists(st.integers(0, 2), max_size=3)),
    st.builds(events.Ended, time_s=times, exit_code=st.none() | counts, signal=st.none() | counts),
)
