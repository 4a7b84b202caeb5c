"""What an emulated launch did: instruction counts by warp role, findings a person can read, a timeline for Perfetto.

`Watch` remembers the launches of a run; `Trace` is a Watch that also writes down who ran, who waited, and what was in flight.
Both are given to `run.session(trace=...)` or `run_ptx(..., trace=...)`.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import linecache
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .machine import Async, Cluster, Finding, Grid, Place, Wait, Warp
from .ptx import Instruction

# ----- instruction classes --------------------------------------------------------------------------------------------

# Opcode prefixes of each class, the longest that fits wins; everything else is math.
CLASSES = {
    "tensor": ("wgmma.mma_async", "tcgen05.mma", "tcgen05.cp", "tcgen05.shift", "mma"),
    "copy": ("cp", "st.async", "st.bulk", "red.async", "multimem", "clusterlaunchcontrol"),
    "memory": ("ld", "ldu", "st", "ldmatrix", "stmatrix", "atom", "red", "prefetch", "tcgen05.ld", "tcgen05.st"),
    "barrier": (
        *("bar", "barrier", "mbarrier", "fence", "membar", "griddepcontrol", "nanosleep", "wgmma", "tcgen05"),
        *("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "cp.async.mbarrier"),
        *("cp.async.bulk.commit_group", "cp.async.bulk.wait_group"),
    ),
    "convert": ("cvt",),
    "move": ("mov", "selp", "slct", "prmt", "cvta", "shfl", "vote", "match", "redux", "elect", "activemask", "mapa"),
    "control": ("bra", "brx", "call", "ret", "exit", "trap", "setmaxnreg", "pmevent"),
}
CLASS_NAMES = ("tensor", "copy", "memory", "barrier", "math", "convert", "move", "control")
_CLASS_OF = {prefix: name for name, prefixes in CLASSES.items() for prefix in prefixes}


def class_of(ins: Instruction) -> str:
    for n in range(len(ins.parts), 0, -1):
        found = _CLASS_OF.get(".".join(ins.parts[:n]))
        if found:
            return found
    return "math"


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions of a Python file, decorators included; none if it cannot be read."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [n for n in ast.walk(tree) if isinstance(n, kinds)]
    return [(min([n.lineno, *(d.lineno for d in n.decorator_list)]), n.end_lineno, n.name) for n in found]


@functools.cache
def function_of(source: tuple[str, int] | None) -> str:
    """The innermost Python function around a source line; "" where it is not known."""
    if source is None:
        return ""
    around = [(last - first, name) for first, last, name in _functions(source[0]) if first <= source[1] <= last]
    return min(around)[1] if around else ""


# ----- counts ---------------------------------------------------------------------------------------------------------


@dataclass
class WarpCounts:
    """Instructions that one warp of a CTA ran, in all CTAs together. An instruction counts once for its 32 lanes."""

    warp: int
    classes: dict[str, int]
    functions: dict[str, int]  # by the Python function they come from, most first

    @property
    def total(self) -> int:
        return sum(self.classes.values())


@dataclass
class KernelCounts:
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    finished: bool
    warps: list[WarpCounts]

    @property
    def total(self) -> int:
        return sum(w.total for w in self.warps)


def count(grid: Grid) -> KernelCounts:
    """The counts of a launch, whether it has ended or was stopped."""
    instructions = grid.program.kernel.instructions
    classes = [class_of(ins) for ins in instructions]
    functions = [function_of(ins.source) for ins in instructions]
    warps = []
    for warp, hits in sorted(grid.hits.items()):
        by_class, by_function = Counter(), Counter()
        for n, name, function in zip(hits, classes, functions):
            if n:
                by_class[name] += n
                by_function[function] += n
        ordered = {name: by_class[name] for name in CLASS_NAMES if by_class[name]}
        warps.append(WarpCounts(warp, ordered, dict(by_function.most_common())))
    launch, left = grid.launch, bool(grid.waiting or grid.active)
    return KernelCounts(
        launch.kernel, launch.grid, launch.block, grid.cluster_dims, launch.smem_bytes, not left, warps
    )


def roles(counts: KernelCounts) -> list[tuple[str, str, dict[str, int]]]:
    """(warps, what they mostly do, instructions by class) of the roles: runs of warps that spend most in the same function.

    Functions that every warp runs do not tell roles apart, and are left out where there are others.
    """
    everywhere = set.intersection(*(set(w.functions) for w in counts.warps)) if counts.warps else set()

    def leading(w: WarpCounts) -> str:
        own = [name for name in w.functions if name not in everywhere]
        return own[0] if own else ""

    groups: list[list[WarpCounts]] = []
    for w in counts.warps:
        if groups and leading(groups[-1][0]) == leading(w):
            groups[-1].append(w)
        else:
            groups.append([w])
    found = []
    for group in groups:
        classes, functions = Counter(), Counter()
        for w in group:
            classes.update(w.classes)
            functions.update(w.functions)
        own = Counter({name: n for name, n in functions.items() if name not in everywhere}) or functions
        own.pop("", None)
        name = ", ".join(name for name, n in own.most_common(3) if n >= 0.1 * own.total())
        first, last = group[0].warp, group[-1].warp
        found.append((str(first) if first == last else f"{first}-{last}", name, dict(classes)))
    return found


# ----- watching a run -------------------------------------------------------------------------------------------------


class Watch:
    """Remembers the launches of a run, those that were stopped as well. A base for what looks closer."""

    def __init__(self):
        self.grids: list[Grid] = []

    def launched(self, grid: Grid) -> None:
        """A launch was made; nothing of it has run."""
        self.grids.append(grid)

    def blocked(self, grid: Grid, w: Warp, wait: Wait) -> None: ...

    def resumed(self, grid: Grid, w: Warp) -> None: ...

    def issued(self, cluster: Cluster, op: Async) -> None: ...

    def finished(self, cluster: Cluster, op: Async) -> None: ...


@dataclass
class _Span:
    """What a row of the timeline is in the middle of."""

    since: int
    first: Instruction | None = None
    last: Instruction | None = None
    functions: Counter = field(default_factory=Counter)
    wait: str = ""


BARRIER_ROW = 1_000_000  # thread number of a CTA's row of barriers
TIME = "1 us is one instruction run by one warp; the warps ran one after the other, in this order"


class Trace(Watch):
    """A timeline in Chrome's trace format: CTAs are processes, warps threads, what is asynchronous has rows of its own.

    Time counts the instructions that were run, of all warps, in the order in which they were run: it says what came before
    what under this schedule, and nothing about how long a GPU would take.
    """

    def __init__(self):
        super().__init__()
        self.events: list[dict] = []
        self.now = 0
        self.warp: Warp | None = None  # that runs
        self.ins: Instruction | None = None  # that it runs
        self.processes: dict[tuple[int, tuple], int] = {}  # (launch, CTA) -> its number
        self.spans: dict[tuple[int, int], _Span] = {}  # (process, warp) -> what it is in the middle of
        self.flights: dict[Async | object, dict] = {}  # operation -> its event
        self.phases: dict[tuple, int] = {}  # barriers, as they were seen last

    # --- what the machine calls

    def launched(self, grid: Grid) -> None:
        super().launched(grid)
        program = copy.copy(grid.program)  # other launches run the same program
        pairs = zip(program.code, [*program.kernel.instructions, None])
        program.code = [self._traced(body, ins) for body, ins in pairs]
        grid.program, grid.number = program, len(self.grids) - 1

    def blocked(self, grid: Grid, w: Warp, wait: Wait) -> None:
        self._end(w)
        self.spans[self._row(w)] = _Span(self.now, self.ins, self.ins, wait=wait.text())

    def resumed(self, grid: Grid, w: Warp) -> None:
        self._end(w)
        self.warp = w
        self.spans[self._row(w)] = _Span(self.now)

    def issued(self, cluster: Cluster, op: Async) -> None:
        self._fly(op, op.name)

    def finished(self, cluster: Cluster, op: Async) -> None:
        self._land(op)
        self._look_at_barriers(cluster)

    # --- instructions

    def _traced(self, body, ins: Instruction | None):
        """The closure of an instruction that also moves the clock. ins None: the end of the program."""
        opcode = ins.opcode if ins else "exit"
        function = function_of(ins.source) if ins else ""
        after = None
        if opcode.startswith("wgmma"):
            after = self._look_at_wgmma
        elif opcode.startswith(("bar", "mbarrier", "cp.async.mbarrier", "tcgen05")):
            after = lambda w: self._look_at_barriers(w.cta.cluster)  # noqa: E731
        ends = opcode.startswith(("exit", "ret"))

        def run(w: Warp):
            self.now += 1
            self.warp, self.ins = w, ins
            span = getattr(w, "span", None)
            if span is None:  # its first instruction, or the first behind a wait
                span = w.span = self.spans.setdefault(self._row(w), _Span(self.now - 1))
            if ins:
                span.first, span.last = span.first or ins, ins
                span.functions[function] += 1
            if getattr(w, "flying", None):
                self._look_at_wgmma(w)  # those that a wait has completed
            wait = body(w)
            if after:
                after(w)
            if ends and w.done:
                self._end(w)
            return wait

        return run

    def _look_at_wgmma(self, w: Warp) -> None:
        """wgmmas are kept by the warp, not by its cluster: those that are new, and those that have been computed."""
        known = w.__dict__.setdefault("flying", [])
        if w.wgmma and w.wgmma.open:
            op = w.wgmma.open[-1]
            if "traced" not in op.__dict__:
                op.traced = True
                known.append(op)
                self._fly(op, "wgmma")
        for op in [op for op in known if op.done]:
            known.remove(op)
            self._land(op)

    def _look_at_barriers(self, cluster: Cluster) -> None:
        """Instants for the barriers that have completed a phase since the last look."""
        for cta in cluster.ctas:
            process = self._process(cta)
            states = [(f"mbarrier {b.offset:#x}", "phase", b.phase) for b in cta.mbarriers.values()]
            states += [(f"barrier {i}", "round", b.round) for i, b in enumerate(cta.named)]
            if len(cluster.ctas) > 1:
                states.append(("barrier.cluster", "round", cluster.barrier.round))
            for name, word, value in states:
                key = process, name
                if value != self.phases.get(key, 0):
                    self.phases[key] = value
                    self._event("i", f"{name} {word} {value - 1}", process, BARRIER_ROW, cat="barrier", s="t")

    # --- events

    def _event(self, phase: str, name: str, process: int, thread: int, **more) -> dict:
        event = {"ph": phase, "name": name, "pid": process, "tid": thread, "ts": self.now, **more}
        self.events.append(event)
        return event

    def _process(self, cta) -> int:
        grid = cta.cluster.grid
        key = grid.number, cta.index
        if key not in self.processes:
            number = self.processes[key] = len(self.processes) + 1
            name = f"launch {grid.number}, {grid.launch.kernel}, CTA {cta.index}"
            order = (grid.number, *reversed(cta.index))
            self._event("M", "process_name", number, 0, args={"name": name})
            self._event("M", "process_sort_index", number, 0, args={"sort_index": _mixed(order, grid.launch.grid)})
            for w in cta.warps:
                self._event("M", "thread_name", number, w.index, args={"name": f"warp {w.index}"})
                self._event("M", "thread_sort_index", number, w.index, args={"sort_index": w.index})
            self._event("M", "thread_name", number, BARRIER_ROW, args={"name": "barriers complete"})
        return self.processes[key]

    def _row(self, w: Warp) -> tuple[int, int]:
        if "row" not in w.__dict__:
            w.row = self._process(w.cta), w.index
        return w.row

    def _end(self, w: Warp) -> None:
        w.span = None
        row = self._row(w)
        span = self.spans.pop(row, None)
        if span:
            self._write_span(row, span)

    def _write_span(self, row: tuple[int, int], span: _Span) -> None:
        if span.wait:
            name, _, state = span.wait.partition(": ")
            args = {"waits for": span.wait.removeprefix("waits for "), "state when it began": state, "at": _line(span.first)}
            self._span_event(row, span, name, "wait", args)
        elif self.now > span.since:
            functions = span.functions.most_common(1)
            args = {"instructions": sum(span.functions.values()), "from": _line(span.first), "to": _line(span.last)}
            self._span_event(row, span, functions[0][0] if functions and functions[0][0] else "runs", "run", args)

    def _span_event(self, row, span: _Span, name: str, cat: str, args: dict) -> None:
        event = {"ph": "X", "name": name, "cat": cat, "pid": row[0], "tid": row[1]}
        self.events.append({**event, "ts": span.since, "dur": self.now - span.since, "args": args})

    def _fly(self, op, name: str) -> None:
        process, thread = self._row(self.warp)
        args = {"issued by": f"warp {thread}", "at": _line(self.ins)}
        more = {"cat": "async", "id": f"{len(self.events):#x}", "args": args}
        self.flights[op] = self._event("b", name, process, thread, **more)

    def _land(self, op) -> None:
        begin = self.flights.pop(op, None)
        if begin:
            self._event("e", begin["name"], begin["pid"], begin["tid"], cat="async", id=begin["id"])

    def json(self) -> dict:
        """The trace as Chrome's JSON object. What a stopped launch left unfinished ends now."""
        for row, span in list(self.spans.items()):
            self._write_span(row, span)
        self.spans.clear()
        for op in list(self.flights):
            self.flights[op]["args"]["unfinished"] = True
            self._land(op)
        return {"traceEvents": self.events, "displayTimeUnit": "ns", "otherData": {"time": TIME}}

    def write(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(self.json()))


