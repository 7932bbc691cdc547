"""The HTML report: complete, self-contained, escaped, and small enough for large models."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from hf_ptq.export.samples import PERFECT_DB
from hf_ptq.export.tensors import WeightError
from hf_ptq.report_html import layer_of, render, write_html
from hf_ptq.report_plots import Html, Point, el, escape, layer_panel, scale_of, shade, ticks

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements (name, attributes), text, and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] != ["style"] else ""

    def of(self, tag, class_=None):
        return [a for name, a in self.elements if name == tag and class_ in (None, a.get("class"))]


def error(module, db=20.0, number_format="nvfp4", signal=1.0):
    return WeightError(module, module.rpartition(".")[2], number_format, signal, signal * 10 ** (-db / 10))


def experts(layers, count, rows=lambda layer, expert: 100):
    return {
        f"model.layers.{layer}.mlp.experts.{product}": {
            "rows": [rows(layer, expert) for expert in range(count)], "amax": [1.0] * count,
        }
        for layer in range(layers) for product in ("gate_up_proj", "down_proj")
    }  # fmt: skip


def a_report(**sections):
    return {
        "versions": {"torch": "2.13.0", "datasets": "not installed"},
        "options": {"qformat": "nvfp4", "recipe": None, "calib_sizes": [8]},
        "source": {"origin": "org/model", "commit": "abc123"},
        "kv_cache": {"algo": "FP8", "keys": "fp8_cast"},
        "bytes": {"source_bytes": 1000, "export_bytes": 300, "effective_bits": 4.72},
        "previews": {"prompt": "Once", "before": "upon a time", "after": "upon the time"},
        "warnings": ["look here"],
        "stages": [
            {"name": "load", "seconds": 2.0, "host_peak_bytes": 5000, "gpu_peak_bytes": {"cuda:0": 7000}},
            {"name": "export", "seconds": 1.0, "host_peak_bytes": None, "gpu_peak_bytes": {}, "failed": True},
        ],
        **sections,
    }


def test_the_page_tells_everything():
    errors = [error("model.layers.0.mlp.experts.0.up_proj"), error("model.layers.0.mlp.experts.1.up_proj", 18.0)]
    text = Page(render(a_report(experts=experts(1, 2)), errors)).text
    for told in ("org/model", "abc123", "recipe nvfp4", "FP8 (fp8_cast)", "torch 2.13.0", "1 kB", "300 B", "30%",
                 "4.72", "look here", "export (failed)", "7 kB", "upon a time", "upon the time",
                 "mlp.experts.*.up_proj", "worst: model.layers.0.mlp.experts.1.up_proj", "expert 1: 100"):  # fmt: skip
        assert told in text, told
    assert "not installed" not in text


def test_of_several_ranks_each_has_a_line():
    rank = {"node": "0, host", "rows": 3, "read bytes": 5_000_000, "gpu peak bytes": None}
    ranks = [{"rank": 0, **rank}, {"rank": 1, **rank, "read bytes": 7_000_000}]
    text = Page(render(a_report(ranks=ranks), [])).text
    assert "Stages of rank 0" in text
    for told in ("Ranks", "5 MB", "7 MB", "0, host", "gpu peak"):
        assert told in text, told
    one = Page(render(a_report(), [])).text
    assert "of rank 0" not in one
    assert "Ranks" not in one


def test_the_page_needs_nothing_from_elsewhere():
    page = Page(render(a_report(experts=experts(2, 4)), [error("model.layers.0.q_proj")]))
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "base"}
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on") or a in ("src", "href")]
    style = re.search(r"<style>(.*?)</style>", render({}, []), re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_everything_is_escaped():
    evil = '</title><script>alert("x")</script><b a=\'&amp;'
    report = {
        "versions": {evil: evil},
        "options": {"recipe": evil, evil: {evil: [evil]}},
        "source": {"origin": evil, "commit": evil},
        "plan": {"device": evil},
        "kv_cache": {"algo": evil, "keys": evil},
        "data": {evil: evil},
        "experts": {f"{evil}.0.up": {"rows": [0, 3], "amax": [0.0, 1.0]}},
        "previews": {"prompt": evil, "before": evil, "after": evil},
        "warnings": [evil],
        "memory_not_watched": [evil],
        "stages": [{"name": evil, "seconds": 1.0}],
        "ranks": [{"rank": 0, "node": evil}],
    }
    text = render(report, [error(f"{evil}.3.{evil}", 20, evil), error(evil, 20, evil)])
    page = Page(text)
    assert not page.of("script")
    assert not [attributes for attributes in page.of("b") if attributes]
    assert page.text.count(evil) >= 16
    assert "<script" not in text


def test_text_that_utf8_cannot_hold_is_replaced(tmp_path):
    path = tmp_path / "new" / "report.html"
    write_html(path, a_report(previews={"prompt": "a\x00\ud800b", "before": "ß\n語", "after": None}), [])
    written = path.read_text(encoding="utf-8")
    assert "a\ufffd\ufffdb" in written
    assert "ß\n語" in written


@pytest.mark.parametrize("report", [{}, {"source": {"origin": "x"}, "previews": None, "experts": {}, "stages": []}])
def test_a_run_without_most_sections_makes_a_page(report):
    page = Page(render(report, []))
    assert "nothing quantized" in page.text
    assert not page.of("svg")


def test_rare_and_starved_experts_are_marked_and_named():
    rows = {(0, 1): 0, (1, 2): 3}
    page = Page(render({"experts": experts(2, 4, lambda layer, expert: rows.get((layer, expert), 100))}, []))
    assert len(page.of("rect", "none")) == len(page.of("path", "cross")) == 1
    assert len(page.of("rect", "rare")) == len(page.of("circle", "few")) == 1
    assert "no token (1)" in page.text
    assert "below 5 % of the mean (1)" in page.text
    assert "layer 1, expert 2: 3" in page.text
    cells = [a for a in page.of("rect") if a["class"] in ("none", "rare") or re.fullmatch(r"h\d", a["class"] or "")]
    assert len(cells) == 8  # both products of a layer see the same tokens: one row a layer


def test_layers_of_the_heat_map_are_in_order_of_numbers():
    layers = {f"model.layers.{i}.mlp.experts.up": {"rows": [10 + i], "amax": [1.0]} for i in (10, 2, 0)}
    text = Page(render({"experts": layers}, [])).text
    found = re.findall(r"layer (\d+), expert 0", text)
    assert found == ["0", "2", "10"]


def test_a_large_model_stays_small():
    kinds = ("gate_proj", "up_proj", "down_proj")
    places = itertools.product(range(48), range(128), kinds)
    errors = [error(f"model.layers.{n}.mlp.experts.{e}.{k}", 20 + e / 128) for n, e, k in places]
    text = render(a_report(experts=experts(48, 128)), errors)
    assert len(text.encode()) < 3_000_000
    page = Page(text)
    assert len(page.of("circle", "dot")) == 48 * 3
    assert len(page.of("polygon", "band")) == 3
    assert len(page.of("rect", "h3")) == 48 * 128


def test_the_ten_worst_modules_are_listed_worst_first():
    errors = [error(f"model.layers.{n}.q_proj", 20 + n) for n in range(15)]
    text = Page(render({}, errors[::-1])).text
    section = text[text.index("The worst 10 of 15") :]
    assert re.findall(r"model\.layers\.(\d+)\.q_proj", section) == [str(n) for n in range(10)]


def test_stacks_of_layers_and_formats_are_kept_apart():
    names = ("model.visual.blocks.0.q_proj", "model.layers.0.q_proj", "lm_head")
    text = Page(render({}, [error(name) for name in names] + [error(names[1], 31, "fp8")])).text
    for told in ("visual.blocks.*.q_proj", "model.layers.*.q_proj", "fp8", "Outside the layers: lm_head (nvfp4) 20.00"):
        assert told in text


def test_a_weight_without_error_does_not_flatten_the_others():
    errors = [error("model.layers.0.q_proj", 20), error("model.layers.1.q_proj", 22),
              WeightError("model.layers.2.q_proj", "q_proj", "nvfp4", 0.0, 0.0)]  # fmt: skip
    heights = [float(a["cy"] or 0) for a in Page(render({}, errors)).of("circle", "dot")]
    assert heights[0] - heights[1] > 50
    assert heights[2] < heights[1]


def test_layers_that_are_apart_are_not_joined():
    points = [Point(layer, 20.0, 19.0, 21.0, "") for layer in (0, 1, 5)]
    page = Page(layer_panel(points, scale_of(points, PERFECT_DB), "label"))
    assert [len((a["points"] or "").split()) for a in page.of("polyline")] == [2, 1]
    assert len(page.of("polygon", "band")) == 2


@pytest.mark.parametrize(("name", "layer"), [
    ("model.layers.12.mlp.experts.3.up_proj", 12), ("lm_head", None), ("h.0", 0), ("model.conv2d.w1", None),
])  # fmt: skip
def test_the_layer_is_the_first_whole_number_of_a_name(name, layer):
    assert layer_of(name) == layer


@pytest.mark.parametrize(("low", "high", "expected"), [
    (18.0, 21.0, [18, 19, 20, 21]), (20.1, 20.9, [20.2, 20.4, 20.6, 20.8]), (0.0, 200.0, [0, 50, 100, 150, 200]),
])  # fmt: skip
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_scale_does_not_blow_up_small_differences():
    points = [Point(0, 20.0, 20.0, 20.01, "")]
    scale = scale_of(points, PERFECT_DB)
    assert scale.high - scale.low == pytest.approx(1.0)
    assert scale_of([], PERFECT_DB).high > scale_of([], PERFECT_DB).low


def test_shades_are_doublings_around_the_mean():
    assert [shade(rows, 100.0) for rows in (6, 25, 50, 100, 199, 200, 400, 800)] == [0, 1, 2, 3, 3, 4, 5, 6]


def test_only_html_passes_unescaped():
    assert el("p", "<", Html("<br>"), title='"', stroke_width=1.25, class_="a", left_out=None) == (
        '<p title="&quot;" stroke-width="1.2" class="a">&lt;<br></p>'
    )
    assert escape("a\tb\n\x1b[31m") == "a\tb\n\ufffd[31m"
