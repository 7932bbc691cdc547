"""One run's report as one page: the error of every layer, the experts' load, where time and memory went.

The page needs nothing but itself: style and plots are inside, there is no script. It is made from what
hf_ptq_report.json holds, and from the errors of the single weights, which are too many for the JSON. Sections that a
run did not have (no experts, no previews, a dry run) are left out.

    signal-to-noise of a layer = 10 log10(sum w^2 / sum (decoded - w)^2), sums over all of its experts

A series is a module's name with its numbers taken out, and a format: experts of a layer are one point with a spread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ptq.export.samples import PERFECT_DB, decibels
from hf_ptq.export.tensors import WeightError
from hf_ptq.quantization.coverage import LayerCoverage, by_layer
from hf_ptq.report_plots import HeatRow, Html, Point, el, escape, heat_legend, heat_map, layer_panel, scale_of
from hf_ptq.sizes import human_bytes

WORST = 10
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name
MAX_NAMED_LAYERS = 200

STYLE = """
:root { color-scheme: light dark; --page: #f9f9f7; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --mute: #6f6e69;
  --grid: #e1e0d9; --axis: #c3c2b7; --series: #2a78d6; --band: #2a78d633; --warn: #fab219; --bad: #d03b3b;
  --h0: #cde2fb; --h1: #9ec5f4; --h2: #6da7ec; --h3: #3987e5; --h4: #256abf; --h5: #184f95; --h6: #0d366b; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --card: #1a1a19; --ink: #fff; --soft: #c3c2b7;
  --mute: #98978f; --grid: #2c2c2a; --axis: #383835; --series: #3987e5; --band: #3987e54d; --bad: #e66767;
  --h0: #0d366b; --h1: #184f95; --h2: #256abf; --h3: #3987e5; --h4: #6da7ec; --h5: #9ec5f4; --h6: #cde2fb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 8px; }
h3 { font-size: 14px; margin: 16px 0 6px; } p { margin: 4px 0 8px; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 16px 20px;
  margin-top: 16px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 16px; }
.tiles div { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 10px 14px; }
.tiles b { display: block; font-size: 22px; font-weight: 600; } .tiles span { color: var(--soft); font-size: 12px; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 14px 18px; }
figure { margin: 0; } figcaption { display: flex; justify-content: space-between; gap: 8px; font-weight: 600;
  font-size: 12.5px; } figcaption span { overflow-wrap: anywhere; } figcaption .soft { white-space: nowrap; }
svg { display: block; } figure svg { width: 100%; height: auto; } svg text { fill: var(--mute); font-size: 10px; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .grid { stroke: var(--grid); }
.axis { stroke: var(--axis); } .line { fill: none; stroke: var(--series); stroke-width: 2; stroke-linejoin: round; }
.band { fill: var(--band); } .dot { fill: var(--series); stroke: var(--card); stroke-width: 1; }
.hit { fill: transparent; } .point:hover .dot { stroke: var(--ink); stroke-width: 2; }
.heat rect:hover { stroke: var(--ink); }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .none { fill: var(--bad); }
.rare { fill: var(--warn); } .cross { stroke: #fff; stroke-width: 1.5; fill: none; pointer-events: none; }
.few { fill: #0b0b0b; pointer-events: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; color: var(--soft); }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; border-radius: 2px; color: #fff;
  font: bold 12px/14px system-ui, sans-serif; text-align: center; vertical-align: -2px; }
.k0 { background: var(--h0); } .k1 { background: var(--h1); } .k2 { background: var(--h2); }
.k3 { background: var(--h3); } .k4 { background: var(--h4); } .k5 { background: var(--h5); }
.k6 { background: var(--h6); } .knone { background: var(--bad); } .legend .krare { background: var(--warn);
  color: #0b0b0b; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } th { color: var(--soft); font-weight: 500; }
th, td { padding: 4px 12px 4px 0; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } code, pre { font-size: 12px;
  font-family: ui-monospace, Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.bar { width: 170px; } .bar i { display: block; height: 12px; margin-top: 4px; min-width: 1px;
  border-radius: 0 4px 4px 0; background: var(--series); }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px; }
pre { white-space: pre-wrap; margin: 0; padding: 10px 12px; border: 1px solid var(--grid); border-radius: 6px; }
.warnings { border-left: 4px solid var(--warn); } .warnings li { margin: 4px 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); } details { margin-top: 10px; }
"""


def write_html(path: Path, report: Mapping[str, Any], errors: Sequence[WeightError]) -> None:
    """Write the page to `path`, whose directory is made if need be. `report`: `Report.as_dict()`. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report, errors), encoding="utf-8")


def render(report: Mapping[str, Any], errors: Sequence[WeightError]) -> str:
    """The page as text."""
    origin = str(_get(report, "source", "origin") or "hf-ptq")
    parts = (
        _head(report, errors, origin),
        _tiles(report, errors),
        _warnings(report),
        _signal_to_noise(errors),
        _worst(errors),
        _experts(report),
        _stages(report),
        _ranks(report),
        _previews(report),
        _details(report),
    )
    body = el("body", *(part for part in parts if part))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(origin)} - hf-ptq</title><style>{STYLE}</style></head>\n{body}\n</html>\n"
    )