def _mixed(order: tuple[int, ...], grid: tuple[int, int, int]) -> int:
    """One number that sorts like (launch, z, y, x)."""
    launch, z, y, x = order
    return launch * 10**6 + min((z * grid[1] + y) * grid[0] + x, 10**6 - 1)


def _line(ins: Instruction | None) -> str:
    if ins is None:
        return ""
    return (f"{Path(ins.source[0]).name}:{ins.source[1]}, " if ins.source else "") + f"PTX line {ins.line}: {ins.text}"


# ----- a run, and the text about it -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of the op under one schedule."""

    schedule: int
    seed: int
    policy: str
    seconds: float
    errors: dict[str, float]  # largest absolute difference by output; empty if it was stopped
    wrong: list[str]  # what is not as the reference has it
    findings: list[Finding]
    kernels: list[KernelCounts]

    @property
    def stopped(self) -> bool:
        return not all(k.finished for k in self.kernels)

    @property
    def instructions(self) -> int:
        return sum(k.total for k in self.kernels)

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.findings or self.stopped)


COLUMNS = f"{'schedule':<8}  {'policy':<6}  {'seconds':>7}  {'instructions':>12}  {'out error':>9}  {'lse error':>9}  result"


def row(o: Outcome) -> str:
    """A line of the table of schedules, under COLUMNS."""
    n = len(o.findings)
    said = ["stopped"] * o.stopped + ["WRONG"] * bool(o.wrong) + [some(n, "finding")] * bool(n)
    cells = [f"{o.schedule:<8}", f"{o.policy:<6}", f"{o.seconds:7.1f}", f"{o.instructions:12,}"]
    cells += [f"{o.errors[name]:9.2g}" if name in o.errors else f"{'-':>9}" for name in ("out", "lse")]
    return "  ".join([*cells, ", ".join(said) or "ok"])


