"""The barriers of csrc/cuda/gemm_sm90.cuh under random interleavings: nothing deadlocks or is mixed up.

A model, not the kernel: its threads (scheduler, the two that load, the two consumers) are generators
that wait at, and arrive at, barriers with the rules of mbarrier (a phase ends when all have arrived
and all bytes have landed; a wait by parity takes the phase before the last for this one). Who changes
the order of waits and arrivals there changes it here; the three faults show that the model sees them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

SCHEDULE = 4  # D3_SCHEDULE
RUNS = 1500


class Fault(Exception):
    """What a real run would answer with a hang, an illegal instruction or wrong numbers."""


@dataclass
class Barrier:
    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, expected: int = 0) -> None:
        if self.pending == 0:
            raise Fault("arrival beyond the count of a phase")
        self.pending -= 1
        self.land(-expected)

    def land(self, landed: int) -> None:
        self.bytes -= landed
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


Wait = tuple[Barrier, int]
Thread = Iterator[Wait | None]


@dataclass
class Tile:
    number: int
    operands: int  # how many of C and E
    steps: int
    diagonal: bool  # A is not loaded


@dataclass
class Block:
    """One thread block, as built. `early` True: consumers read C before they have the turn; `counted` False:
    the scheduler forgets the stages of C and E; `turns` False: consumers do not take turns."""

    random: random.Random
    early: bool = False
    counted: bool = True
    turns: bool = True
    loads: list[tuple[Barrier, int, int, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.random
        self.stages = r.choice((5, 6))
        most = r.choice((0, 1, 1, 2, 2))
        self.tiles = [
            Tile(
                i, min(most, r.choice((1, 2))), r.choice((1, 1, 2, 3, 4, 5, 6, 9)), r.random() < 0.3
            )
            for i in range(r.randint(1, 14))
        ]
        self.full = [Barrier(2) for _ in range(self.stages)]
        self.empty = [Barrier(1) for _ in range(self.stages)]
        self.turn = [Barrier(1) for _ in range(2)]
        self.tile_full = [Barrier(1) for _ in range(SCHEDULE)]
        self.tile_empty = [Barrier(3) for _ in range(SCHEDULE)]
        self.entries: list[tuple[Tile | None, int]] = [(None, 0)] * SCHEDULE
        self.content: list[list[object]] = [[None, None] for _ in range(self.stages)]
        self.readers = [0] * self.stages
        self.finished: list[int] = []

    def schedule(self) -> Thread:
        stage = 0
        for count in range(len(self.tiles) + 2):  # one end for each consumer
            entry = count % SCHEDULE
            tile = self.tiles[count] if count < len(self.tiles) else None
            yield self.tile_empty[entry], count // SCHEDULE % 2 ^ 1
            self.entries[entry] = (tile, stage)
            self.tile_full[entry].arrive()
            yield None
            stage += tile.operands * self.counted + tile.steps if tile else 0

    def load(self, barrier: Barrier, stage: int, half: int, what: object) -> None:
        if self.readers[stage % self.stages]:
            raise Fault("a load into a stage that is being read")
        self.loads.append((barrier, stage % self.stages, half, what))

    def produce(self, half: int) -> Thread:
        """Half 0 loads A, half 1 B, both their half of C and E."""
        stage = 0
        for number in range(len(self.tiles)):
            yield self.tile_full[number % SCHEDULE], number // SCHEDULE % 2
            tile, _ = self.entries[number % SCHEDULE]
            assert tile is not None
            self.tile_empty[number % SCHEDULE].arrive()
            for i in range(tile.operands):
                slot = stage % self.stages
                yield self.empty[slot], stage // self.stages % 2 ^ 1
                self.full[slot].arrive(1)
                yield None
                self.load(self.full[slot], stage, half, (number, "CE"[i]))
                yield None
                stage += 1
            for k in range(tile.steps):
                slot = stage % self.stages
                yield self.empty[slot], stage // self.stages % 2 ^ 1
                loads = not (half == 0 and tile.diagonal)
                self.full[slot].arrive(int(loads))
                yield None
                if loads:
                    self.load(self.full[slot], stage, half, (number, k))
                    yield None
                stage += 1

    def read(self, stage: int, what: object, halves: tuple[int, ...]) -> None:
        self.readers[stage % self.stages] += 1
        if any(self.content[stage % self.stages][h] != what for h in halves):
            raise Fault("a stage holds something else")

    def release(self, stage: int) -> None:
        self.readers[stage % self.stages] -= 1
        self.empty[stage % self.stages].arrive()

    def consume(self, w: int) -> Thread:
        turn_parity = int(w == 0)
        for number in range(w, len(self.tiles), 2):
            yield self.tile_full[number % SCHEDULE], number // SCHEDULE % 2
            tile, stage = self.entries[number % SCHEDULE]
            assert tile is not None
            self.tile_empty[number % SCHEDULE].arrive()
            if self.turns and not self.early:
                yield self.turn[w], turn_parity
            for i in range(tile.operands):
                yield self.full[stage % self.stages], stage // self.stages % 2
                self.read(stage, (number, "CE"[i]), (0, 1))
                yield None
                self.release(stage)
                yield None
                stage += 1
            if self.turns and self.early:
                yield self.turn[w], turn_parity
            turn_parity ^= 1
            for k in range(tile.steps):
                yield self.full[stage % self.stages], stage // self.stages % 2
                self.read(stage, (number, k), (1,) if tile.diagonal else (0, 1))
                yield None
                if k == tile.steps - 1 and self.turns:
                    self.turn[1 - w].arrive()
                    yield None
                if k > 0:
                    self.release(stage - 1)
                    yield None
                stage += 1
            self.release(stage - 1)
            for _ in range(self.random.randint(0, 6)):  # the epilogue
                yield None
            self.finished.append(number)

    def run(self) -> None:
        """One interleaving, in which some threads and the memory may be slow."""
        r = self.random
        threads = [
            self.schedule(),
            self.produce(0),
            self.produce(1),
            self.consume(0),
            self.consume(1),
        ]
        speed = {thread: r.choice((0.02, 0.2, 1, 1)) for thread in threads}
        memory = r.choice((0.05, 0.3, 1))
        waits: dict[Thread, Wait | None] = dict.fromkeys(threads)
        while waits:
            ready = [t for t, wait in waits.items() if wait is None or wait[0].passed(wait[1])]
            weights = [speed[t] for t in ready] + [memory] * bool(self.loads)
            if not weights:
                raise Fault("deadlock")
            index = r.choices(range(len(weights)), weights)[0]
            if index == len(ready):
                barrier, slot, half, what = self.loads.pop(r.randrange(len(self.loads)))
                self.content[slot][half] = what
                barrier.land(1)
                continue
            try:
                waits[ready[index]] = next(ready[index])
            except StopIteration:
                del waits[ready[index]]
        assert sorted(self.finished) == list(range(len(self.tiles)))


def test_no_interleaving_deadlocks_or_mixes_stages_up():
    for seed in range(RUNS):
        Block(random.Random(seed)).run()


@pytest.mark.parametrize(
    "fault",
    [{"early": True}, {"counted": False}, {"turns": False}],
    ids=lambda f: next(iter(f)),
)
def test_the_model_sees(fault):
    with pytest.raises(Fault):
        for seed in range(RUNS):
            Block(random.Random(seed), **fault).run()
