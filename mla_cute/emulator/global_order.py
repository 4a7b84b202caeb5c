"""Races in global memory among the warps of one launch: who wrote each byte last, and what flags have released.

Every plain store is a stamp: (cluster, agent, epoch). A plain load or store of these bytes must know it: in the writer's
cluster by the vector clocks (machine.py), from another one through a *flag*, an address of strong accesses and atomics. What
is released there is an `Event`: the clocks of all clusters that the writer knew. A cluster that acquires an event keeps it in
one of a few places behind its own agents' in every clock, so that barriers pass it on from warp to warp.

Strong accesses (volatile, relaxed, release, acquire) and atomics are not checked themselves. What is not seen: a store over
bytes that are still read, asynchronous copies, and what another launch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .taint import plain

if TYPE_CHECKING:
    from .machine import Warp

PLACES = 16  # of foreign events in a cluster's clocks; those beyond share the last, and hide races
PAGE_BITS = 16
WIDE = {"gpu", "gl", "sys"}  # scopes that reach another cluster

Event = dict[int, np.ndarray]  # number of a cluster -> clock [2, agents]


class GlobalOrder:
    """Of one launch."""

    def __init__(self):
        self.stamps: list[tuple] = [()]  # (cluster, agent, epoch, CTA's index, warp, pc); 0: nobody
        self.written: dict[int, np.ndarray] = {}  # page -> stamp of each byte
        self.flags: dict[int, tuple[Event, int | None]] = {}  # address -> what was released, to which cluster alone

    # --- plain accesses

    def read(self, w: Warp, addresses: np.ndarray, nbytes: int) -> None:
        """addresses: of the active lanes."""
        for page, index in _pages(addresses, nbytes) if self.written else ():
            if page in self.written:
                self._check(w, self.written[page][index], "reads")

    def write(self, w: Warp, addresses: np.ndarray, nbytes: int, changes: bool) -> None:
        """changes: something else stood there. Two CTAs may both store the same."""
        stamp = w.cta.cluster.number, w.agent, int(w.clock[0, w.agent]), w.cta.index, w.index, w.pc - 1
        if stamp != self.stamps[-1]:
            self.stamps.append(stamp)
        for page, index in _pages(addresses, nbytes):
            if page not in self.written:
                self.written[page] = np.zeros(1 << PAGE_BITS, np.int32)
            written = self.written[page]
            if changes:
                self._check(w, written[index], "overwrites")
            written[index] = len(self.stamps) - 1

    def _check(self, w: Warp, stamps: np.ndarray, does: str) -> None:
        for i in np.unique(stamps):
            if i and not self._knows(w, *self.stamps[i][:3]):
                *_, cta, warp, pc = self.stamps[i]
                text = f"{does} global memory that another warp has written, without knowing of it"
                w.report_place("race", text, w.machine.place_of(cta, warp, pc))

    def _knows(self, w: Warp, cluster: int, agent: int, epoch: int) -> bool:
        mine = w.cta.cluster
        if cluster == mine.number:
            return agent == w.agent or w.clock[0, agent] >= epoch
        return any(cluster in e and e[cluster][0, agent] >= epoch for e in self._known(w))

    # --- flags

    def release(self, w: Warp, address: int, parts: set[str], is_atomic: bool) -> None:
        """A strong store or an atomic: of an atomic also what the store before it has released stays in force."""
        is_wide = bool(parts & WIDE) or not parts & {"cta", "cluster"}
        clock = w.release() if parts & {"release", "acq_rel"} else (w.fenced_wide if is_wide else w.fenced)
        event = {w.cta.cluster.number: clock}
        for known in self._known(w, clock):
            event = _union(event, known)
        before, only = self.flags.get(address, ({}, None))
        if is_atomic and (only is None) == is_wide:
            event = _union(event, before)
        self.flags[address] = event, None if is_wide else w.cta.cluster.number

    def acquire(self, w: Warp, address: int, parts: set[str]) -> None:
        """A strong load or an atomic. A relaxed one acquires at the next fence."""
        if address not in self.flags:
            return
        event, only = self.flags[address]
        cluster = w.cta.cluster.number
        is_wide = bool(parts & WIDE) or not parts & {"cta", "cluster"}
        if only not in (None, cluster) or not (is_wide or list(event) == [cluster]):
            return
        if parts & {"acquire", "acq_rel"}:
            self.learn(w, event)
        else:
            w.seen.append(event)

    def learn(self, w: Warp, event: Event) -> None:
        cluster = w.cta.cluster
        if cluster.number in event:
            w.acquire(event[cluster.number])
        if len(event) - (cluster.number in event) == 0:
            return
        place = next((i for i, e in enumerate(cluster.foreign) if e is event), None)
        if place is None:
            if len(cluster.foreign) == PLACES:
                cluster.foreign[-1] = _union(cluster.foreign[-1], event)
            else:
                cluster.foreign.append(event)
            place = len(cluster.foreign) - 1
        w.clock[0, cluster.clock_size - PLACES + place] = 1

    def _known(self, w: Warp, clock: np.ndarray | None = None) -> list[Event]:
        cluster = w.cta.cluster
        known = (w.clock if clock is None else clock)[0, cluster.clock_size - PLACES :]
        return [e for e, is_known in zip(cluster.foreign, known) if is_known]


def _union(a: Event, b: Event) -> Event:
    return {n: np.maximum(a[n], b[n]) if n in a and n in b else a.get(n, b.get(n)) for n in a.keys() | b.keys()}


def _pages(addresses: np.ndarray, nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number of a page, offsets of bytes in it)"""
    at = (addresses[:, None] + np.arange(nbytes)).reshape(-1)
    pages = at >> PAGE_BITS
    for page in np.unique(pages):
        yield int(page), at[pages == page] - (int(page) << PAGE_BITS)


def active(w: Warp, addresses: np.ndarray) -> np.ndarray:
    addresses = plain(addresses)
    return addresses if w.full else addresses[w.mask]
