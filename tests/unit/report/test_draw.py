"""Pictures show what the record holds: lanes, bars at their times, the parts of each step."""

import xml.etree.ElementTree as ET

import pytest

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from mlp_offload.report import draw  # noqa: E402
from mlp_offload.report.numbers import GPU_UPDATE, StepNumbers  # noqa: E402
from mlp_offload.telemetry import StepRecord  # noqa: E402


def example(step=1, factor=1.0):
    record = StepRecord(step=step, step_seconds=3.0 * factor)
    events = [("fetch", 0, 0.0, 1.0, "/x/a"), ("fetch", 1, 0.5, 2.0, "/x/a"), ("fetch", 2, 1.0, 1.5, "/x/a")]
    events += [("flush", 0, 2.0, 4.0, "/x/b"), ("update", 0, 1.0, 2.0, ""), ("update", 1, 1.5, 2.5, "cuda")]
    for phase, subgroup, begin, end, path in [*events, ("stall", 0, 0.0, 1.0, "")]:
        record.add(phase, subgroup, begin * factor, end * factor, path)
    return record


def bars(axes):
    """Color -> [(begin, end, row)] of all bars."""
    found = {}
    for bar in axes.collections:
        for path in bar.get_paths():
            box = path.get_extents()
            color = to_hex(bar.get_facecolor()[0])
            found.setdefault(color, []).append((round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2, 2)))
    return found


def test_each_lane_holds_its_events_at_their_times_and_concurrent_ones_below_each_other():
    axes = Figure().subplots()
    draw.draw_step(example(), axes, "title")
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["a\nread", "b\nwrite", "update", "update\non the GPU", "stall"]
    found = bars(axes)
    assert found[draw.COLORS["fetch"]] == [(0.0, 1.0, -0.22), (1.0, 1.5, -0.22), (0.5, 2.0, 0.18)]
    assert found[draw.COLORS["flush"]] == [(2.0, 4.0, 1.0)]
    assert found[draw.COLORS["update"]] == [(1.0, 2.0, 2.0)] and found[draw.COLORS[GPU_UPDATE]] == [(1.5, 2.5, 3.0)]
    assert found[draw.COLORS["stall"]] == [(0.0, 1.0, 4.0)]
    assert axes.get_xlabel() == "s since the start of the step" and axes.get_xlim()[1] == pytest.approx(4.04)
    assert [text.get_text() for text in axes.texts] == ["the step returns, flushes go on"]


def test_short_steps_are_in_milliseconds():
    axes = Figure().subplots()
    draw.draw_step(example(factor=0.1), axes)
    assert axes.get_xlabel() == "ms since the start of the step"
    assert bars(axes)[draw.COLORS["flush"]] == [(200.0, 400.0, 1.0)]
    lower = Figure().subplots()
    draw.draw_history([StepNumbers.of(example(k, 0.1)) for k in (1, 2)], lower)
    assert lower.get_ylabel() == "ms a step" and lower.get_ylim()[1] > 300


def test_the_history_stacks_what_the_trainer_did_up_to_the_whole_step():
    axes = Figure().subplots()
    draw.draw_history([StepNumbers.of(example(k, k)) for k in (1, 2, 3)], axes)
    tops = [max(y for _, y in layer.get_paths()[0].vertices) for layer in axes.collections]
    assert tops == pytest.approx([3.0, 6.0, 9.0])  # of step 3: update on the CPU, stall, rest
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["fetch, in parallel"] == [2.0, 4.0, 6.0] and lines["flush, in parallel"] == [2.0, 4.0, 6.0]
    assert axes.get_xlabel() == "step"
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"update", "stall", "rest of the step"}


def test_long_runs_are_thinned_to_medians():
    axes = Figure().subplots()
    draw.draw_history([StepNumbers.of(example(k, 9.0 if k % 10 == 0 else 1.0)) for k in range(1, 4001)], axes)
    (line,) = [line for line in axes.lines if line.get_label().startswith("fetch")]
    assert len(line.get_ydata()) == draw.MOST_POINTS and set(line.get_ydata()) == {2.0}


def test_svg_is_one_element_with_its_text_in_either_brightness():
    record = example()
    pictures = [(record, [StepNumbers.of(record)], "above", "below")]
    light, dark = (draw.to_svg(draw.figure(pictures, dark), dark) for dark in (False, True))
    for svg, ink in ((light, "#1b1b1b"), (dark, "#e6e6e6")):
        root = ET.fromstring(svg)
        assert root.tag.endswith("}svg") and ">above</text>" in svg and ink in svg
    assert "#e6e6e6" not in light


@pytest.mark.parametrize(
    "paths, names",
    [
        (["/nvme0/x", "/nvme1/x"], ["nvme0/x", "nvme1/x"]),
        (["/a/b/", "/a/c"], ["b", "c"]),
        (["/scratch"], ["scratch"]),
        (["/a", "/b/a"], ["/a", "b/a"]),
        ([], []),
    ],
)
def test_paths_are_named_as_short_as_tells_them_apart(paths, names):
    assert list(draw.short_names(paths).values()) == names
