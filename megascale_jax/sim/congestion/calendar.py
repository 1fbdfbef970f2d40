"""The order of events: a binary heap by time, equal times in the order in which they were asked for, so runs repeat exactly."""

from megascale_jax.sim.compiled import compiled
from megascale_jax.sim.congestion.state import FAULT, HEAP_SIZE, NO_EVENT_LEFT, ORDER, World


@compiled
def push(world: World, time: int, kind: int, item: int) -> None:
    """Have an event happen at ``time`` (ps)."""
    heap, counters = world.calendar, world.counters
    place = counters[HEAP_SIZE]
    if place == len(heap.time):
        counters[FAULT] = NO_EVENT_LEFT
        return
    order = counters[ORDER]
    counters[HEAP_SIZE] += 1
    counters[ORDER] += 1
    while place > 0:
        above = (place - 1) // 2
        if heap.time[above] <= time:
            break  # it is older, so equal times stay in order
        heap.time[place], heap.order[place] = heap.time[above], heap.order[above]
        heap.kind[place], heap.number[place] = heap.kind[above], heap.number[above]
        place = above
    heap.time[place], heap.order[place], heap.kind[place], heap.number[place] = time, order, kind, item


@compiled
def pop(world: World) -> tuple[int, int, int]:
    """The next event: time, kind, item. There must be one."""
    heap, counters = world.calendar, world.counters
    first = heap.time[0], heap.kind[0], heap.number[0]
    counters[HEAP_SIZE] -= 1
    size = counters[HEAP_SIZE]
    time, order = heap.time[size], heap.order[size]
    kind, item = heap.kind[size], heap.number[size]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            heap.time[right] < heap.time[below] or (heap.time[right] == heap.time[below] and heap.order[right] < heap.order[below])
        ):
            below = right
        if time < heap.time[below] or (time == heap.time[below] and order < heap.order[below]):
            break
        heap.time[place], heap.order[place] = heap.time[below], heap.order[below]
        heap.kind[place], heap.number[place] = heap.kind[below], heap.number[below]
        place = below
    heap.time[place], heap.order[place], heap.kind[place], heap.number[place] = time, order, kind, item
    return first