def describe(place: Place | None, root: Path | None = None) -> list[str]:
    """A place in lines: the Python line, the PTX line, who. Paths are shown relative to `root`."""
    if place is None:
        return ["nowhere in particular"]
    lines = []
    if place.source:
        file, number = place.source
        code = linecache.getline(file, number).strip()
        lines.append(f"{_relative(file, root)}:{number}" + (f"   {code}" if code else ""))
    text = place.text if len(place.text) < 100 else place.text[:97] + "..."
    lines.append(f"PTX line {place.ptx_line}: {text}")
    who = f"warp {place.warp}" if place.warp >= 0 else "asynchronous work that an mbarrier counts"
    lines.append(f"{who} of CTA {place.cta}, {place.kernel}")
    return lines


def _relative(file: str, root: Path | None) -> str:
    root = root or Path.cwd()
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file


def findings_text(outcomes: list[Outcome]) -> str:
    """Every finding with the schedules that have it. Those of the same Python lines, as of an unrolled loop, are one."""
    merged: dict[tuple, list[tuple[Finding, int]]] = {}
    for o in outcomes:
        for f in o.findings:
            key = f.kind, f.place and f.place.kernel, _spot(f.place), _spot(f.other)
            merged.setdefault(key, []).append((f, o.schedule))
    lines = []
    for i, group in enumerate(merged.values(), 1):
        first, where = group[0][0], sorted({n for _, n in group})
        pairs = len({(f.place and f.place.ptx_line, f.other and f.other.ptx_line) for f, _ in group})
        said = f"schedule{'s' * (len(where) > 1)} {', '.join(map(str, where))}"
        said += f"; {pairs} times in the PTX, one of them" if pairs > 1 else ""
        lines.append(f"{i}. {first.kind} ({said}): {first.message}")
        lines += _indented("at", describe(first.place))
        if first.other:
            lines += _indented("against", describe(first.other))
    return "\n".join(lines)


