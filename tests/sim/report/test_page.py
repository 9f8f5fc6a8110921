"""The page of a comparison: readable for one policy and for twenty, whole, and true to the runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from msgspec import structs

from coordinator.engine.state.accounting import Quantiles
from coordinator.sim.report.fairness import FinishTimeFairness
from coordinator.sim.report.measures import MEASURES, Group, best, shown, told
from coordinator.sim.report.page import Heading, page
from coordinator.sim.report.panels import COLORED, NONE_TOGETHER, cast
from coordinator.sim.report.samples import Sample
from coordinator.sim.report.style import COLORS, DASHES, mark
from coordinator.sim.run.compare import means
from coordinator.sim.run.play import JobRow, Run, RunResult

HEADING = Heading(workload="w", cluster="1 x 8 V100", jobs=2)


def result(policy: str, jct_s: float = 7200.0, **figures: object) -> RunResult:
    """A run in numbers: mean JCT as named, and some queueing."""
    base = RunResult(
        policy=policy,
        seed=1,
        jobs=2,
        queueing_s=Quantiles(mean=jct_s / 2, p50=jct_s / 3, p95=jct_s),
        jct_s=Quantiles(mean=jct_s, p50=jct_s / 2, p95=2 * jct_s),
        training_gpu_ratio=0.5,
        overall_gpu_ratio=0.5,
        on_loan_gpu_ratio=0.0,
        preemptions=0,
        preempted_jobs_ratio=0.0,
        lost_gpu_s=0.0,
        reclaims=0,
        reclaims_late=0,
        jct_bound_s=60.0,
        events=10,
        wall_s=0.1,
        peak_rss_bytes=1,
        makespan_s=10_000.0,
        finish_time_fairness=FinishTimeFairness(mean=1.0, max=jct_s / 3600.0, share_above_1=0.5),
    )
    return structs.replace(base, **figures)


def played(found: RunResult) -> Run:
    """With two jobs, and two points over time."""
    rows = tuple(
        JobRow(
            job_id=f"j{number}",
            submitted_at_s=0.0,
            started_at_s=1.0,
            finished_at_s=number * found.jct_s.mean,
            queueing_s=1.0,
            jct_s=number * found.jct_s.mean,
            gpus=8,
            min_workers=1,
            max_workers=1,
            preemptions=0,
            resizes=0,
            was_on_loan=False,
            suspensions=0,
            suspended_s=0.0,
            migrations=0,
            app=f"j{number}",
            rho=0.5 * number,
        )
        for number in (1, 2)
    )
    samples = tuple(
        Sample(
            at_s=at_s,
            training_gpu_ratio=0.5,
            on_loan_gpu_ratio=0.0,
            lent_nodes=0,
            lendable_nodes=0,
            queue_jobs=1,
            queue_gpus=8,
        )
        for at_s in (0.0, 10_000.0)
    )
    return Run(result=found, rows=rows, samples=samples)


def drawn(*results: RunResult) -> str:
    """The page of these runs."""
    return page(HEADING, [played(each) for each in results])


def policies(count: int) -> list[RunResult]:
    """So many, the last one the quickest."""
    return [result(f"policy-{number:02d}", 7200.0 * (count - number)) for number in range(count)]


class Page(HTMLParser):
    """What a page holds: elements with their attributes, and whether all are closed in order."""

    EMPTY = ("meta", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.found.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """It closes what was opened last."""
        assert self.open.pop() == tag

    def ticked(self) -> list[str]:
        """Who begins in color."""
        boxes = [attrs for tag, attrs in self.found if tag == "input"]
        return [attrs["id"] or "" for attrs in boxes if "checked" in attrs]


def panels(text: str) -> dict[str, list[str]]:
    """Names of the rows of each panel of bars, from the top."""
    found: dict[str, list[str]] = {}
    for figure in re.findall(r"<figure><h3>([^<]*) <small>.*?</figure>", text):
        part = text[text.index(f"<h3>{figure} <small>") :].split("</figure>")[0]
        found[figure] = re.findall(r'<b title="([^"]*)"', part)
    return found


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_page_is_whole_and_loads_nothing(count: int) -> None:
    """Elements are closed in their order; no script, nothing from outside, no number is missing."""
    text = drawn(*policies(count))
    found = Page(text)
    assert found.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.found}
    assert not any({"src", "href", "onclick"} & set(attrs) for _, attrs in found.found)
    assert "url(" not in text
    assert "@import" not in text
    assert "NaN" not in text


def test_ids_are_not_used_twice_and_every_label_has_its_box() -> None:
    """Whatever one clicks on ticks one policy."""
    found = Page(drawn(*policies(20))).found
    ids = [attrs["id"] for _, attrs in found if "id" in attrs]
    assert len(ids) == len(set(ids)) == 21  # and the one for all
    assert {attrs["for"] for _, attrs in found if "for" in attrs} <= set(ids)


def test_twenty_are_told_apart_by_color_and_dash() -> None:
    """No two have the same line."""
    assert len({mark(place) for place in range(20)}) == 20
    assert COLORS * len(DASHES) >= 20


def test_few_begin_in_color_and_of_many_the_first_and_the_best() -> None:
    """Of twenty lines in color nobody sees one."""
    assert len(Page(drawn(*policies(COLORED))).ticked()) == COLORED
    who = cast(means(policies(20)))
    assert who.colored <= COLORED
    in_color = {row.policy for row, place in zip(who.rows, who.places, strict=True) if place < 2}
    assert in_color == {"policy-00", "policy-19"}
    assert sorted(who.places) == list(range(20))


def test_one_alone_has_numbers_and_lines_but_nobody_beside_it() -> None:
    """No bars of one, no list to pick from; its lines are in color."""
    text = drawn(result("fifo"))
    assert panels(text) == {}
    assert 'class="list"' not in text
    assert Page(text).ticked() == ["k0"]


def test_bars_stand_in_order_the_best_on_top() -> None:
    """Less is better of times, more is better of use."""
    rows = (
        result("slow", 9000.0, training_gpu_ratio=0.9),
        result("quick", 5000.0, training_gpu_ratio=0.2),
        result("middle", 7000.0, training_gpu_ratio=0.5),
    )
    found = panels(drawn(*rows))
    assert found["JCT, mean"] == ["quick", "middle", "slow"]
    assert found["Training GPUs held"] == ["slow", "middle", "quick"]


def test_one_far_beyond_all_others_leaves_their_bars_long() -> None:
    """It is cut, and the panel says so; its number is whole."""
    rows = [result(f"p{hours}", 3600.0 * hours) for hours in (2, 3, 4, 500)]
    panel = drawn(*rows).split("<h3>JCT, mean <small>")[1].split("</figure>")[0]
    assert panel.startswith("h, less is better, long bars cut")
    widths = [float(width) for width in re.findall(r'<i style="width:([0-9.]+)%"', panel)]
    assert widths == sorted(widths)
    assert widths[0] == pytest.approx(100 * 2 / 14, abs=0.01)
    assert widths[-1] == 100.0
    assert panel.count(" cut") == 2  # the word above, and one bar
    assert "<s>500.0</s>" in panel


def test_rows_without_any_share_a_line() -> None:
    """Ten empty bars tell less than their names."""
    idle = [result(f"p{number}") for number in range(NONE_TOGETHER)]
    text = drawn(*idle, result("busy", preemptions=7))
    assert panels(text)["Preemptions"] == ["busy"]
    assert f"<strong>0</strong> of {', '.join(row.policy for row in idle)}</p>" in text


def test_what_nobody_has_is_left_out_and_what_is_zero_is_said() -> None:
    """No deadline: no column. No preemption: a word, not a column of noughts."""
    measures, zero = told(means([result("a"), result("b")]))
    figures = {each.measure.figure for each in measures}
    assert "deadlines_met_ratio" not in figures
    assert "Deadlines met" not in zero
    assert "preemptions" not in figures
    assert "Preemptions" in zero
    assert "Zero throughout: " in drawn(result("a"), result("b"))


def test_the_best_number_is_marked_unless_most_have_it() -> None:
    """As it is shown: who differs in digits that nobody sees is as good."""
    [jct, *_] = told(means([result("a")]))[0]
    assert best(jct, {0: 7200.0, 1: 7200.1, 2: 9000.0, 3: 9100.0}) == {0, 1}
    assert best(jct, {0: 7200.0, 1: 7200.0, 2: 9000.0}) == set()
    assert best(jct, {0: 7200.0}) == set()
    text = drawn(result("a", 7200.0), result("b", 9000.0))
    assert '<td class="best">2.00</td><td class="best">1.00</td>' in text


def test_a_measure_has_one_unit_for_all_rows() -> None:
    """That of most rows; what is too small for its digits is not called zero."""
    rows = means([result("a", 4.0), result("b", 7200.0), result("c", 9000.0)])
    jct = shown(next(each for each in MEASURES if each.figure == "jct_s.mean"), rows)
    assert (jct.unit, [jct.number(row.figures["jct_s.mean"].mean) for row in rows]) == (
        "h",
        ["<0.01", "2.00", "2.50"],
    )
    assert jct.number(0.0) == "0"
    seconds = shown(jct.measure, means([result("a", 4.0), result("b", 5.0)]))
    assert seconds.text(4.0) == "4.00 s"


def test_every_measure_is_a_figure_of_a_run_and_the_short_ones_are_what_was_asked_for() -> None:
    """Completion, queueing, makespan, use, fairness, deadlines, preemptions, loss."""
    full = result("a", deadlines_met_ratio=1.0)
    known = means([full])[0].figures
    missing = {each.figure for each in MEASURES} - set(known)
    # None without loans, without a promise, and without sjf beside it
    loans = {"on_loan_jobs.jct_s.mean", "reclaim.gentle_ratio"}
    assert missing == {*loans, "promised", "promises_missed", "gap_closed_ratio"}
    short = [each.figure for each in MEASURES if each.group == Group.SHORT]
    assert [figure.partition(".")[0] for figure in short] == [
        *("jct_s", "queueing_s", "makespan_s", "training_gpu_ratio"),
        *("finish_time_fairness",) * 3,
        *("deadlines_met_ratio", "preemptions", "lost_gpu_s"),
    ]


def test_intervals_stand_beside_numbers_and_on_bars() -> None:
    """Over seeds each number has its interval, of one seed none has."""
    seeds = [structs.replace(result("a", 7200.0 + seed), seed=seed) for seed in (1, 100)]
    text = drawn(*seeds, result("b", 9000.0))
    assert "±" in text
    assert "<q style=" in text
    assert "±" not in drawn(result("a"), result("b"))


def test_an_interval_ends_where_its_panel_ends() -> None:
    """Of a share that may be anything by two seeds no line runs beyond 0 or 100 %."""
    seeds = [
        structs.replace(result("a", training_gpu_ratio=use), seed=seed)
        for seed, use in ((1, 0.90), (2, 0.94))
    ]
    text = drawn(*seeds, result("b"))
    spans = re.findall(r'<q style="left:([0-9.]+)%?;width:([0-9.]+)%?">', text)
    assert spans
    assert all(float(left) + float(width) <= 100.01 for left, width in spans)


def test_a_run_of_which_no_job_succeeded_has_no_lines_but_a_page() -> None:
    """Beside others, and by itself."""
    none = structs.replace(played(result("none")), rows=())
    assert page(HEADING, [none])
    assert Page(page(HEADING, [none, played(result("some"))])).open == []


def test_names_are_text_and_not_markup() -> None:
    """A sweep over file names may put anything there."""
    swept = {"workload": 'x"<b>&.csv'}
    text = drawn(result("a", swept=swept), result("b", swept=swept))
    assert "<b>&" not in text
    Page(text)


# --- narrow screens -----------------------------------------------------------------------------


def _rules(text: str) -> dict[str, dict[str, str]]:
    """The declarations of a page's style sheet by selector, those of `@media` left out."""
    sheet = re.sub(r"@(media|supports)[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", text)
    found: dict[str, dict[str, str]] = {}
    for selector, block in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet):
        pairs = (part.split(":", 1) for part in block.split(";") if ":" in part)
        found.setdefault(selector.strip(), {}).update((k.strip(), v) for k, v in pairs)
    return found


def test_names_keep_a_column_that_can_be_read_on_a_narrow_screen() -> None:
    """A cell that may break anywhere is squeezed to one letter by its neighbors unless it says how
    wide it is at least: no built-in name is broken by it."""
    (text,) = re.findall(r"<style>(.*?)</style>", drawn(result("fifo")), re.DOTALL)
    name = _rules(text)["th:first-child"]
    assert name["overflow-wrap"] == "anywhere"
    least = float(name["min-width"].removesuffix("ch"))
    assert len("foresight") + 4 <= least <= float(name["max-width"].removesuffix("ch"))


def test_what_made_a_page_wraps_however_long_a_path_is() -> None:
    """Else one path of the call makes the whole page as wide as itself."""
    (text,) = re.findall(r"<style>(.*?)</style>", drawn(result("fifo")), re.DOTALL)
    assert _rules(text)["p"]["overflow-wrap"] == "anywhere"
