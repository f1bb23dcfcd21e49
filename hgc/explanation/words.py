"""An explanation as sentences and one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hgc.backends.simulator.numbers import seconds, size
from hgc.explanation.result import Findings
from hgc.passes.sharding.search.judged import Judged, in_words

_SAME = 0.005
"""Steps that differ by less are as fast."""
_FEW = 60
"""Characters of a plan in the table at most."""
Row = tuple[str, str, str, str, str, str]
HEADER: Row = ("", "plan", "step", "against this", "rows/s", "memory")


def text(found: Findings) -> str:
    """Where time and memory go, why, and the table of other plans."""
    why = [f"  {sentence}" for sentence in sentences(found)]
    return "\n".join([str(found.simulation), "", "Why", *why, "", "Other plans", *_aligned([HEADER, *rows(found)])])


def sentences(found: Findings) -> Iterator[str]:
    """Each is true of any plan, found by a search or written by hand."""
    yield _against_the_search(found)
    yield from _elsewhere(found)
    yield _what_binds(found)
    yield _memory(found)
    yield _bound(found)


def _against_the_search(found: Findings) -> str:
    if found.searched is None:
        return f"the search finds no plan to compare with: {found.why_not}"
    best, simulated = found.searched.best, len(found.searched.judged)
    ratio = best.step_s / found.step_s
    if found.fullness > 1:
        return f"this plan does not fit; the best that does is {in_words(best.plan)}, {ratio:.3g} times as long"
    if abs(ratio - 1) < _SAME:
        words = "is the fastest" if in_words(best.plan) == in_words(found.plan) else f"is as fast as {in_words(best.plan)}, the fastest"
        return f"of {simulated} plans that the search simulated this one {words}"
    if ratio > 1:
        return f"no plan that the search simulated is as fast: {in_words(best.plan)} takes {ratio:.3g} times as long"
    return f"the search finds a faster plan: {in_words(best.plan)} takes {ratio:.3g} times as long"


def _elsewhere(found: Findings) -> Iterator[str]:
    """A plan that only the searches for other settings have come across."""
    fitting = [each for each in found.seen if each.fits]
    fastest = min(fitting, key=lambda each: each.step_s, default=None)
    best_s = min([found.step_s, *([found.searched.best.step_s] if found.searched else [])])
    if fastest is not None and fastest.step_s < best_s * (1 - _SAME):
        ratio = fastest.step_s / found.step_s
        yield f"searches with other pins or less memory came across a faster plan: {in_words(fastest.plan)}, {ratio:.3g} times as long"


def _what_binds(found: Findings) -> str:
    parts, step_s = found.simulation.parts, found.step_s
    shares = {
        "computing": (parts.compute_s + parts.optimizer_s) / step_s,
        "communication": parts.exposed_s / step_s,
        "the bubble of the pipeline": parts.bubble_s / step_s,
    }
    most = max(shares, key=lambda name: shares[name])
    gains = ", ".join(f"{each.what} twice as fast would save {1 - each.step_s / step_s:.0%}" for each in found.faster)
    split = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _SAME)
    return f"{most} binds most: {split} of the step; {gains}"


def _memory(found: Findings) -> str:
    used = f"the fullest device uses {found.fullness:.0%} of its memory"
    more = found.budgets[0] if found.budgets else None
    best = found.searched.best if found.searched else None
    if more is None or more.found is None or best is None:
        return used
    ratio = more.found.step_s / best.step_s
    if ratio < 1 - _SAME:
        return f"{used}, and memory binds: with twice as much the best plan, {in_words(more.found.plan)}, takes {ratio:.3g} times as long"
    return f"{used}, and memory does not bind: with twice as much no faster plan is found"


def _bound(found: Findings) -> str:
    if found.searched is None:
        return "nothing is proven about other plans"
    outcome = found.searched.outcome
    return (
        f"proven by the search's own costs: no plan of its space takes less than {seconds(outcome.lower_bound_s)}, and its best takes "
        f"{seconds(outcome.found[0].plan.step_s)}, {outcome.gap:.1%} more ({outcome.searched} of {outcome.searched + outcome.left_out} "
        "problems were solved, bounds rule out the others)"
    )


# -- the table --------------------------------------------------------------------------------------------------------------------------


def rows(found: Findings) -> Iterator[Row]:
    """This plan, the best without each of its decisions, the best with other memory and other batches."""
    predicted = found.simulation
    rate = f"{found.batch / found.step_s:.3g}"
    yield "this plan", _short(in_words(found.plan)), seconds(predicted.step_s), "1", rate, size(predicted.peak_bytes)
    for each in found.alternatives:
        values = "/".join(map(str, each.values))
        yield _row(found, f"not {each.part} {values}", found.batch, each.found, each.why_not)
    for setting in found.budgets:
        yield _row(found, f"memory {size(setting.memory_bytes)}", setting.batch, setting.found, setting.why_not)
    for setting in found.batches:
        yield _row(found, f"batch {setting.batch}", setting.batch, setting.found, setting.why_not)


def _row(found: Findings, what: str, batch: int, judged: Judged | None, why_not: str) -> Row:
    if judged is None:
        return what, why_not, "", "", "", ""
    ratio = f"{judged.step_s / found.step_s:.3g}"
    return what, _short(in_words(judged.plan)), seconds(judged.step_s), ratio, f"{batch / judged.step_s:.3g}", size(judged.memory_bytes)


def _short(text: str) -> str:
    return text if len(text) <= _FEW else f"{text[: _FEW - 3]}..."


def _aligned(table: Sequence[Row]) -> Iterator[str]:
    """Reasons why there is no plan run over the columns of numbers."""
    widths = [max(len(row[column]) for row in table if row[2] or column == 0) for column in range(len(HEADER))]
    for row in table:
        if not row[2]:
            yield f"  {row[0]:<{widths[0]}}  {row[1]}".rstrip()
            continue
        left = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:2], widths[:2], strict=True))
        yield f"  {left}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[2:], widths[2:], strict=True))