def _get(report: Mapping[str, Any], *keys: str) -> Any:
    """A value inside sections; None where one of them is missing."""
    value: Any = report
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _section(title: str, *children: str, class_: str | None = None) -> Html:
    return el("section", el("h2", title), *children, class_=class_)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int]) -> Html:
    """A table; `numeric`: the columns that are set to the right. Cells that are no `Html` are escaped."""
    classes = ["num" if i in numeric else None for i in range(len(columns))]
    head = el("tr", *(el("th", c, class_=k) for c, k in zip(columns, classes, strict=True)))
    lines = [el("tr", *(el("td", c, class_=k) for c, k in zip(row, classes, strict=True))) for row in rows]
    return el("table", el("thead", head), el("tbody", *lines))


# --- what it is --------------------------------------------------------------------------------


def _head(report: Mapping[str, Any], errors: Sequence[WeightError], origin: str) -> Html:
    commit, cache = _get(report, "source", "commit"), _get(report, "kv_cache")
    formats = " + ".join(dict.fromkeys(error.format for error in errors)) or "nothing quantized"
    facts = [
        f"recipe {_get(report, 'options', 'recipe') or _get(report, 'options', 'qformat') or '-'}",
        f"weights {formats}",
        f"KV cache {cache['algo']} ({cache['keys']})" if cache else "KV cache as it was",
        *([f"commit {commit}"] if commit else []),
        *([f"device {_get(report, 'plan', 'device')}"] if _get(report, "plan", "device") else []),
    ]
    versions = _get(report, "versions") or {}
    named = [f"{name} {version}" for name, version in versions.items() if version != "not installed"]
    return el(
        "header",
        el("h1", origin),
        el("p", " · ".join(facts)),
        el("p", " · ".join(named), class_="soft"),
    )


def _tiles(report: Mapping[str, Any], errors: Sequence[WeightError]) -> Html:
    before, after = _get(report, "bytes", "source_bytes"), _get(report, "bytes", "export_bytes")
    bits, stages = _get(report, "bytes", "effective_bits"), _get(report, "stages") or []
    tiles: list[tuple[str, str]] = []
    if before and after:
        tiles += [(human_bytes(before), "weights in"), (human_bytes(after), f"out: {after / before:.0%} of the source")]
    if isinstance(bits, (int, float)):
        tiles.append((f"{bits:.2f}", "bits per weight, scales included"))
    if errors:
        tiles.append((f"{_pooled(errors):.2f} dB", f"signal-to-noise of {len(errors):,} weights together"))
    if stages:
        tiles.append((f"{sum(stage['seconds'] for stage in stages):,.1f} s", "in all stages"))
    return el("div", *(el("div", el("b", value), el("span", label)) for value, label in tiles), class_="tiles")


def _warnings(report: Mapping[str, Any]) -> Html | None:
    warnings = _get(report, "warnings")
    if not warnings:
        return None
    return _section("Warnings", el("ul", *(el("li", str(text)) for text in warnings)), class_="warnings")


def _details(report: Mapping[str, Any]) -> Html | None:
    options = _get(report, "options")
    if not options:
        return None
    rows = [(name, el("code", _plain(value))) for name, value in options.items()]
    data = _get(report, "data")
    if isinstance(data, Mapping):
        rows += [(f"data: {name}", el("code", _plain(value))) for name, value in data.items()]
    return _section("What was asked for", el("details", el("summary", "all options"), _table(["", ""], rows, ())))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_plain, value)) or "-"
    return "-" if value is None else str(value)


# --- the weights' errors -----------------------------------------------------------------------


def layer_of(module: str) -> int | None:
    """The first number in a dotted name; None for a module outside the layers."""
    found = NUMBER.search(module)
    return int(found[0]) if found else None