def _spot(place: Place | None) -> tuple | int | None:
    """The Python line of a place, its PTX line where that is not known."""
    return place and (place.source or place.ptx_line)


def _indented(word: str, lines: list[str]) -> list[str]:
    return [f"   {word if i == 0 else '':<8}{line}" for i, line in enumerate(lines)]


def counts_text(kernels: list[KernelCounts]) -> str:
    """Tables of instructions by warps and class, a kernel each."""
    lines = []
    for k in kernels:
        dims = f"{some(_product(k.grid), 'CTA')} of {_product(k.block)} threads"
        dims += f", clusters of {_product(k.cluster)}" if _product(k.cluster) > 1 else ""
        lines.append(f"{k.kernel}: {dims}" + ("" if k.finished else "; did not end"))
        found = roles(k)
        names = [name for name in CLASS_NAMES if any(name in classes for _, _, classes in found)]
        lines.append(f"  {'warps':<7}{'all':>9}" + "".join(f"{name:>9}" for name in names) + "  mostly in")
        for warps, what, classes in found:
            numbers = [sum(classes.values()), *(classes.get(name, 0) for name in names)]
            lines.append(f"  {warps:<7}" + "".join(f"{short(n):>9}" for n in numbers) + f"  {what}")
    return "\n".join(lines)


def some(n: int, thing: str) -> str:
    """1 block, 2 blocks"""
    return f"{n} {thing}{'s' * (n != 1)}"


def short(n: int) -> str:
    """12345 -> 12.3k"""
    if n < 10_000:
        return str(n)
    return f"{n / 1000:.1f}k" if n < 1_000_000 else f"{n / 1e6:.2f}M"


def _product(dims: tuple[int, ...]) -> int:
    n = 1
    for d in dims:
        n *= d
    return n


def as_dict(o: Outcome) -> dict:
    """For JSON."""
    kernels = [asdict(k) | {"instructions": k.total} for k in o.kernels]
    plain = asdict(o) | {"kernels": kernels, "instructions": o.instructions, "stopped": o.stopped}
    # NaN is no JSON.
    plain["errors"] = {name: e if e == e and abs(e) != float("inf") else str(e) for name, e in o.errors.items()}
    return plain