def _pooled(errors: Sequence[WeightError]) -> float:
    return decibels(sum(error.signal for error in errors), sum(error.noise for error in errors))


def _db(error: WeightError) -> float:
    return decibels(error.signal, error.noise)


def _series(errors: Sequence[WeightError]) -> dict[str, dict[str, list[Point]]]:
    """Format -> pattern of names -> a point for each layer."""
    members: dict[tuple[str, str, int], list[WeightError]] = {}
    for error in errors:
        layer = layer_of(error.module)
        if layer is not None:
            members.setdefault((error.format, NUMBER.sub("*", error.module), layer), []).append(error)
    series: dict[str, dict[str, list[Point]]] = {}
    for (number_format, pattern, layer), group in members.items():
        worst, best = min(group, key=_db), max(group, key=_db)
        value = _pooled(group)
        note = f"layer {layer}: {value:.2f} dB"
        if len(group) > 1:
            note += f"\n{len(group)} modules: {_db(worst):.2f} to {_db(best):.2f} dB\nworst: {worst.module}"
        point = Point(layer, value, _db(worst), _db(best), note)
        series.setdefault(number_format, {}).setdefault(pattern, []).append(point)
    return series


def _signal_to_noise(errors: Sequence[WeightError]) -> Html | None:
    if not errors:
        return None
    parts: list[Html] = []
    for number_format, patterns in _series(errors).items():
        scale = scale_of([point for points in patterns.values() for point in points], PERFECT_DB)
        titles = _short(list(patterns))
        panels = []
        for pattern, points in patterns.items():
            low, high = min(point.low for point in points), max(point.high for point in points)
            extremes = el("span", f"{low:.1f} – {high:.1f}", class_="soft")
            caption = el("figcaption", el("span", titles[pattern]), extremes)
            label = f"{pattern} {number_format}: {low:.2f} to {high:.2f} dB over {len(points)} layers"
            panels.append(el("figure", caption, layer_panel(points, scale, label)))
        parts += [el("h3", number_format), el("div", *panels, class_="panels")]
    others = [error for error in errors if layer_of(error.module) is None]
    outside = [f"{error.module} ({error.format}) {_db(error):.2f} dB" for error in others]
    if outside:
        parts.append(el("p", f"Outside the layers: {', '.join(outside)}.", class_="soft"))
    intro = (
        "dB over the layer number; higher is better. A line is a layer's weights together, the band around it runs "
        "from its worst to its best expert. Panels of a format have one scale."
    )
    return _section("Signal-to-noise of the weights", el("p", intro, class_="soft"), *parts)


def _short(patterns: Sequence[str]) -> dict[str, str]:
    """Titles of name patterns: what follows the layer's number, unless stacks of layers would be mixed up by it."""
    tails = {pattern: pattern.partition("*.")[2] or pattern for pattern in patterns}
    if len({pattern.partition("*.")[0] for pattern in patterns}) > 1:
        return {pattern: pattern for pattern in patterns}
    return tails


def _worst(errors: Sequence[WeightError]) -> Html | None:
    if not errors:
        return None
    together: dict[tuple[str, str], list[WeightError]] = {}
    for error in errors:
        together.setdefault((error.kind, error.format), []).append(error)
    kinds = {key: _pooled(members) for key, members in together.items()}
    rows = []
    for error in sorted(errors, key=_db)[:WORST]:
        kind = kinds[error.kind, error.format]
        below = f"{_db(error) - kind:+.2f}"
        rows.append((el("code", error.module), error.kind, error.format, f"{_db(error):.2f}", below))
    columns = ("module", "kind", "format", "dB", "against its kind")
    return _section(f"The worst {len(rows)} of {len(errors):,} modules", _table(columns, rows, (3, 4)))


# --- experts -----------------------------------------------------------------------------------


def _experts(report: Mapping[str, Any]) -> Html | None:
    found = _get(report, "experts")
    if not found:
        return None
    products = (LayerCoverage(name, tuple(e["rows"]), tuple(e["amax"])) for name, e in found.items())
    layers = {layer: coverage for layer, coverage in by_layer(products).items() if coverage.rows}
    heat = [_heat_row(layer, coverage) for layer, coverage in layers.items()]
    heat.sort(key=lambda row: int(row.label) if row.label.isdecimal() else -1)
    counts = sum(len(row.starved) for row in heat), sum(len(row.rare) for row in heat)
    means = [sum(row.rows) / len(row.rows) for row in heat]
    intro = (
        f"Rows that each expert saw in calibration; layers downwards, experts to the right. "
        f"On average {sum(means) / len(means):,.0f} rows an expert; shades are shares of the layer's own mean."
    )
    return _section(
        "Load of the experts",
        el("p", intro, class_="soft"),
        heat_legend(counts),
        heat_map(heat, f"rows seen by each expert of {len(heat)} layers"),
        *_named_experts(layers),
    )


def _heat_row(layer: str, coverage: LayerCoverage) -> HeatRow:
    number = layer_of(layer)
    label = "" if number is None else str(number)
    return HeatRow(label, coverage.rows, frozenset(coverage.starved), frozenset(coverage.rare))


def _named_experts(layers: Mapping[str, LayerCoverage]) -> Iterator[Html]:
    """The experts that lack data by number, for those who do not hover."""
    lacking = {layer: coverage for layer, coverage in layers.items() if coverage.starved or coverage.rare}
    if lacking:
        rows = [
            (el("code", layer), ", ".join(map(str, c.starved)) or "-", ", ".join(map(str, c.rare)) or "-",
             f"{min(c.rows):,}", f"{sum(c.rows) / len(c.rows):,.0f}", f"{max(c.rows):,}")
            for layer, c in list(lacking.items())[:MAX_NAMED_LAYERS]
        ]  # fmt: skip
        columns = ("experts of", "no token", "below 5 % of the mean", "least", "mean", "most")
        table = _table(columns, rows, (3, 4, 5))
        yield el("details", el("summary", f"experts with little data, in {len(lacking)} layers"), table)


# --- time, memory, texts -----------------------------------------------------------------------


def _stages(report: Mapping[str, Any]) -> Html | None:
    stages = _get(report, "stages")
    if not stages:
        return None
    gpus = [max((stage.get("gpu_peak_bytes") or {}).values(), default=0) for stage in stages]
    hosts = [stage.get("host_peak_bytes") or 0 for stage in stages]
    seconds = [stage["seconds"] for stage in stages]
    rows = []
    for stage, second, host, gpu in zip(stages, seconds, hosts, gpus, strict=True):
        name = stage["name"] + (" (failed)" if stage.get("failed") else "")
        cells = [name, f"{second:,.1f} s", _bar(second, max(seconds))]
        for size, most in ((host, max(hosts)), (gpu, max(gpus))):
            if most:
                cells += [human_bytes(size), _bar(size, most)]
        rows.append(cells)
    sizes = [name for name, most in (("host peak", max(hosts)), ("GPU peak", max(gpus))) if most]
    columns = ["stage", *(cell for name in ("seconds", *sizes) for cell in (name, ""))]
    note = "Host: anonymous and pinned memory of this process above its start. GPU: the fullest card, all processes."
    numeric = range(1, len(columns), 2)
    notes = " ".join([note, *map(str, _get(report, "memory_not_watched") or [])])
    title = "Stages of rank 0" if _get(report, "ranks") else "Stages"
    return _section(title, _table(columns, rows, numeric), el("p", notes, class_="soft"))


def _ranks(report: Mapping[str, Any]) -> Html | None:
    """Of several ranks: what each read and wrote, and its peaks beside what the plan expected."""
    ranks = _get(report, "ranks")
    if not ranks:
        return None
    columns = list(ranks[0])
    rows = [[_amount(column, rank.get(column)) for column in columns] for rank in ranks]
    titles = [column.removesuffix(" bytes") for column in columns]
    return _section("Ranks", _table(titles, rows, [i for i, column in enumerate(columns) if column != "node"]))


def _amount(column: str, value: Any) -> str:
    return human_bytes(value) if value is not None and column.endswith(" bytes") else _plain(value)


def _bar(value: float, most: float) -> Html:
    share = value / most if most else 0.0
    return el("div", el("i", style=f"width:{100 * share:.1f}%"), class_="bar")


def _previews(report: Mapping[str, Any]) -> Html | None:
    previews = _get(report, "previews")
    if not previews:
        return None
    sides = [
        el("div", el("h3", title), el("pre", str(previews.get(key) or "-")))
        for title, key in (("before: as it was", "before"), ("after: weights and activations rounded", "after"))
    ]
    prompt = el("pre", str(previews.get("prompt") or "-"))
    return _section("Previews", el("h3", "prompt"), prompt, el("div", *sides, class_="side"))
